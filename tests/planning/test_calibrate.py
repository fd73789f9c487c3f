"""Costs are measured in the first forward, agreed by all ranks, and part of the compile cache's
key; budgets are kept.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.graphs import captured
from kit.pool import Pool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compiled_fsdp
from compiled_fsdp import fully_shard
from compiled_fsdp.compiler import budget
from compiled_fsdp.compiler.inductor import HalfPass, JointPass
from compiled_fsdp.ir.graph import is_matmul
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.planning import calibrate
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import Plan, current_plan, set_plan
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.wire import launch


def test_measured_once_and_agreed(two: Pool) -> None:
    plans = two.run(measured_once)
    assert plans[0] == plans[1]


def measured_once() -> str:
    before = current_plan()
    try:
        set_plan(
            Plan(prefetch=None, backward_prefetch=None, reduces_in_flight=None, bucket_bytes=0)
        )
        model = fully_shard(torch.nn.Linear(6, 5))
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        call(torch.ones(2, 6)).sum().backward()
        plan = current_plan()
        assert plan.costs is not None
        assert all(x > 0 for x in (plan.costs.flops, plan.costs.bandwidth, plan.costs.overhead))
        ((name, link),) = plan.costs.links
        assert name == dist.group.WORLD.group_name
        assert link.latency > 0
        assert link.bandwidth > 0
        # Not cached: a rank with a warm cache would miss what the others agree on.
        assert (JointPass().uuid(), HalfPass().uuid()) == (None, None)
        another = fully_shard(torch.nn.Linear(6, 5))
        torch.compile(another, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(2, 6))
        assert current_plan() is plan
        return repr(plan)
    finally:
        set_plan(before)


def test_distances_that_are_set_need_no_costs(two: Pool) -> None:
    two.run(no_costs)


def no_costs() -> None:
    model = fully_shard(torch.nn.Linear(6, 5))
    model(torch.ones(2, 6))
    assert current_plan().costs is None


def test_both_axes_of_hsdp_agree(four: Pool) -> None:
    assert len(set(four.run(both_axes))) == 1


def both_axes() -> tuple[float, ...]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(torch.nn.Linear(6, 5), mesh=mesh)
    info = model._get_fsdp_state().unit.mesh_info
    costs = calibrate.calibrate([info])
    assert costs is not None
    assert [name for name, _ in costs.links] == [
        common_name(mesh[axis].get_group().group_name) for axis in ("shard", "replicate")
    ]
    return (
        costs.flops,
        costs.bandwidth,
        costs.overhead,
        *(x for _, link in costs.links for x in (link.latency, link.bandwidth)),
    )


def test_tensor_parallel_ranks_agree(four: Pool) -> None:
    """Each of two shard groups measures its own link; the graphs of both have the collectives of
    tensor parallelism, in one order.
    """
    assert len(set(four.run(beside_tensor_parallelism))) == 1


def tensor_parallel() -> tuple[torch.nn.Module, DeviceMesh]:
    """Two linear layers, sharded over one axis and split over the other."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def beside_tensor_parallelism() -> str:
    model, mesh = tensor_parallel()
    before, original = current_plan(), calibrate._link

    def link(*args: Any) -> list[float]:
        return [x * (1 + mesh["tp"].get_local_rank()) for x in original(*args)]

    try:
        set_plan(Plan(prefetch="auto", backward_prefetch="auto", bucket_bytes="auto"))
        with mock.patch.object(calibrate, "_link", link):
            call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            call(torch.ones(2, 6)).sum().backward()
        return repr(current_plan().costs)
    finally:
        set_plan(before)


def test_kernels_agree_beside_tensor_parallelism(four: Pool) -> None:
    assert len(set(four.run(kernels_beside_tensor_parallelism))) == 1


def kernels_beside_tensor_parallelism() -> str:
    model, _ = tensor_parallel()
    before = current_plan()
    try:
        set_plan(replace(before, costs=MACHINE))
        return repr(compiled_fsdp.measure_kernels(model, torch.ones(2, 6)))
    finally:
        set_plan(before)


MACHINE = Costs(3e10, 8e9, 2e-6, (("0", Link(1e-3, 1e8)),))


def test_a_budget_keeps_what_fits(two: Pool) -> None:
    two.run(keeps_what_fits)


def keeps_what_fits() -> None:
    """More memory, fewer gathers; the same losses and gradients; the peak within the budget, by the
    exact measure.
    """
    from measure import peak_tensor_bytes

    width, layers = 192, 6
    seen = {}
    for share in (None, 0.0, 0.5, 1.0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
        all_peaks: list[tuple[int, int]] = []
        original = budget.PeakModel.of

        def spy(trial, candidates, all_peaks=all_peaks, original=original):  # type: ignore[no-untyped-def]
            model = original(trial, candidates)
            least, *_, greatest = model.peaks()
            all_peaks.append((least, greatest))
            return model

        with mock.patch.object(budget.PeakModel, "of", spy):
            with compiled_fsdp.planned(memory_budget=share, costs=replace(MACHINE)):
                call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
                x = torch.randn(64, width, requires_grad=True)
                loss = call(x).square().mean()
                loss.backward()
        grads = [p.grad.to_local().clone() for p in model.parameters()]

        def step(call=call, x=x, model=model):  # type: ignore[no-untyped-def]
            call(x).square().mean().backward()
            model.zero_grad()

        with torch.profiler.profile() as profiler:
            step()
        gathers = sum(e.name == "fsdp::all_gather" for e in profiler.events())
        seen[share] = loss.item(), grads, gathers, peak_tensor_bytes(step).above_rest, all_peaks
    losses, grads, gathers, peaks, trials = ({k: v[i] for k, v in seen.items()} for i in range(5))
    assert len(set(losses.values())) == 1
    for other in (0.0, 0.5, 1.0):
        assert all(torch.equal(a, b) for a, b in zip(grads[None], grads[other], strict=True))
    assert trials[None] == trials[1.0] == []
    assert gathers[None] >= gathers[0.0] > gathers[0.5] > gathers[1.0] == layers
    assert peaks[0.5] < peaks[1.0]
    ((least, most),) = trials[0.5]
    assert peaks[0.5] <= 1.05 * (least + most) / 2
    assert most == pytest.approx(peaks[1.0], rel=0.05), (
        "what keeping adds is what it was expected to add"
    )


def test_a_budget_chooses_slices_too(four: Pool) -> None:
    four.run(chooses_slices)


def chooses_slices() -> None:
    """Units with a smaller mesh: dropped, then sliced, then kept, the last ones first; the same
    gradients.
    """
    found, grads = {}, {}
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(6)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=2)
        fully_shard(model)
        with compiled_fsdp.planned(memory_budget=share), captured() as halves:
            x = torch.ones(64, 192, requires_grad=True)
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(
                x
            ).square().mean().backward()
        specs = {
            s.fqn: s.reshard
            for half in halves
            for r in find_regions(half, "gather")
            for s in r.tag.specs
            if r.starts
        }
        found[share] = [specs[f"{n}.weight"] for n in range(6)]
        grads[share] = [p.grad.to_local() for p in model.parameters()]
    kinds = ("gather", "slice", "keep")
    assert all(classes == sorted(classes, key=kinds.index) for classes in found.values())
    assert "slice" in found[0.0]
    assert set(found[1.0]) == {"keep"}
    assert all(map(torch.equal, grads[0.0], grads[1.0]))


def test_kernels_are_measured_in_the_model(two: Pool) -> None:
    costs = two.run(measured_kernels)
    assert costs[0] == costs[1]


def measured_kernels() -> str:
    """Forward's addmm and backward's mm of both layers: in the graphs they cost what they took;
    nothing else is changed.
    """
    before = current_plan()
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 5),
            torch.nn.BatchNorm1d(5),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(5, 3),
        )
        for layer in (model[0], model[3]):
            fully_shard(layer)
        call = torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)
        state = [torch.get_rng_state(), *(b.clone() for b in model.buffers())]
        costs = compiled_fsdp.measure_kernels(
            call, torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
        )
        assert current_plan().costs is costs
        assert all(
            torch.equal(a, b)
            for a, b in zip(state, [torch.get_rng_state(), *model.buffers()], strict=True)
        )
        assert all(p.grad is None for p in model.parameters())
        assert [key for key, _ in costs.kernels] == [
            "mm float32[3, 4] float32[4, 5]",
            "mm float32[4, 3] float32[3, 5]",
            "mm float32[4, 5] float32[5, 3]",
            "mm float32[4, 6] float32[6, 5]",
            "mm float32[5, 4] float32[4, 6]",
        ]
        with captured() as halves:
            call(torch.randn(4, 6)).sum().backward()
        where = {unit.where for unit in compiled_fsdp.explain(call).units}
        assert where == {"in a graph"}, "the eager steps were not the user's"
        heavy = [n for half in halves for n in half.nodes if is_matmul(n)]
        assert sorted(costs.compute(n) for n in heavy) == sorted(
            seconds for _, seconds in costs.kernels
        )
        return repr(costs)
    finally:
        set_plan(before)


def test_kernels_of_what_is_not_sharded(two: Pool) -> None:
    two.run(not_sharded)


def not_sharded() -> None:
    with pytest.raises(
        TypeError,
        match=r"^measure_kernels: Linear Linear\(.*\) has no sharded module\. Call fully_shard on "
        "it first$",
    ):
        compiled_fsdp.measure_kernels(torch.nn.Linear(2, 2), torch.ones(1, 2))


def test_ranks_that_measure_differently_gather_as_much(two: Pool) -> None:
    assert len(set(two.run(measured_differently))) == 1


def measured_differently() -> str:
    """How much is gathered depends on the link's speed, which is agreed before; other sizes would
    not fit each other.
    """
    model = fully_shard(torch.nn.Linear(6, 5))
    original = calibrate.Stopwatch.seconds
    sizes: list[int] = []

    def call(op: Any, *args: Any) -> Any:
        sizes.extend(a.nbytes for a in args if isinstance(a, torch.Tensor))
        return launch.call(op, *args)

    def slower(watch: calibrate.Stopwatch, run: Any) -> float:
        return original(watch, run) * (1 + 9 * dist.get_rank())

    with (
        mock.patch.object(calibrate.Stopwatch, "seconds", slower),
        mock.patch.object(calibrate, "launch", SimpleNamespace(call=call)),
    ):
        costs = calibrate.calibrate([model._get_fsdp_state().unit.mesh_info])
    assert costs is not None
    ((_, link),) = costs.links
    assert link.start >= 0
    assert 0 < link.issue < 1e-6, "moving bytes takes the core's time"
    assert len(set(sizes)) >= 4
    return repr((costs, sizes))
