"""The timed world: one process as rank k of N, whose collectives take the time of a wire, and
deliver what they would if all ranks held the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from kit.models import Net
from kit.oracle import batch
from kit.timed import FAST, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import compiled_fsdp
from compiled_fsdp.planning.calibrate import calibrate
from compiled_fsdp.planning.costs import Link
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.wire.timed import TimedGroup
from compiled_fsdp.wire.world import Wire, World, timed_world

if TYPE_CHECKING:
    pass


def test_a_collective_occupies_the_wire() -> None:
    """The second begins when the first is through; who waits, waits for the rest."""
    with ranks(4, bandwidth=1e8, latency=1e-2) as world:
        mine, everyones = torch.ones(250_000), torch.empty(1_000_000)
        begin = time.perf_counter()
        first = dist.all_gather_into_tensor(everyones, mine, async_op=True)
        second = dist.reduce_scatter_tensor(mine, everyones, async_op=True)
        assert not second.is_completed()
        second.wait()
        assert first.is_completed()
        assert time.perf_counter() - begin >= 2 * (1e-2 + 3e6 / 1e8)
        gathered, scattered = world.carried
        for carried in (gathered, scattered):
            assert carried.num_bytes == 3e6
        assert gathered.seconds == pytest.approx(1e-2 + 3e6 / 1e8)
        assert (gathered.kind, scattered.kind) == ("all_gather", "reduce_scatter")
        assert gathered.blocked == 0.0 < scattered.blocked


def test_sending_takes_time_of_the_core() -> None:
    """While the wire is busy; planning knows it."""
    with ranks(4, bandwidth=3e7, issue=1e-8) as world:
        mine, everyones = torch.ones(250_000), torch.empty(1_000_000)
        begin = time.perf_counter()
        gather = dist.all_gather_into_tensor(everyones, mine, async_op=True)
        issued = time.perf_counter() - begin
        gather.wait()
        waited = time.perf_counter() - begin
        assert 0.03 <= issued < waited
        assert world.carried[0].seconds == pytest.approx(0.1)
        assert world.carried[0].blocked < 0.1 - 0.03 + 1e-3


def test_what_is_delivered() -> None:
    """As if every rank held what this one holds."""
    with ranks(4, rank=1) as world:
        x = torch.arange(8.0)
        out = torch.empty(32)
        dist.all_gather_into_tensor(out, x)
        assert torch.equal(out, x.repeat(4))
        parts = [torch.empty(8) for _ in range(4)]
        dist.all_gather(parts, x)
        assert all(torch.equal(part, x) for part in parts)
        for op, expected in (("SUM", 4 * x[2:4]), ("AVG", x[2:4]), ("MAX", x[2:4])):
            part = torch.empty(2)
            dist.reduce_scatter_tensor(part, x, op=getattr(dist.ReduceOp, op))
            assert torch.equal(part, expected), op
        y = x.clone()
        dist.all_reduce(y)
        assert torch.equal(y, 4 * x)
        z = torch.empty(8)
        dist.all_to_all_single(z, x)
        assert torch.equal(z, x)
        z = torch.full((10,), 7.0)
        dist.all_to_all_single(z, x, [1, 2, 3, 4], [2, 2, 2, 2])
        assert torch.equal(z, torch.cat([x, torch.zeros(2)]))
        dist.broadcast(y, 0)
        dist.barrier()
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}] * 4
        assert torch.equal(funcol.all_gather_tensor(x, 0, dist.group.WORLD), x.repeat(4))
        assert torch.equal(funcol.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD) + 0, x[2:4])
        assert torch.equal(funcol.all_reduce(x, "sum", dist.group.WORLD) + 0, 4 * x)
        sent = {each.kind: each.num_bytes for each in world.carried}
        assert sent["all_reduce"] == 2 * 0.75 * 32


def test_who_waits_where() -> None:
    """By a functional collective, by a future, and not at all; waking late is counted apart."""
    with ranks(4, latency=0.2) as world:
        x = torch.ones(8)
        started = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        begin = time.perf_counter()
        torch.ops._c10d_functional.wait_tensor(started)
        waited = time.perf_counter() - begin
        (carried,) = world.carried
        assert 0.02 < carried.blocked <= 0.2
        assert carried.blocked + carried.late <= waited
        begin = time.perf_counter()
        future = dist.all_reduce(x, async_op=True).get_future()
        assert time.perf_counter() - begin < 0.2
        assert future.wait()[0] is x
        assert time.perf_counter() - begin >= 0.2
        assert world.carried[1].is_by_future
        time.sleep(0.2)
        dist.all_reduce(x, async_op=True)
        assert world.carried[2].blocked == 0.0


def test_costs_are_those_of_the_wire() -> None:
    """Nothing is gathered to measure it: 1,024 ranks of 8 MB would need 8 GB."""
    with ranks(1024, bandwidth=3e9, latency=1e-4, per_node=8) as world:
        shard = init_device_mesh("cpu", (128, 8), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Linear(8, 8)
        compiled_fsdp.fully_shard(model, mesh=shard)
        costs = calibrate([model._get_fsdp_state().unit.mesh_info])
        network, link = (
            costs.link(common_name(shard.get_group(axis).group_name)) for axis in (0, 1)
        )
        assert network == Link(1e-4, 3e9, 0.0, 3e9, 3e9)
        assert link == Link(0.0, FAST, 0.0, FAST, FAST)
        assert max(each.num_bytes for each in world.carried) < 1e6


def test_groups_within_a_node_use_the_link() -> None:
    with ranks(8, rank=5, per_node=4) as world:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("across", "within"))
        for name, wire in (("across", "network"), ("within", "link")):
            dist.all_reduce(torch.ones(2), group=mesh.get_group(name))
            assert world.carried[-1].wire == wire
        assert mesh.get_local_rank("within") == 1
        dist.all_reduce(torch.ones(2))
        assert world.carried[-1].wire == "network"


def test_a_group_in_what_is_compiled() -> None:
    """Its size is a constant there, as a mixture of experts asks for it."""

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x / dist.get_world_size(group)

    with ranks(4):
        group = dist.group.WORLD
        call = torch.compile(shared, fullgraph=True, backend="eager")
        assert call(torch.ones(1)).item() == 0.25
    torch._dynamo.reset()


def test_a_step_of_ours_and_of_stock() -> None:
    """The same losses, as many bytes; compiled in fewer collectives."""
    found = {}
    with ranks(4) as world:
        for kind in ("stock", "eager", "compiled"):
            torch.manual_seed(0)
            model = Net()
            shard = stock_fully_shard if kind == "stock" else compiled_fsdp.fully_shard
            for module in (*model.layers, model):
                shard(module)
            call = model
            if kind == "compiled":
                call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            before = len(world.carried)
            losses = []
            for step in range(2):
                loss = call(batch(step=step)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
                with torch.no_grad():
                    for p in model.parameters():
                        p.to_local().sub_(p.grad.to_local(), alpha=0.1)
                model.zero_grad()
            sent = [each.num_bytes for each in world.carried[before:]]
            found[kind] = losses, sum(sent), len(sent)
    assert found["eager"][:2] == found["stock"][:2]
    assert found["compiled"][0] == found["stock"][0]
    assert found["compiled"][2] <= found["eager"][2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4), "a timed world of 4 ranks has no rank 4"),
        ((6, 0), "6 ranks cannot have 4 on each node: nodes must be full"),
    ],
)
def test_worlds_that_cannot_be(arguments: tuple[int, int], message: str) -> None:
    wire = Wire("network", FAST)
    with pytest.raises(ValueError, match=message):
        World(*arguments, wire, wire, 4)


def test_wires_that_cannot_be() -> None:
    for numbers in ((0.0, 0.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match=r"the wire 'slow' has a bandwidth of .* bytes/s and"):
            Wire("slow", *numbers)


def test_what_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'timed' was made outside of a timed world"):
        TimedGroup(0, 2)
    with ranks(2):
        with pytest.raises(NotImplementedError, match="all_reduce got some on meta"):
            dist.distributed_c10d._get_default_group().allreduce([torch.empty(2, device="meta")])
        with (
            pytest.raises(RuntimeError, match="in a timed world already"),
            timed_world(World(2, 0, Wire("a", 1.0), Wire("b", 1.0))),
        ):
            pass
