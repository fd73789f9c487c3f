"""The pool itself: a raise, a death or a hang of one rank is a failure that shows what every rank
was doing.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from kit import shuffled
from kit.pool import Pool, WorkerError

from compiled_fsdp.units import reads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of its own: these tests break it."""
    pool = Pool(2)
    yield pool
    pool.close()


def add_ranks(x: int) -> int:
    total = torch.tensor(dist.get_rank() + x)
    dist.all_reduce(total)
    return int(total)


def orders() -> tuple[str, list[str]]:
    """What kind of set a module of ours makes, and the order of one."""
    made: set[str] = type(reads._staying)("abcdefghij")
    return type(made - {"a"}).__name__, list(made)


def test_sets_of_ours_have_another_order_on_each_rank(pool: Pool) -> None:
    """As in processes that torchrun starts; these are forked from one."""
    (kind, one), (_, other) = pool.run(orders)
    assert kind == "Shuffled"
    assert one != other
    assert sorted(one) == sorted(other)


def test_sets_that_are_shuffled() -> None:
    """As any set, but for the order; they are sent to other processes as plain ones."""
    made = shuffled.Shuffled([1, 2, 3])
    assert made == {1, 2, 3}
    for each in (made | {4}, made - {1}, {4} - made, made.union([4])):
        assert type(each) is shuffled.Shuffled
    assert type(pickle.loads(pickle.dumps(made))) is set
    assert shuffled.ShuffledFrozen([1]) | {2} == {1, 2}


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one objects")


def hang_on_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.1)  # what the parent has to notice
    add_ranks(0)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_results_by_rank_and_failures_of_every_kind(pool: Pool) -> None:
    assert pool.run(add_ranks, 1) == [3, 3]
    with pytest.raises(WorkerError, match=r"(?s)rank 1: error.*ValueError: rank one objects"):
        pool.run(raise_on_one)
    assert pool.run(add_ranks, 2) == [5, 5], "a new pool"
    with pytest.raises(
        WorkerError, match=r"(?s)rank 0: no answer.*add_ranks.*rank 1: no answer.*hang_on_one"
    ):
        pool.run(hang_on_one, timeout=2.0)
    with pytest.raises(WorkerError, match=r"rank 1: died"):
        pool.run(die_on_one)
