"""Scaled gradients, as nodes of the graph of a whole step: what `scaler.unscale_(optimizer)` and
the check in `scaler.step(optimizer)` compute.

    %m = cat([amax(abs(%g0)), amax(abs(%g1)), ...])                  # of this rank's shards
    %b = amax(logical_or(isinf(%m), isnan(%m)))
    %f = wait(all_reduce(%b, "max"))                                 # 1: some rank has met one
    %g = mul(%flat_grad, %inverse)                                   # of each flat gradient
    update_(%g, %flat, offsets, step, %f)

Every update takes `%f`, and is left out where it is 1, on all ranks alike. Of several optimizers,
`%f` has an element for each: `scaler.step(optimizer)` leaves out those
whose own gradients have an inf.
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


def found_inf(run: Builder, grads: Sequence[Sequence[Node]], groups: Mapping[str, int]) -> Node:
    """1 if any element of these gradients is inf or NaN on any rank, else 0, in fp32: for each
    optimizer's gradients [n], for one a scalar.

    groups: the groups over which ranks are to agree, and how many ranks each has. They agree over
        the smallest first, so that what one of them has found is known to all of the next.
    """
    device = next(value(grad).device for of_one in grads for grad in of_one)
    each = [_found_here(run, of_one, device) for of_one in grads]
    found: Node = each[0]
    if len(each) > 1:
        found = run(aten.stack.default, each)
    for group, size in sorted(groups.items(), key=lambda item: item[1]):
        if size > 1:
            found = run(comm.WAIT, run(comm.ALL_REDUCE, found, "max", group))
    return found


def _found_here(run: Builder, grads: Sequence[Node], device: torch.device) -> Node:
    """Whether any element of these is inf or NaN on this rank."""
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
    if not flags:
        return run(aten.full.default, [], 0.0, dtype=torch.float32, device=device, pin_memory=False)
    found: Node = run(aten.amax.default, run(aten.cat.default, flags))
    return found


def unscaled(run: Builder, grads: Sequence[Node], inverse: Node) -> list[Node]:
    """The gradients times the inverse of the scale, each in its dtype."""
    return [scaled_by(run, grad, inverse) for grad in grads]


def scaled_by(run: Builder, grad: Node, factor: Node) -> Node:
    """A gradient times a factor of no dimensions, in its own dtype: what `grad.mul_(factor)` does,
    which does not round the factor to that dtype.
    """
    product: Node = run(aten.mul.Tensor, grad, factor)
    dtype = value(grad).dtype
    is_wide = value(product).dtype != dtype  # where the gradient has no dimensions either
    return run(comm.CONVERT, product, dtype) if is_wide else product


def scaled_one(run: Builder, like: torch.Tensor, scale: Node) -> Node:
    """What backward of `scaler.scale(loss)` gives to a loss like this: the scale, in its dtype."""
    shape = list(like.shape)
    one = run(
        aten.full.default, shape, 1.0, dtype=torch.float32, device=like.device, pin_memory=False
    )
    made: Node = run(aten.mul.Tensor, one, scale)
    return made if like.dtype == torch.float32 else run(comm.CONVERT, made, like.dtype)
