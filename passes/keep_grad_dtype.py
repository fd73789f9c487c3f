"""Let gradients leave a graph in the dtype in which they are kept (`grad_dtype` of a parameter).

Autograd casts what an op's backward returns to the dtype of the op's input, here of the flat
buffer; of a leaf it would ask for `grad_dtype`, but what AOTAutograd traces is none. So an fp32
gradient of bf16 parameters would be rounded to bf16 on its way.

Before:

    %ga = reduce_grad(%da, %flat, "a")  # f32
    %gb = reduce_grad(%db, %flat, "b")  # f32
    %ca = convert_element_type(%ga, bfloat16)
    %cb = convert_element_type(%gb, bfloat16)
    %g = add(%ca, %cb)

After:

    %ga = reduce_grad(%da, %flat, "a")  # f32
    %gb = reduce_grad(%db, %flat, "b")  # f32
    %g = add(%ga, %gb)

Requires: a joint graph as traced.
Ensures: no reduced gradient is cast to the dtype of its flat buffer where it is kept in another.
Leaves alone: casts of gradients that are kept in the dtype of their flat buffer, and other casts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import ADD, Builder, erase_unused, find, is_sum, value
from compiled_fsdp.ir.schema import REDUCE_GRAD

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

CASTS = (CONVERT, torch.ops.aten._to_copy.default)


def keep_grad_dtype(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for node in find(gm.graph, REDUCE_GRAD):
        rests: torch.dtype = value(node.args[1]).dtype  # type: ignore[arg-type]
        kept = [node] if value(node).dtype != rests else []
        while kept:  # not recursive: a unit of a thousand parameters is a thousand additions deep
            kept += _without_casts(kept.pop(), rests)
    return gm


def _without_casts(grad: Node, rests: torch.dtype) -> list[Node]:
    """Let who reads a cast of this to `rests` read this; returns the sums of it, which are made
    again in its dtype.
    """
    for cast in [user for user in grad.users if user.target in CASTS]:
        if value(cast).dtype == rests:
            cast.replace_all_uses_with(grad)
            erase_unused(cast, *CASTS)
    totals = [user for user in grad.users if is_sum(user) and value(user).dtype == rests]
    again = []
    for total in totals:
        again.append(Builder(total, total)(ADD, *total.args))
        total.replace_all_uses_with(again[-1])
        erase_unused(total, ADD)
    return again
