"""Ranks settle on one call from which units run eagerly, in every order in which their threads come
along.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch.distributed as dist
from kit.oracle import ShardPlacementResult, needs_meshes_of_their_own
from kit.passes_harness import fake_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from compiled_fsdp import fully_shard
from compiled_fsdp.frontend.together import REFUSED, Together, _axes, as_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

CALLS = 40


def circle(size: int, patience: float = 30.0) -> list[Together]:
    store = dist.HashStore()
    return [Together(store, range(size), rank, patience) for rank in range(size)]


def settle(ranks: Sequence[Together]) -> None:
    """Let every rank look until no round is open."""
    for _ in range(4):
        for rank in ranks:
            rank.look()


def run(ranks: Sequence[Together], seed: int, *, in_step: bool) -> list[dict[int, int]]:
    """A call after another on every rank, while one thread looks for all of them; for each rank,
    which unit changed at which call.

    Every rank wishes at first, and now and then. in_step: a call ends when all ranks have begun it,
    as where it communicates.
    """
    changes: list[dict[int, int]] = [{} for _ in ranks]
    together, is_over = threading.Barrier(len(ranks)), threading.Event()

    def program(number: int) -> None:
        draw = random.Random(seed * 10 + number)
        for call in range(1, CALLS + 1):
            changes[number].update(dict.fromkeys((unit for unit, _ in ranks[number].begin()), call))
            if call == 1 or draw.random() < 0.1:
                ranks[number].wish(draw.randrange(5), "a reason")
            time.sleep(0.05 if call == CALLS // 2 else draw.random() * 0.002)
            if in_step:
                together.wait(20.0)

    def look() -> None:
        draw = random.Random(seed)
        while not is_over.is_set():
            draw.choice(ranks).look()
            time.sleep(draw.random() * 0.0005)

    threads = [threading.Thread(target=program, args=(number,)) for number in range(len(ranks))]
    looking = threading.Thread(target=look)
    for thread in (looking, *threads):
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads), "a call is held for good"
    is_over.set()
    looking.join()
    return changes


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_all_change_at_the_same_call(seed: int, in_step: bool) -> None:
    ranks = circle(2 + seed % 3)
    changes = run(ranks, seed, in_step=in_step)
    assert all(found == changes[0] for found in changes)
    assert changes[0], "nobody's wish came true"


def test_nothing_is_read_while_nobody_wishes() -> None:
    ranks = circle(2)
    settle(ranks)
    assert [rank.begin() for rank in ranks] == [[], []]
    assert not any(rank.holds or rank.round for rank in ranks)


def test_from_the_largest_call_that_nobody_has_begun() -> None:
    ahead, behind = circle(2)
    for _ in range(5):
        ahead.begin()
    behind.begin()
    behind.wish(3, "why")
    settle([behind, ahead, behind])
    assert [behind.begin() for _ in range(5)] == [[], [], [], [], [(3, "why")]]
    assert ahead.begin() == [(3, "why")]


def test_a_rank_that_is_gone_changes_nothing() -> None:
    here, _ = circle(2, patience=0.05)
    here.wish(0, "why")
    here.look()
    assert here.holds
    time.sleep(0.1)
    here.look()
    assert here.begin() == []
    assert here.round == 1


def test_a_rank_that_answers_too_late_does_as_the_others() -> None:
    early, late = circle(2, patience=0.05)
    early.wish(0, "why")
    early.look()
    time.sleep(0.1)
    settle([early, late])
    assert [early.begin(), late.begin()] == [[], []]
    late.wish(1, "again")
    settle([early, late])
    assert [early.begin(), late.begin()] == [[(1, "again")]] * 2


def test_a_rank_whose_calls_nobody_counts() -> None:
    one, other = circle(2)
    other.is_inlined = True
    one.wish(0, "why")
    settle([one, other])
    assert [one.begin(), other.begin()] == [[], []]
    assert one.store is other.store is None
    one.wish(0, "why")
    assert not one.wishes
    assert REFUSED < 0


class GoneStore:
    """What is left of a store whose host has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_holds_nobody() -> None:
    (rank, _) = circle(2)
    rank.wish(0, "why")
    rank.look()
    assert rank.holds
    rank.store = GoneStore()
    rank.look()
    assert rank.begin() == []


@pytest.mark.parametrize("seed", range(20))
def test_ranks_as_spans(seed: int) -> None:
    ranks = set(random.Random(seed).sample(range(40), seed))
    spans = as_spans(ranks)
    assert sorted(rank for span in spans for rank in range(*span)) == sorted(ranks)


def test_a_mesh_is_few_spans() -> None:
    """Each rank tells each other its own: 1,000 numbers from each of 1,000 ranks would be gigabytes
    in one store.
    """
    assert as_spans(range(10_000)) == [(0, 10_000, 1)]
    assert as_spans(range(3, 10_000, 8)) == [(3, 9_996, 8)]


@needs_meshes_of_their_own
@pytest.mark.parametrize("last", [1, 2])
def test_all_ranks_ask_over_the_same_of_two_meshes(last: int) -> None:
    """Of a unit whose parameters are cut over two meshes of one size (experts, dense layers), in
    whatever order a process keeps a set of these: they hash differently in each.
    """
    with fake_ranks(4):
        model = nn.Linear(8, 8)
        flat = FSDPMeshInfo(init_device_mesh("cpu", (4,)), shard_mesh_dim=0)
        result = {model.bias: ShardPlacementResult(None, flat)}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        sharded = fully_shard(model, mesh=mesh, shard_placement_fn=result.get)
        with mock.patch.object(DeviceMesh, "__hash__", lambda mesh: int(mesh.ndim == last)):
            axes = _axes(fully_shard.state(sharded).unit)  # type: ignore[attr-defined]
        assert [group.size() for group in axes] == [2, 2]
