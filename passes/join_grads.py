"""Put the gradients of a flat parameter's views together once, where autograd would add zeros for
each.

A unit of FSDP1 is one flat parameter; what the model reads are views of it, and each has a gradient
of its own.

Before:

    %f1 = flatten_grad(%d1, 4, 8)
    %f0 = flatten_grad(%d0, 0, 8)
    %d = add(%f1, %f0)
    %g = reduce_grad(%d, %flat, "flat")

After:

    %d = cat([reshape(%d0, [-1]), reshape(%d1, [-1])])
    %g = reduce_grad(%d, %flat, "flat")

Requires: a joint (or inference) graph in which each parameter is reduced once.
Ensures: a gradient that is a sum of `flatten_grad`s is a concatenation, with zeros where no view
    has a gradient. Gradients of one place are added in the order in which autograd would have added
    them.
Leaves alone: a sum with another term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import ADD, Builder, erase_unused, find, sum_leaves, value
from compiled_fsdp.ir.schema import FLATTEN_GRAD, REDUCE_GRAD

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def join_grads(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for node in find(gm.graph, REDUCE_GRAD):
        root: Node = node.args[0]  # type: ignore[assignment]
        leaves = sum_leaves(root)
        if all(leaf.target is FLATTEN_GRAD for leaf in leaves):
            node.replace_input_with(root, _joined(node, leaves))
            erase_unused(root, ADD, FLATTEN_GRAD)
    return gm


def _joined(node: Node, leaves: list[Node]) -> Node:
    """The concatenation, before the node that reduces it; a view of no elements begins where the
    next one does, and adds nothing.
    """
    grads: dict[Node, Node] = {leaf: leaf.args[0] for leaf in leaves}  # type: ignore[misc]
    leaves = [leaf for leaf in leaves if value(grads[leaf]).numel()] or leaves[:1]
    run = Builder(node, leaves[-1])
    sums: dict[int, Node] = {}
    orders: dict[int, list[int]] = {}
    for leaf in leaves:
        grad, start, _, order = leaf.args
        sums[start] = run(ADD, sums[start], grad) if start in sums else grad  # type: ignore[index,assignment]
        orders[start] = order  # type: ignore[index,assignment]
    sizes = {start: value(grad).numel() for start, grad in sums.items()}
    pieces = {
        start: transfers.flat_piece(run, sums[start], orders[start]) for start in sorted(sums)
    }
    result: Node = transfers.flatten_grads(run, pieces, sizes, value(leaves[0]).numel())
    return result
