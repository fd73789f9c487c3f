"""`measure_kernels`: how long each matmul and attention of a model takes inside it, for plans that
are made from costs.

A matmul measured alone, as `calibrate` does, finds its operands in the caches that it has to
itself, and has one size. What a model runs is measured here where it runs. Compiled graphs call the
same kernels with the same shapes.

Private torch used here (tried on 2.13): `torch.utils._python_dispatch.TorchDispatchMode`, which
autograd keeps on in its threads.
"""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_fsdp.ir.flops import formula_of
from compiled_fsdp.planning.calibrate import DIGITS, calibrate, groups_of
from compiled_fsdp.planning.costs import Costs, kernel
from compiled_fsdp.planning.plan import current_plan, use
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.units.tensor_parallel import groups_beside

from .warmup import run_both, sharded_below, without_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from compiled_fsdp.units.unit import Unit

STEPS = 3  # that are measured, after one that is not


def measure_kernels(model: nn.Module, *example: Any, **more: Any) -> Costs:
    """Run a few eager forwards and backwards on `example`, and put the times of their matmuls and
    attentions into the plan's costs.

    Call it on all ranks, with a batch of the sizes that training has, before the first compiled
    step: graphs compiled from then on are planned, and their time predicted, with these times
    (`Costs.kernels`, seconds). Kernels that were not met, or not on every rank, cost what the
    machine's constants say. Parameters, gradients, buffers and the state of the random generators
    are afterwards as before.

    Returns the costs, the same on every rank.

    Raises:
        TypeError: the model was not sharded.
        RuntimeError: a backward of the model is not finalized.
        ValueError: no output requires a gradient, or nothing is communicated (one rank), so that
            there is nothing to plan.
    """
    states = sharded_below(model, "measure_kernels")
    infos = list(dict.fromkeys(flat.mesh_info for state in states for flat in state.unit.flats))
    beside = [*groups_beside(p for state in states for p in state.unit.params)]
    seen: list[dict[str, list[float]]] = []
    with (
        without_trace(model, "measure_kernels"),
        _unseen([state.unit for state in states]),
        torch.compiler.set_stance("force_eager"),
    ):
        for _ in range(1 + STEPS):
            with Clock(infos[0].device) as clock:
                run_both(uncompiled(model), example, more, "measure_kernels")
            seen.append(clock.seconds)
    costs = current_plan().costs or calibrate(infos, beside)
    if costs is None:
        raise ValueError(
            "measure_kernels: no group of the model's meshes has two ranks, so nothing is "
            "communicated, and there is nothing to plan. Leave it out, or shard over at least two "
            "ranks"
        )
    found = {
        key: statistics.median(t for step in seen[1:] for t in step.get(key, ()))
        for key in seen[-1]
    }
    for group in [*groups_of(infos).values(), *beside]:
        found = _medians(found, group)
    kernels = tuple((key, float(f"{seconds:.{DIGITS}g}")) for key, seconds in sorted(found.items()))
    costs = replace(costs, kernels=kernels)
    use(replace(current_plan(), costs=costs))
    return costs


class Clock(TorchDispatchMode):
    """Times every kernel that there is a formula for the operations of.

    seconds: for each kernel (see `costs.kernel`), what each of its calls took.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and time it if it is heavy."""
        if formula_of(func.overloadpacket) is None:
            return func(*args, **(kwargs or {}))
        self._settle()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._settle()
        self.seconds.setdefault(kernel(func, args), []).append(time.perf_counter() - start)
        return result

    def _settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@contextmanager
def _unseen(units: list[Unit]) -> Iterator[None]:
    """Keep `explain` from taking what runs inside for a run of the user's: neither that units ran
    eagerly, nor what options that took.
    """
    before = [
        (
            (unit.num_eager_forwards, unit.num_eager_recorded),
            {name: dict(by) for name, by in unit.options.consumed.items()},
        )
        for unit in units
    ]
    try:
        yield
    finally:
        for unit, (counts, consumed) in zip(units, before, strict=True):
            unit.num_eager_forwards, unit.num_eager_recorded = counts
            unit.options.consumed = consumed


def _medians(mine: dict[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Returns the median time of each kernel that every rank of the group has met."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    common: Iterable[str] = set.intersection(*(set(found) for found in everyone))
    return {key: statistics.median(found[key] for found in everyone) for key in common}
