"""The reductions of one unit: of the gradients that a backward has left on its full parameters, and
of what earlier backwards have kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.checksums import Watched, is_checked
from compiled_fsdp.wire import agreement, leaving
from compiled_fsdp.wire.deferred import Deferred

from .tree import WHO, Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from compiled_fsdp.units.flat import FlatBuffer
    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit
    from compiled_fsdp.wire.deferred import Value as Recorded

Program = tuple[Deferred, "FlatBuffer", "Recorded | None", "list[ShardedParam]"]
Gradients = list[tuple["ShardedParam", "Tensor"]]

# What of earlier backwards goes on with one that ends like this (`ParamSpec.sync`).
GOES_ON = {"retain": (), "scatter": ("rows",), "reduce": ("rows", "partial")}


def of_backward(unit: Unit, *, with_zeros: bool) -> Reduction | None:
    """Take the gradients off the full parameters;
    their reduction, which has begun, if there are any.

    with_zeros: of trained parameters that have none, zeros take part.
    """
    programs = []
    for flat in unit.flats:
        ready: Gradients = []
        for param in flat.params:
            full = param.unsharded
            if full is not None and full.grad is not None:
                grad, full.grad = full.grad, None
                if param.sharded.requires_grad:
                    ready.append((param, param.local_grad(grad)))
        if with_zeros and flat.data.requires_grad:
            unit.options.consume(WHO, "set_reduce_scatter_unused_params")
            ready = _filled_up(flat, ready)
        if ready:
            programs.append(_program(flat, ready))
    return Reduction(programs) if programs else None


def of_what_was_kept(flat: FlatBuffer) -> Reduction | None:
    """At the end of a backward that reduces: what earlier ones left, where this one brought nothing
    new; None if they left nothing.
    """
    flat.forget_dropped()
    left = set(flat.retained)
    params = [
        p
        for p in flat.params
        if any((where, p.layout.offset) in left for where in GOES_ON[p.spec.sync])
    ]
    if not params:
        return None
    shapes = ((p, p.layout.shape) for p in params)
    zeros = [
        (p, torch.zeros(shape, dtype=flat.data.dtype, device=flat.device)) for p, shape in shapes
    ]
    return Reduction([_program(flat, zeros)])


def _filled_up(flat: FlatBuffer, ready: Gradients) -> Gradients:
    have = {param for param, _ in ready}
    missing = [
        (p, torch.zeros(p.layout.shape, dtype=p.spec.dtype, device=flat.device))
        for p in flat.params
        if p not in have and p.unsharded is not None and p.sharded.requires_grad
    ]
    return sorted([*ready, *missing], key=lambda entry: entry[0].layout.offset)


def _program(flat: FlatBuffer, ready: Gradients) -> Program:
    """The reduction of these gradients, not started yet."""
    unit, specs = flat.unit, [param.spec for param, _ in ready]
    names = ", ".join(param.fqn for param, _ in ready)
    options = dict.fromkeys(o for spec in specs for o in comm.reduce_options(spec))
    unit.options.consume(WHO, *options)
    _agree(flat, names)
    run = Deferred(f"reduction of {unit.name} ({names})", specs[0].reduce_group)
    grads = [(grad, grad.dtype, spec) for (_, grad), spec in zip(ready, specs, strict=True)]
    watched: Deferred | Watched = run
    if is_checked(specs):
        unit.options.consume(WHO, "check")
        watched = Watched(run, specs, "backward")
    reduced = transfers.reduce_bucket(watched, grads, flat.data, flat.data.dtype)
    if reduced is not None:
        reduced = transfers.place_bucket(run, reduced, specs, flat.layout.numel)
    return run, flat, reduced, [param for param, _ in ready]


def _agree(flat: FlatBuffer, names: str) -> None:
    """Count a reduction; where it is of other parameters than the last one was, or what was
    communicated before it is new, the other ranks are asked whether theirs is, too: gradients of
    different ones would be added to each other.
    """
    if flat.unit.settings.sync == "retain":
        return
    infos = (flat.mesh_info.shard_group, flat.mesh_info.replicate_group)
    groups = [*dict.fromkeys(group.group_name for group in infos if group is not None)]
    last, flat.reduced_last = flat.reduced_last, names
    how: agreement.Asks = "if new" if last in ("", names) else "anew"
    agreement.before_run(leaving.reduction(flat.unit.name, names), groups, asks=how)
