"""All-gather and all-to-all by sends and receives: the same as gloo's own, for any dtype, order and
group size.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from kit.pool import Pool

from compiled_fsdp.wire import gloo

if TYPE_CHECKING:
    from pathlib import Path

wait = torch.ops._c10d_functional.wait_tensor
TIMEOUT = timedelta(seconds=15)


@pytest.mark.parametrize("world", [2, 4])
def test_same_as_gloos_own(world: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({2: "two", 4: "four"}[world]).run(same_as_gloos_own)


def same_as_gloos_own() -> None:
    name, world = dist.group.WORLD.group_name, dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        shard = (torch.arange(7) + 100 * dist.get_rank()).to(dtype)
        expected = torch.empty(7 * world, dtype=dtype)
        dist.all_gather_into_tensor(expected, shard)
        assert torch.equal(wait(torch.ops.fsdp.all_gather(shard, [7], world, name)), expected), (
            dtype
        )
        pieces = [
            expected.view(world, 7)[:, columns].flatten()
            for columns in (slice(0, 4), slice(4, 5), slice(5, 7))
        ]
        assert torch.equal(
            wait(torch.ops.fsdp.all_gather(shard, [4, 1, 2], world, name)), torch.cat(pieces)
        ), dtype


def test_messages_outlive_the_profile_that_saw_them_start(two: Pool) -> None:
    two.run(outlive_a_profile)


def outlive_a_profile() -> None:
    """As with `overlap_optimizer`, whose gathers start in one step and are awaited in the next:
    torch 2.13 crashes there if it has a record of them, outside any profile and inside another.
    """
    for other in (nullcontext(), torch.profiler.profile(record_shapes=True)):
        with torch.profiler.profile(record_shapes=True) as profiler:
            started = [
                gloo.start(torch.ones(8), [4, 4], 2, dist.group.WORLD.group_name, "w", "forward")
                for _ in range(8)
            ]
            rows = gloo.all_to_all([torch.ones(2, 4)], 2, dist.group.WORLD.group_name)
        assert not {"gloo:send", "gloo:recv"} & {event.name for event in profiler.events()}
        with other:
            assert all(work.wait() and out.sum() == 16 for out, work in started)
            assert wait(rows).sum() == 8


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_all_of_pieces(world: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({2: "two", 4: "four"}[world]).run(all_to_all_of_pieces)


def all_to_all_of_pieces() -> None:
    """As of the pieces side by side; pieces may be strided."""
    name, world = dist.group.WORLD.group_name, dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = (torch.arange(world * 6).view(world, 6) + 1000 * dist.get_rank()).to(dtype)
        expected = torch.empty_like(rows)
        dist.all_to_all_single(expected, rows)
        pieces = [rows[:, :3], rows[:, 3:4].clone(), rows.t().contiguous().t()[:, 4:]]
        assert torch.equal(wait(gloo.all_to_all(pieces, world, name)), expected), dtype


def test_many_in_flight_are_awaited_in_any_order(two: Pool) -> None:
    two.run(any_order)


def any_order() -> None:
    """Ranks wait in opposite orders, and drop what they sent at once, with a message of the user's
    own in between.
    """
    rank, name, before = dist.get_rank(), dist.group.WORLD.group_name, set(gloo._pending)
    under_way = [
        torch.ops.fsdp.all_gather(torch.full((50_000,), 10.0 * n + rank), [50_000], 2, name)
        for n in range(5)
    ]
    message = torch.full((3,), float(rank))
    work = dist.isend(message, 1 - rank, tag=0)
    dist.recv(message.clone(), 1 - rank, tag=0)
    work.wait()
    for n, out in sorted(enumerate(under_way), reverse=bool(rank)):
        halves = wait(out).view(2, -1)
        assert halves[0].unique().tolist() == [10.0 * n]
        assert halves[1].unique().tolist() == [10.0 * n + 1]
    assert gloo._pending == before


def test_a_group_that_was_made_again(tmp_path: Path) -> None:
    """One rank may have sent more over the group of before, whose name torch gives the new one."""
    pool = Pool(2)
    try:
        pool.run(made_again, str(tmp_path / "store"), timeout=60.0)
    finally:
        pool.close()


def made_again(path: str) -> None:
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    if rank == 0:  # the other has raised before it came to this; of no bytes nothing is sent
        gloo.start(torch.ones(0), [0], 2, name)
    dist.destroy_process_group()
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    assert dist.group.WORLD.group_name == name
    out, work = gloo.start(torch.full((4,), float(rank)), [4], 2, name)
    work.wait()
    assert out.tolist() == [0.0] * 4 + [1.0] * 4


def test_the_graph_runs_our_gather(two: Pool) -> None:
    two.run(graph_runs_our_gather)


def graph_runs_our_gather() -> None:
    """Both executors: gloo's own all-gather corrupts its heap, so nothing must call it."""
    from compiled_fsdp import fully_shard

    for backend in ("compiled_fsdp_eager", "inductor"):
        model = fully_shard(torch.nn.Linear(6, 5))
        call = torch.compile(model, backend=backend, fullgraph=True)
        call(torch.ones(2, 6)).sum().backward()
        with torch.profiler.profile() as profiler:
            call(torch.ones(2, 6)).sum().backward()
        names = [e.name for e in profiler.events()]
        assert "fsdp::all_gather" in names
        assert "fsdp::all_to_all" in names
        assert not {"gloo:all_gather", "gloo:all_to_all"} & set(names)
