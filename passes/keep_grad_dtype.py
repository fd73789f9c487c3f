"""Let gradients come to their reduction in the dtype in which they are computed, and leave a graph
in the dtype in which they are kept (`grad_dtype` of a parameter).

Autograd casts what an op's backward returns to the dtype of the op's input. Of a reduction that is
the flat buffer; of a leaf it would ask for `grad_dtype`, but what AOTAutograd traces is none. So an
fp32 gradient of bf16 parameters would be rounded to bf16 on its way. So would be, before it is
reduced, what activations in fp32 make of weights in bf16, and what is summed in fp32 over the
tensor-parallel axis (`cast_grad`).

Before:

    %b = unshard(%flat, "b")  # bf16
    %y = mul(%x, %b)  # f32
    %wa = cast_grad(%da, float32)
    %sa = compute(%wa)  # an all-reduce, over the tensor-parallel axis
    %ra = cast_grad(%sa, bfloat16)
    %ga = reduce_grad(%ra, %flat, "a")  # f32
    %db = mul(%x, %dy)  # f32
    %rb = convert_element_type(%db, bfloat16)  # autograd's
    %gb = reduce_grad(%rb, %flat, "b")  # f32
    %ca = convert_element_type(%ga, bfloat16)
    %cb = convert_element_type(%gb, bfloat16)
    %g = add(%ca, %cb)

After:

    %b = unshard(%flat, "b")
    %y = mul(%x, %b)
    %wa = convert_element_type(%da, float32)
    %sa = compute(%wa)
    %ga = reduce_grad(%sa, %flat, "a")  # f32
    %db = mul(%x, %dy)
    %gb = reduce_grad(%db, %flat, "b")  # f32
    %g = add(%ga, %gb)

Requires: a joint graph as traced.
Ensures: where a spec says `keeps_wide`, autograd rounds no gradient before it is reduced, in the
    subgraphs of units neither; nor a sum over the tensor-parallel axis, nor its terms. No reduced
    gradient is cast to the dtype of its flat buffer where it is kept in another.
Leaves alone: casts of gradients that are kept in the dtype of their flat buffer; casts that the
    program itself makes (`weight.float()`; `ir/rounding.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from compiled_fsdp.ir import fakes
from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import (
    ADD,
    Builder,
    erase_unused,
    find,
    is_sum,
    is_view,
    output,
    sum_leaves,
    value,
)
from compiled_fsdp.ir.rounding import CASTS, Rounding
from compiled_fsdp.ir.schema import CAST_GRAD, REDUCE_GRAD, param_spec

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def keep_grad_dtype(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    rounding = Rounding(gm.graph)
    _widen_units(rounding)
    for node in find(gm.graph, CAST_GRAD):
        term, dtype = cast("tuple[Node, torch.dtype]", node.args)
        if value(term).dtype.itemsize < dtype.itemsize:
            node.replace_all_uses_with(_unrounded(node, term, [node], rounding, dtype))
            erase_unused(node, ADD, CAST_GRAD, *CASTS)
    for node in find(gm.graph, REDUCE_GRAD):
        grad = cast("Node", node.args[0])
        if grad.target is CAST_GRAD:
            node.replace_input_with(grad, grad.args[0])  # type: ignore[arg-type]
        elif param_spec(node).keeps_wide:
            node.replace_input_with(grad, _unrounded(node, grad, [node], rounding))
        erase_unused(grad, ADD, CAST_GRAD, *CASTS)
        rests: torch.dtype = value(node.args[1]).dtype  # type: ignore[arg-type]
        kept = [node] if value(node).dtype != rests else []
        while kept:  # not recursive: a unit of a thousand parameters is a thousand additions deep
            kept += _without_casts(kept.pop(), rests)
    return gm


def _widen_units(rounding: Rounding) -> None:
    """Let subgraphs of units return gradients as they are, where all calls bring them to
    reductions that keep them wide.
    """
    for body, calls in rounding.calls.items():
        end = output(body)
        results = list(end.args[0])  # type: ignore[arg-type]
        for i, result in enumerate(results):
            found = [item for call in calls for item in call.users if item.args[1] == i]
            takers = [user for item in found for user in item.users]
            if takers and all(map(_keeps_wide, takers)):
                results[i] = _unrounded(end, result, takers, rounding)
            if results[i] is not result:
                end.args = (tuple(results),)
                erase_unused(result, ADD, *CASTS)
                for item in found:
                    _widen(item, value(results[i]).dtype)
        body.owning_module.recompile()  # type: ignore[union-attr]


def _keeps_wide(node: Node) -> bool:
    return node.target is REDUCE_GRAD and param_spec(node).keeps_wide


def _widen(item: Node, dtype: torch.dtype) -> None:
    """Say that a result of a call is of this dtype."""
    call, number = item.args
    item.meta["val"] = fakes.run(CONVERT, (value(item), dtype), {})
    values = list(call.meta["val"])  # type: ignore[union-attr]
    values[number] = item.meta["val"]  # type: ignore[index]
    call.meta["val"] = tuple(values)  # type: ignore[union-attr]


def _unrounded(
    at: Node,
    grad: Node,
    takers: list[Node],
    rounding: Rounding,
    dtype: torch.dtype | None = None,
) -> Node:
    """The same gradient, or sum of gradients, without the casts that autograd has made, before this
    node.

    takers: who takes it as the gradient of a read.
    dtype: in which terms are added; None: as they come.
    """
    run = Builder(at, grad)
    made: dict[Node, Node] = {}
    leaves = sum_leaves(grad)
    for leaf in leaves:
        is_rounded = all(rounding.is_rounded(leaf, taker) for taker in takers)
        term: Node = leaf.args[0] if is_rounded else leaf  # type: ignore[assignment]
        is_wide = dtype is None or value(term).dtype == dtype
        made[leaf] = term if is_wide else run(CONVERT, term, dtype)
    if all(made[leaf] is leaf for leaf in leaves):
        return grad
    stack = [grad]
    while stack:  # not recursive, as above
        node = stack.pop()
        terms = [] if node in made else list(node.args)
        if missing := [term for term in terms if term not in made]:
            stack += [node, *missing]  # type: ignore[list-item]
        elif terms:
            made[node] = _added(run, *(made[term] for term in terms))  # type: ignore[index]
    return made[grad]


def _added(run: Builder, total: Node, term: Node) -> Node:
    """As autograd adds: in place to the first, in whose dtype the sum then is, unless that is a
    view.
    """
    added, dtype = run(ADD, total, term), value(total).dtype
    is_new = is_view(total) or value(added).dtype == dtype
    return added if is_new else run(CONVERT, added, dtype)


def _without_casts(grad: Node, rests: torch.dtype) -> list[Node]:
    """Let who reads a cast of this to `rests` read this; returns the sums of it, which are made
    again in its dtype.
    """
    for narrow in [user for user in grad.users if user.target in CASTS]:
        if value(narrow).dtype == rests:
            narrow.replace_all_uses_with(grad)
            erase_unused(narrow, *CASTS)
    totals = [user for user in grad.users if is_sum(user) and value(user).dtype == rests]
    again = []
    for total in totals:
        again.append(Builder(total, total)(ADD, *total.args))
        total.replace_all_uses_with(again[-1])
        erase_unused(total, ADD)
    return again
