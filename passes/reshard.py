"""Decide what backward gets from forward: nothing (gather again), the full parameter, or a slice of
it.

The decision is each parameter's reshard class, expressed as save and recompute tags that torch's
partitioner obeys.

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

gather: the unshard and all that is cheaply computed from weights alone (views, casts, pointwise,
    cat) are tagged recompute: saving any one of them would keep gathered bytes alive. Of all-gather
    extensions (`spec.is_extended`), more is: see `from_weights`.
keep: the unshard is tagged save. So are those that the plan's memory budget has room for
    (`plan.kept`), and what is cheaply computed from these alone is still tagged recompute: the
    budget has room for the parameter, not for a cast of it too. Without room for a slice
    (`plan.dropped`), slice is gather.
slice: backward reads a second gather over the small group, of a slice that forward saves. What
    activation checkpointing computes again reads the first one: a parameter that it reads is
    gathered again, as in gather.

Requires: a joint graph in which each parameter is unsharded once. An inference graph is left alone.
Ensures: under "gather" and "slice" no gathered storage is saved for backward.
Leaves alone: matmuls and reductions of weights, and what follows from them: the partitioner weighs
    those itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.graph import Builder, backward_nodes, find, is_matmul, is_view, value
from compiled_fsdp.ir.schema import (
    KEEP_SLICE,
    UNSHARD,
    UNSHARD_SLICE,
    param_spec,
    set_param_spec,
    traits_of,
)

from .base import consume

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten
CHEAP = (
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.constant_pad_nd.default,
    torch.ops.prims.convert_element_type.default,
)


TABLE_BYTES = 4096  # the 16 values of a 4-bit float, say


def reshard(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    backward = backward_nodes(gm.graph)
    if not backward:
        return gm
    by_class: dict[str, list[Node]] = {"gather": [], "keep": [], "slice": []}
    dropped, kept, bought = by_class["gather"], by_class["keep"], []
    read_again = _read_again(gm, backward)
    for node in find(gm.graph, UNSHARD):
        spec = param_spec(node)
        if (spec.unit, spec.fqn) in plan.kept:
            spec = replace(spec, reshard="keep")
            bought.append(node)
        elif (spec.unit, spec.fqn) in plan.dropped or node in read_again:
            spec = replace(spec, reshard="gather")
        if spec.reshard != param_spec(node).reshard:
            set_param_spec(node, spec)
        by_class[spec.reshard].append(node)
        consume(gm, unit=spec.unit)
    _keep_slices(by_class["slice"], dropped, backward)
    for node in from_weights(dropped + bought, backward):
        meta.recompute(node)
    for node in kept:
        meta.save(node)
    return gm


def from_weights(unshards: list[Node], backward: set[Node]) -> list[Node]:
    """The unshards and what forward computes cheaply from them alone, in graph order; of all-gather
    extensions, whatever is no matmul and nothing random: codes are looked up in tables.
    """
    found = dict.fromkeys(unshards)
    extended = {node for node in unshards if param_spec(node).is_extended}
    stack = list(found)
    while stack:
        for node in stack.pop().users:
            if node in found or node in backward or node.op != "call_function":
                continue
            is_of_extension = all(n in extended or _is_table(n) for n in node.all_input_nodes)
            is_of_found = is_cheap(node) and all(n in found for n in node.all_input_nodes)
            if is_of_found or (is_of_extension and _is_repeatable(node)):
                found[node] = None
                stack.append(node)
                if is_of_extension:
                    extended.add(node)
    return sorted(found)


def _is_repeatable(node: Node) -> bool:
    traits = traits_of(node.target)
    is_sent = traits.starts or traits.awaits or traits.lowers_to
    return not (is_sent or is_matmul(node) or node.is_impure() or _is_random(node))


def _is_random(node: Node) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def _is_table(node: Node) -> bool:
    """Whether this is an input of the graph too small to be an activation to speak of."""
    val = value(node) if node.op == "placeholder" else None
    return (
        isinstance(val, torch.Tensor)
        and val.is_floating_point()
        and isinstance(val.numel(), int)
        and val.numel() * val.itemsize <= TABLE_BYTES
    )


def is_cheap(node: Node) -> bool:
    """Whether computing this again costs little beside what it is computed of."""
    if node.target in CHEAP or is_view(node):
        return True
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _keep_slices(sliced: list[Node], gathered: list[Node], backward: set[Node]) -> None:
    """Make backward read second gathers, through copies of what forward computed cheaply from the
    parameters.

    The first gathers carry no tag: the partitioner never recomputes an op it does not know, so the
    slices, the smallest values between them and backward, are what it saves. What forward computes
    from the parameters and other values is not computed again either: that would read the first
    gather in backward.
    """
    chain = _chain(sliced, gathered, backward)
    for reader in {user for node in chain for user in node.users}.difference(chain, backward):
        meta.save(reader)
    uses = {node: [u for u in node.users if u in backward and u.op != "output"] for node in chain}
    first_use: dict[Node, Node] = {}
    for node in reversed(chain):
        later = [first_use[user] for user in node.users if user in first_use]
        if uses[node] or later:
            first_use[node] = min([*uses[node], *later])
    copies: dict[Node, Node] = {}
    for node in chain:
        if node not in first_use:
            continue
        run = Builder(first_use[node], first_use[node])
        if node in sliced:
            kept = Builder(node.next, node)(KEEP_SLICE, node, *node.args[1:])
            meta.save(kept)
            copies[node] = run(UNSHARD_SLICE, kept, *node.args[1:])
        else:
            copies[node] = run(
                _op(node), *_mapped(node.args, copies), **_mapped(node.kwargs, copies)
            )
        meta.recompute(copies[node])
        meta.keep_in_backward(copies[node])
    for node, copy in copies.items():
        for user in uses[node]:
            user.replace_input_with(node, copy)


def _read_again(gm: GraphModule, backward: set[Node]) -> set[Node]:
    """The unshards whose slices backward would read, but which something also reads that a
    checkpointing policy wants to be computed again, if only through what is cheaply computed.
    """
    unshards = find(gm.graph, UNSHARD)
    sliced = [node for node in unshards if param_spec(node).reshard == "slice"]
    chain = {*_chain(sliced, [node for node in unshards if node not in sliced], backward)}
    found: set[Node] = set()
    for node in sorted(chain, reverse=True):
        readers = [user for user in node.users if user not in backward]
        if any(r in found if r in chain else meta.is_recomputed_by_policy(r) for r in readers):
            found.add(node)
    return found.intersection(sliced)


def _chain(sliced: list[Node], gathered: list[Node], backward: set[Node]) -> list[Node]:
    """The sliced parameters and what forward computes cheaply from them and other parameters, in
    graph order.
    """
    depends = set(sliced)
    for node in from_weights(sliced + gathered, backward):
        if any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    return sorted(depends)


def _mapped(args: Any, copies: dict[Node, Node]) -> Any:
    return torch.fx.node.map_arg(args, lambda n: copies.get(n, n))


def _op(node: Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target
