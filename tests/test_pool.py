"""The pool itself: a raise, a death or a hang of one rank is a failure that shows what every rank
was doing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from kit.pool import Pool, WorkerError

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
