"""Decide what backward gets from forward: nothing (gather again), the full parameter, or a slice of it.

The decision is each parameter's reshard class, expressed as save and recompute tags that torch's partitioner obeys.

Before:

    %w = unshard(%flat, "w", reshard="slice")
    %t = permute(%w)
    %y = mm(%x, %t)                                  # forward
    %u = permute(%t)                                 # backward
    %dx = mm(%tangents_1, %u)

After ("gather" and "keep" change no node, only tags):

    %w = unshard(%flat, "w", reshard="slice")
    %s = keep_slice(%w, "w")                         # save
    %t = permute(%w)
    %y = mm(%x, %t)
    %u = permute(%t)                                 # unused now
    %w2 = unshard_slice(%s, "w")                     # from here backward only, never saved
    %dx = mm(%tangents_1, permute(permute(%w2)))

gather: the unshard and all that is cheaply computed from weights alone (views, casts, pointwise, cat) are tagged recompute:
    saving any one of them would keep gathered bytes alive.
keep: the unshard is tagged save.
slice: backward reads a second gather over the small group, of a slice that forward saves.

Requires: a joint graph in which each parameter is unsharded once. An inference graph is left alone.
Ensures: under "gather" and "slice" no gathered storage is saved for backward.
Leaves alone: matmuls and reductions of weights, and what follows from them: the partitioner weighs those itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp import meta
from compiled_fsdp.graph import Builder, backward_nodes, find, is_view
from compiled_fsdp.ops import KEEP_SLICE, UNSHARD, UNSHARD_SLICE
from compiled_fsdp.spec import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan

aten = torch.ops.aten
CHEAP = (
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.constant_pad_nd.default,
    torch.ops.prims.convert_element_type.default,
)


def reshard(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    backward = backward_nodes(gm.graph)
    if not backward:
        return gm
    by_class: dict[str, list[Node]] = {"gather": [], "keep": [], "slice": []}
    for node in find(gm.graph, UNSHARD):
        by_class[ParamSpec.of(node.args[1:]).reshard].append(node)
    for node in by_class["keep"]:
        meta.save(node)
    for node in by_class["slice"]:
        _keep_slice(node, backward)
    for node in _from_weights(by_class["gather"] + by_class["slice"], backward):
        meta.recompute(node)
    return gm


def _from_weights(unshards: list[Node], backward: set[Node]) -> list[Node]:
    """The unshards and what forward computes cheaply from them alone, in graph order."""
    found = dict.fromkeys(unshards)
    stack = list(found)
    while stack:
        for node in stack.pop().users:
            inputs = node.all_input_nodes
            if node not in found and node not in backward and _is_cheap(node) and all(n in found for n in inputs):
                found[node] = None
                stack.append(node)
    return sorted(found)


def _is_cheap(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target in CHEAP or is_view(node):
        return True
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _keep_slice(unshard: Node, backward: set[Node]) -> None:
    """Make backward read a second gather, through copies of the views that forward made."""
    graph = unshard.graph
    chain = _from_weights([unshard], backward)
    outside = {node: [u for u in node.users if u in backward and u.op != "output"] for node in chain}
    if not any(outside.values()):
        return
    args = unshard.args[1:]
    kept = Builder(unshard.next, unshard)(KEEP_SLICE, unshard, *args)
    meta.save(kept)
    first_use = min(user for users in outside.values() for user in users)
    run = Builder(first_use, first_use)
    copies = {unshard: run(UNSHARD_SLICE, kept, *args)}
    for node in chain[1:]:
        copies[node] = run(_op(node), *_mapped(node.args, copies), **_mapped(node.kwargs, copies))
    for node, copy in copies.items():
        meta.recompute(copy)
        meta.in_backward(copy)
        for user in outside[node]:
            user.replace_input_with(node, copy)
    for node in reversed(chain[1:]):
        if not copies[node].users:
            graph.erase_node(copies[node])


def _mapped(args: Any, copies: dict[Node, Node]) -> Any:
    return torch.fx.node.map_arg(args, lambda n: copies.get(n, n))


def _op(node: Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target
