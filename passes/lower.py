"""Turn each fsdp op into the collectives and the arithmetic around them.

Before:

    %w = unshard(%flat, "w")
    %g = reduce_grad(%d, %flat, "w")

After (cast, padding and division only where the parameter asks for them):

    %s = slice(%flat, 0, offset, offset + shard_numel)
    %a = all_gather(%s)
    %v = wait(%a)
    %w = view(%v, shape)
    %r = reduce_scatter(reshape(%d))
    %p = div(wait(%r), world)
    %g = constant_pad_nd(%p)                         # to its place in the flat gradient
    mark_grads_(%g, %flat, offsets)

Requires: a forward, backward or inference graph. Its fsdp ops are `unshard`, `reduce_grad` and
    `unshard_slice`.
Ensures: none of these is left; each flat gradient is followed by one `mark_grads_` that names what
    is in it. Where the policy is to keep gradients for a later backward, they go to `retain_`, and
    the graph returns None for the flat gradient.
Leaves alone: `keep_slice`, which has no simpler form free of this rank's number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import ADD, Builder, erase_unused, find, output, sum_root, value
from compiled_fsdp.ir.meta import CommTag
from compiled_fsdp.ir.schema import (
    MARK_GRADS,
    REDUCE_GRAD,
    TO_LOWER,
    UNSHARD_SLICE,
    param_spec,
)

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def lower(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    marks: dict[Node, tuple[Node, list[int]]] = {}
    for node in find(graph, REDUCE_GRAD):
        spec = param_spec(node)
        flat, root = node.args[1], sum_root(node)
        if spec.sync == "reduce":
            marks.setdefault(root, (flat, []))[1].append(spec.offset)  # type: ignore[arg-type]
        else:
            _return_none(root)
        consume(gm, *comm.reduce_options(spec), unit=spec.unit)
    for root, (flat, offsets) in marks.items():
        Builder(root.next, root)(MARK_GRADS, root, flat, sorted(offsets))
    for region, node in enumerate(find(graph, *TO_LOWER)):
        if node.target is REDUCE_GRAD:
            result = _lower_reduce(node, region)
        else:
            spec = param_spec(node)
            consume(gm, *comm.gather_options(spec), unit=spec.unit)
            result = _lower_gather(node, region)
        if result is not None:
            node.replace_all_uses_with(result)
        graph.erase_node(node)
    return gm


def _return_none(root: Node) -> None:
    """The unit keeps these gradients, so the flat buffer gets none."""
    end = output(root.graph)
    end.args = (tuple(None if value is root else value for value in end.args[0]),)  # type: ignore[union-attr]
    erase_unused(root, ADD)


def _lower_gather(node: Node, region: int) -> Node:
    spec = param_spec(node)
    if node.target is UNSHARD_SLICE:
        spec = spec.over_post_group()
    source = node.args[0]
    flat = value(source)  # type: ignore[arg-type]
    run = Builder(node, node, CommTag("gather", region, (spec,)))
    result: Node = transfers.unshard(run, source, flat.numel(), flat.dtype, spec)
    return result


def _lower_reduce(node: Node, region: int) -> Node | None:
    spec = param_spec(node)
    grad, flat = node.args[:2]
    grad_value, flat_value = value(grad), value(flat)  # type: ignore[arg-type]
    run = Builder(node, node, CommTag("reduce", region, (spec,)))
    numel, dtype = flat_value.numel(), flat_value.dtype
    result: Node | None = transfers.reduce_grad(
        run, grad, grad_value.dtype, flat, numel, dtype, spec
    )
    if result is None:
        return None
    # One rank: nothing made a copy.
    if value(result).untyped_storage()._cdata == grad_value.untyped_storage()._cdata:
        result = run(torch.ops.aten.clone.default, result)
    return result
