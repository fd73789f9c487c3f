"""Scaled gradients, as nodes of the graph of a whole step: what `scaler.unscale_(optimizer)` and
the check in `scaler.step(optimizer)` compute.

    %m = cat([amax(abs(%g0)), amax(abs(%g1)), ...])                  # of this rank's shards
    %b = amax(logical_or(isinf(%m), isnan(%m)))
    %f = wait(all_reduce(%b, "max"))                                 # 1: some rank has met one
    %g = mul(%flat_grad, %inverse)                                   # of each flat gradient
    update_(%g, %flat, offsets, step, %f)

Every update takes `%f`, and is left out where it is 1, on all ranks alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from compiled_fsdp.ir.graph import Builder

aten = torch.ops.aten


def found_inf(run: Builder, grads: Sequence[Node], groups: Mapping[str, int]) -> Node:
    """1 if any element of these flat gradients is inf or NaN on any rank, else 0: fp32, a scalar.

    groups: the groups over which ranks are to agree, and how many ranks each has. They agree over
        the smallest first, so that what one of them has found is known to all of the next.
    """
    largest: dict[torch.dtype, list[Node]] = {}
    for grad in grads:
        if value(grad).numel() != 0:
            most = run(aten.amax.default, run(aten.abs.default, grad))  # NaN, if there is one
            largest.setdefault(value(grad).dtype, []).append(run(aten.reshape.default, most, [1]))
    flags = []
    for each in largest.values():
        all_of = run(aten.cat.default, each)
        bad = run(
            aten.logical_or.default,
            run(aten.isinf.default, all_of),
            run(aten.isnan.default, all_of),
        )
        flags.append(run(comm.CONVERT, bad, torch.float32))
    found: Node = run(aten.amax.default, run(aten.cat.default, flags))
    for group, size in sorted(groups.items(), key=lambda item: item[1]):
        if size > 1:
            found = run(comm.WAIT, run(comm.ALL_REDUCE, found, "max", group))
    return found


def unscaled(run: Builder, grads: Sequence[Node], inverse: Node) -> list[Node]:
    """The gradients times the inverse of the scale, each in its dtype."""
    return [run(aten.mul.Tensor, grad, inverse) for grad in grads]


def scaled_one(run: Builder, like: torch.Tensor, scale: Node) -> Node:
    """What backward of `scaler.scale(loss)` gives to a loss like this: the scale, in its dtype."""
    shape = list(like.shape)
    one = run(
        aten.full.default, shape, 1.0, dtype=torch.float32, device=like.device, pin_memory=False
    )
    made: Node = run(aten.mul.Tensor, one, scale)
    return made if like.dtype == torch.float32 else run(comm.CONVERT, made, like.dtype)
