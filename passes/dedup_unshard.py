"""Unshard each parameter once, and reduce its gradient once, however often it is read.

Tied weights and repeated reads trace to one `unshard` each, and to one `reduce_grad` each in
backward.

Before:

    %a = unshard(%flat, "w")
    %b = unshard(%flat, "w")
    %ga = reduce_grad(%da, %flat, "w")
    %gb = reduce_grad(%db, %flat, "w")
    %g = add(%gb, %ga)

After:

    %a = unshard(%flat, "w")
    %d = add(%db, %da)
    %g = reduce_grad(%d, %flat, "w")

Requires: a joint (or inference) graph as traced.
Ensures: no two `unshard` have equal arguments; no two `reduce_grad` of one sum belong to one
    parameter. Gradients are added in the order in which autograd would have added them, in the
    dtype in which they arrive; of a parameter that was tied behind sharding (`adds_wide`) in that
    in which they are reduced, as if each were reduced by itself.
Leaves alone: a sum with a term that is not a reduction, or that is read by something else too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import ADD, Builder, erase_unused, find, sum_leaves, sum_root, value
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD, param_spec

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def dedup_unshard(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    first: dict[tuple[object, ...], Node] = {}
    for node in find(gm.graph, UNSHARD):
        kept = first.setdefault(_key(node.args), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    roots = {sum_root(node): None for node in find(gm.graph, REDUCE_GRAD)}
    for root in roots:
        _merge_terms(root)
    return gm


def _key(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(tuple(a) if isinstance(a, list | tuple) else a for a in args)


def _merge_terms(root: Node) -> None:
    """Add the gradients of one parameter before they are reduced."""
    terms: dict[tuple[object, ...], list[Node]] = {}
    leaves = sum_leaves(root)
    if any(leaf.target is not REDUCE_GRAD or len(leaf.users) != 1 for leaf in leaves):
        return
    for leaf in leaves:
        terms.setdefault(_key(leaf.args[1:]), []).append(leaf)
    if len(terms) == len(leaves):
        return
    run = Builder(root, root)
    total = None
    for same in terms.values():
        grad, *others = _wide_enough(run, same)
        for other in others:
            grad = run(ADD, grad, other)
        reduced = same[0] if len(same) == 1 else run(REDUCE_GRAD, grad, *same[0].args[1:])
        total = reduced if total is None else run(ADD, total, reduced)
    assert total is not None
    root.replace_all_uses_with(total)
    erase_unused(root, ADD, REDUCE_GRAD)


def _wide_enough(run: Builder, reductions: list[Node]) -> list[Any]:
    """What several reductions of a parameter are given, in the dtype in which it is added."""
    grads, spec = [node.args[0] for node in reductions], param_spec(reductions[0])
    if not spec.adds_wide or len(grads) == 1:
        return grads
    return [
        grad if value(grad).dtype == spec.sum_dtype else run(CONVERT, grad, spec.sum_dtype)  # type: ignore[arg-type]
        for grad in grads
    ]
