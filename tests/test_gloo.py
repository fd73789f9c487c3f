"""All-gather by sends and receives: the same as gloo's own, whatever the dtype, the order of waits and the size of the group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from compiled_fsdp import gloo

wait = torch.ops._c10d_functional.wait_tensor


@pytest.mark.parametrize("world", [2, 4])
def test_same_as_gloos_own(world: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({2: "two", 4: "four"}[world]).run(same_as_gloos_own)


def same_as_gloos_own() -> None:
    name, world = dist.group.WORLD.group_name, dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        shard = (torch.arange(7) + 100 * dist.get_rank()).to(dtype)
        expected = torch.empty(7 * world, dtype=dtype)
        dist.all_gather_into_tensor(expected, shard)
        assert torch.equal(wait(gloo.all_gather(shard, world, name)), expected), dtype


def test_many_in_flight_are_awaited_in_any_order(two: Pool) -> None:
    two.run(any_order)


def any_order() -> None:
    """Ranks wait in opposite orders, and drop what they sent at once, with a message of the user's own in between."""
    rank, name, before = dist.get_rank(), dist.group.WORLD.group_name, set(gloo._pending)
    under_way = [gloo.all_gather(torch.full((50_000,), 10.0 * n + rank), 2, name) for n in range(5)]
    message = torch.full((3,), float(rank))
    work = dist.isend(message, 1 - rank, tag=0)
    dist.recv(message.clone(), 1 - rank, tag=0)
    work.wait()
    for n, out in sorted(enumerate(under_way), reverse=bool(rank)):
        halves = wait(out).view(2, -1)
        assert halves[0].unique().tolist() == [10.0 * n]
        assert halves[1].unique().tolist() == [10.0 * n + 1]
    assert gloo._pending == before


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
        assert "gloo:all_gather" not in names
