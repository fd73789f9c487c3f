"""Processes that share a store which others have used before them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from compiled_fsdp.wire.meeting import meet

SIZE = 3


def all_meet(store: dist.Store, ranks: range) -> list[str]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: meet(store, rank, SIZE, 10.0), ranks))


def test_all_get_one_name_and_every_generation_another() -> None:
    store = dist.HashStore()
    names = [all_meet(store, range(SIZE)) for _ in range(5)]
    assert all(len(set(generation)) == 1 for generation in names)
    assert len({generation[0] for generation in names}) == 5


@pytest.mark.parametrize("absent", range(SIZE))
def test_what_a_dead_rank_left_is_not_taken_for_an_answer(absent: int) -> None:
    store = dist.HashStore()
    all_meet(store, range(SIZE))
    present = [rank for rank in range(SIZE) if rank != absent]
    with ThreadPoolExecutor(SIZE) as pool:
        waiting = {rank: pool.submit(meet, store, rank, SIZE, 0.3) for rank in present}
        for rank, future in waiting.items():
            with pytest.raises(TimeoutError, match=re.escape(str(absent))) as caught:
                future.result()
            assert rank not in caught.value.args
    assert len(set(all_meet(store, range(SIZE)))) == 1, "those who come later meet"


def test_a_rank_that_comes_late_is_waited_for() -> None:
    store = dist.HashStore()
    all_meet(store, range(SIZE))
    with ThreadPoolExecutor(SIZE) as pool:
        early = [pool.submit(meet, store, rank, SIZE, 10.0) for rank in (0, 1)]
        with pytest.raises(TimeoutError):
            early[0].result(0.2)
        late = meet(store, 2, SIZE, 10.0)
        assert [future.result() for future in early] == [late, late]
