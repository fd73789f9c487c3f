"""Say of each communication for which micro-batch it is, in the joint graph of a whole step that
has several, and add up their gradients in the order of the micro-batches.

Before, as autograd adds them, the last micro-batch first:

    %a = unshard(%flat, "w")
    %y0 = dot(%x0, %a)                               # a loss
    %b = unshard(%flat, "w")
    %y1 = dot(%x1, %b)                               # a loss
    %g1 = reduce_grad(%tangents_2, %flat, "w")
    %g0 = reduce_grad(%tangents_1, %flat, "w")
    %g = add(%g1, %g0)

After:

    %a = unshard(%flat, "w")
    %y0 = dot(%x0, %a)
    %b = unshard(%flat, "w", batch=1)
    %y1 = dot(%x1, %b)
    %g1 = reduce_grad(%tangents_2, %flat, "w", batch=1)
    %g0 = reduce_grad(%tangents_1, %flat, "w")
    %g = add(%g0, %g1, alpha=1)

Once, if gradients are to be reduced once for all micro-batches:

    %a = unshard(%flat, "w")
    %y0 = dot(%x0, %a)
    %b = unshard(%flat, "w", batch=1)
    %y1 = dot(%x1, %b)
    %d = add(%tangents_1, %tangents_2)
    %g = reduce_grad(%d, %flat, "w")

Of a parameter that no unit has, the sums alone change:

    %y0 = dot(%x0, %w)
    %y1 = dot(%x1, %w)
    %g1 = mul(%x1, %tangents_2)
    %g0 = mul(%x0, %tangents_1)
    %g = add(%g1, %g0)

then:

    %y0 = dot(%x0, %w)
    %y1 = dot(%x1, %w)
    %g1 = mul(%x1, %tangents_2)
    %g0 = mul(%x0, %tangents_1)
    %g = add(%g0, %g1, alpha=1)

So no two micro-batches share a gather that one of them would have to keep for the other, and sums
are those of a loop, which comes to the first micro-batch first.

Requires: a joint graph that takes gradients of the losses of the micro-batches, and of nothing
    else.
Ensures: parameters that forward drops are gathered, and gradients reduced, for one micro-batch
    each. Parameters that stay from forward to backward, and those that a budget keeps, are gathered
    once for all.
Leaves alone: graphs of one micro-batch. A sum of reductions and of something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.descriptors import places_of
from compiled_fsdp.ir.graph import (
    ADD,
    Builder,
    backward_nodes,
    batches_of,
    erase_unused,
    find,
    is_sum,
    join_batches,
    output,
    placeholders,
    sum_leaves,
    sum_root,
    value,
)
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD, param_spec, set_param_spec

from .base import context_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.plan import Plan


def number_batches(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    context = context_of(gm)
    if context.batches == 1:
        return gm
    ones = [p for p in placeholders(gm.graph) if p.name.startswith("tangents")]
    batch = batches_of(gm.graph, losses_of(gm.graph, ones), ones)
    for node in find(gm.graph, UNSHARD):
        spec = param_spec(node)
        if spec.reshard != "keep" and (spec.unit, spec.fqn) not in plan.kept:
            set_param_spec(node, replace(spec, batch=batch[node]))
    for root in {sum_root(node): None for node in find(gm.graph, REDUCE_GRAD)}:
        leaves = sum_leaves(root)
        if all(leaf.target is REDUCE_GRAD for leaf in leaves):
            of_batches: dict[int, list[Node]] = {}
            for leaf in leaves:
                of_batches.setdefault(batch[leaf], []).append(leaf)
            ordered = [of_batches[number] for number in sorted(of_batches)]
            join = _reduced_once if context.reduces_once else _reduced_each
            total = join(root, ordered, batch)
            root.replace_all_uses_with(total)
            erase_unused(root, ADD, REDUCE_GRAD)
    _sort_other_sums(gm.graph, ones, batch)
    return gm


def _sort_other_sums(joint: Graph, ones: Sequence[Node], batch: dict[Node, int]) -> None:
    """Add up what is a gradient of no unit's parameter in the order of the micro-batches, those of
    one before they are added to others: as each backward of a loop does.
    """
    depends: dict[Node, frozenset[Node]] = {one: frozenset([one]) for one in ones}
    for node in joint.nodes:
        if node not in depends:
            depends[node] = frozenset().union(*(depends[n] for n in node.all_input_nodes))
    for root in dict.fromkeys(output(joint).all_input_nodes):
        leaves: list[Node] = []
        stack = [root]
        while stack:
            node = stack.pop()
            if is_sum(node) and len(depends[node]) > 1 and (node is root or len(node.users) == 1):
                stack.extend(reversed(node.args))  # type: ignore[arg-type]
            else:
                leaves.append(node)
        if len(leaves) == 1 or any(len(depends[leaf]) != 1 for leaf in leaves):
            continue
        sums: dict[int, Node] = {}
        run = Builder(root, root)
        for leaf in leaves:
            number = batch[leaf]
            sums[number] = run(ADD, sums[number], leaf) if number in sums else leaf
        first, *others = [sums[number] for number in sorted(sums)]
        total = first
        for other in others:
            total = join_batches(run, total, other)
        root.replace_all_uses_with(total)
        erase_unused(root, ADD)


def losses_of(joint: Graph, ones: Sequence[Node]) -> list[Node]:
    """The values whose gradients these are."""
    backward, returned = backward_nodes(joint), list(output(joint).args[0])  # type: ignore[arg-type]
    num = next((i for i, n in enumerate(returned) if n is None or n in backward), len(returned))
    return [returned[place] for place in places_of(ones, output(joint), num)]


def _reduced_each(root: Node, batches: Sequence[list[Node]], batch: dict[Node, int]) -> Node:
    """The flat gradients of the micro-batches, first to last."""
    total = None
    for leaves in batches:
        run = Builder(root, root)
        own = None
        for leaf in leaves:
            spec = replace(param_spec(leaf), batch=batch[leaf])
            reduced = Builder(leaf, leaf)(REDUCE_GRAD, *leaf.args[:2], *spec.args())
            own = reduced if own is None else run(ADD, own, reduced)
        assert own is not None
        total = own if total is None else join_batches(run, total, own)
    assert total is not None
    return total


def _reduced_once(root: Node, batches: Sequence[list[Node]], batch: dict[Node, int]) -> Node:
    """One flat gradient of the sums over all micro-batches, in the dtype in which they travel or,
    where that is set, are kept.
    """
    run = Builder(root, root)
    sums: dict[ParamSpec, Node] = {}
    for leaves in batches:
        own: dict[ParamSpec, Node] = {}
        for leaf in leaves:
            spec, grad = param_spec(leaf), leaf.args[0]
            own[spec] = run(ADD, own[spec], grad) if spec in own else grad  # type: ignore[assignment]
        for spec, grad in own.items():
            dtype = spec.retained_dtype or spec.reduce_dtype
            cast = grad if value(grad).dtype == dtype else run(CONVERT, grad, dtype)
            sums[spec] = run(ADD, sums[spec], cast) if spec in sums else cast
    flat, total = batches[0][0].args[1], None
    for spec, grad in sums.items():
        reduced = run(REDUCE_GRAD, grad, flat, *spec.args())
        total = reduced if total is None else run(ADD, total, reduced)
    assert total is not None
    return total
