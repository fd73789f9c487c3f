"""Full parameters that stay from one compiled call to the next: `set_reshard_after_backward(False)`
in a graph.

The unit is gathered before the call, once. The graph takes the full parameters as inputs, neither
gathers nor frees them, and reduces their gradients as ever. They are dropped before an optimizer's
step, when the sharded ones have changed otherwise, after a backward with the setting back at True,
and by `reshard()`; autograd may hold them for longer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir import transfers
from compiled_fsdp.wire import copies, launch

from . import optimizer_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .full_params import FullParams


_steps = [0]


def num_steps() -> int:
    """How often an optimizer began to step: it may write to parameters by foreach or fused ops,
    which no version counts.
    """
    return _steps[0]


_there: weakref.WeakSet[FullParams] = weakref.WeakSet()


def prepare(runtimes: Iterable[FullParams]) -> None:
    """Before a compiled call: gather what is to stay, and drop what is out of date."""
    started = []
    for runtime in runtimes:
        unit = runtime.unit
        runtime.num_compiled += 1
        if unit.is_resident and (
            runtime.resident_versions != runtime.versions_now() or _is_left_over(runtime)
        ):
            drop(runtime)
        if unit.is_resident or not unit.settings.stays_full or not torch.is_grad_enabled():
            continue
        if unit.reshard is not False and unit.settings.reshard_after_backward:
            continue
        if unit.reshard is not False:
            warn_once(
                f"compiled_fsdp: set_reshard_after_backward(False) on {unit.name!r} changes "
                "nothing in a graph while its parameters are dropped after forward, since "
                "backward gathers them. Set reshard_after_forward=False to keep them"
            )
            continue
        if unit.has_extensions:
            warn_once(
                f"compiled_fsdp: set_reshard_after_backward(False) on {unit.name!r} does not keep "
                "parameters with an all-gather extension (fsdp_pre_all_gather) in a graph: each "
                "call gathers them again"
            )
        unit.options.consume(
            "resident parameters", "set_reshard_after_backward", "reshard_after_forward"
        )
        started.append((runtime, runtime.start_gathers()))
    for runtime, gathers in started:
        _finish(runtime, gathers)


def _is_left_over(runtime: FullParams) -> bool:
    """A frozen unit gets no gradient, after which it would have been dropped."""
    return not runtime.unit.settings.stays_full and not any(
        p.sharded.requires_grad for p in runtime.unit.params
    )


def _finish(runtime: FullParams, gathers: Any) -> None:
    with torch.no_grad():
        for program, gathered, members in gathers:
            program.finish()
            bucket = transfers.GatheredBucket([spec for _, spec in members])
            for place, (param, _) in enumerate(members):
                param.show_full(bucket.copy_out(launch.call, gathered.tensor, place).detach())
    runtime.resident_versions = runtime.versions_now()
    _there.add(runtime)
    runtime.unit.is_resident = True
    runtime.unit.publish()


def shown() -> dict[int, str]:
    """The names of the parameters whose full ones are there, by the identity of these."""
    owned = [
        (param, owner)
        for runtime in _there
        for param in runtime.unit.params
        for owner in param.owners
    ]
    return {id(module.__dict__["_fsdp_full"][name]): param.fqn for param, (module, name) in owned}


def drop(runtime: FullParams) -> None:
    """Forget the full parameters; graphs gather for themselves again."""
    if not runtime.unit.is_resident:
        return
    for param in runtime.unit.params:
        param.show_full(None)
    _there.discard(runtime)
    runtime.unit.is_resident = False
    runtime.unit.publish()


def _drop_all(*_: object) -> None:
    _steps[0] += 1
    copies.settle()  # a step on the host writes there
    for runtime in list(_there):
        drop(runtime)


optimizer_steps.before(_drop_all)
