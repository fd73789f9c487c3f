"""Read what a unit's subgraph hands through, or computes cheaply from parameters and inputs of the
graph, from where it came, and let it return nothing that nobody reads.

Before, of what AOTAutograd and the partitioner make of `Plan(regions="units")`:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)
        # forward: return (%y, %arg1, permute(convert_element_type(%arg1)), %z)
    %y = getitem(%call, 0)
    %saved = getitem(%call, 1)
    %saved_1 = getitem(%call, 2)
    %back = invoke_subgraph(%backward, "backward", %saved, %saved_1, %tangent)

After:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)  # forward: return (%y,)
    %y = getitem(%call, 0)
    %cast = convert_element_type(%w0)
    %view = permute(%cast)
    %back = invoke_subgraph(%backward, "backward", %w0, %view, %tangent)

So parameters that backward reads, be it as `torch.autocast` has cast them, or times a mask, are
seen to be parameters, and gathered again (`passes/reshard.py`); and no result lies in the memory of
what the call was given, or of another result, which who writes over one would not see.

Requires: a joint graph as AOTAutograd made it, or one for inference.
Ensures: no result of a call is one of its arguments, another result, a view, or computed cheaply
    from parameters and inputs of the graph alone; each is read.
Leaves alone: subgraphs that are not ours.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg

from compiled_fsdp.ir import fakes
from compiled_fsdp.ir.descriptors import set_returned
from compiled_fsdp.ir.graph import (
    backward_nodes,
    erase_all,
    find,
    is_view,
    output,
    placeholders,
)
from compiled_fsdp.ir.meta import keep_strides
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.ir.subgraphs import unit_called_by
from compiled_fsdp.passes.reshard import from_weights, is_cheap
from compiled_fsdp.torch_private.fakes import alike, look, mode_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Graph, GraphModule, Node


CONSTANTS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def read_past_calls(gm: GraphModule) -> None:
    """See the module docstring."""
    calls: dict[Graph, list[Node]] = {}
    for node in gm.graph.nodes:
        if (body := unit_called_by(node)) is not None:
            calls.setdefault(body, []).append(node)
    if calls:
        weights = from_weights(find(gm.graph, UNSHARD), backward_nodes(gm.graph))
        rests = {*weights, *placeholders(gm.graph)}
    for body, nodes in calls.items():
        _settle(body, nodes, rests)


def _settle(body: Graph, calls: list[Node], rests: Collection[Node]) -> None:
    """Let a subgraph return values that have memory of their own, each once, and those alone that
    are read of some call; who reads others reads an argument of the call, or makes it of one.

    rests: what the graph that calls has of parameters, and its inputs.
    """
    end = output(body)
    results: Any = end.args[0]
    place_of = {node: i for i, node in enumerate(placeholders(body))}
    at_rest = {a for a, i in place_of.items() if all(c.args[2 + i] in rests for c in calls)}
    made_outside = {node for node in body.nodes if is_view(node)} | _cheaply_made(body, at_rest)
    sources = [_source(result, made_outside) for result in results]
    read_of: set[Any] = {read.args[1] for call in calls for read in call.users if read.users}
    roots = dict.fromkeys(root for k in sorted(read_of) for root in sources[k][0])
    number = {root: i for i, root in enumerate(r for r in roots if r not in place_of)}
    for call in calls:
        reads = {read: read.args[1] for read in call.users}
        call.meta["val"] = tuple(_afresh(root.meta["val"]) for root in number)
        have: dict[Node, Node] = {}
        for read, k in reads.items():
            if read.users:
                roots_of_it, steps = sources[k]  # type: ignore[index]
                for root in roots_of_it:
                    if root in place_of:
                        have[root] = call.args[2 + place_of[root]]  # type: ignore[assignment]
                    elif root not in have:
                        have[root] = _result(call, number[root])
                made = _made_of(have, steps, before=read)
                read.replace_all_uses_with(made[results[k]])
            call.graph.erase_node(read)
    set_returned(end, [(root, None) for root in number])
    end.meta["val"] = tuple(root.meta["val"] for root in number)
    keep_strides(end, [value.stride() for value in end.meta["val"]])
    body.eliminate_dead_code()
    body.owning_module.recompile()  # type: ignore[union-attr]
    erase_all([call for call in calls if not call.users])


def _cheaply_made(body: Graph, at_rest: set[Node]) -> set[Node]:
    """What a subgraph computes cheaply of these of its inputs alone, a weight times a mask, say."""
    found: set[Node] = set()
    for node in body.nodes:
        if node.target in CONSTANTS or (
            node.all_input_nodes
            and is_cheap(node)
            and all(each in at_rest or each in found for each in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _source(result: Node, made_outside: Collection[Node]) -> tuple[list[Node], list[Node]]:
    """What a result is made of outside, arguments and what the subgraph computes, and by which
    nodes, in order; of itself, by none, if it is not made there.
    """
    steps: set[Node] = set()
    roots: dict[Node, None] = {}
    stack = [result]
    while stack:
        node = stack.pop()
        if node not in made_outside:
            roots[node] = None
        elif node not in steps:
            steps.add(node)
            stack += node.all_input_nodes
    return list(roots), sorted(steps)


def _result(call: Node, number: int) -> Node:
    with call.graph.inserting_after(call):
        result = call.graph.call_function(operator.getitem, (call, number))
    result.meta["val"] = call.meta["val"][number]
    return result


def _made_of(have: dict[Node, Node], steps: list[Node], before: Node) -> dict[Node, Node]:
    """What stands in the graph that calls for nodes of the subgraph: what it has, and copies of
    `steps`.
    """
    made = dict(have)
    with before.graph.inserting_before(before):
        for step in steps:
            copy = before.graph.node_copy(step, made.__getitem__)
            is_constant = not step.all_input_nodes  # run alone, it would be no fake value
            copy.meta["val"] = _afresh(step.meta["val"]) if is_constant else _value_of(copy)
            made[step] = copy
    return made


def _afresh(value: Any) -> Any:
    """A fake value in a storage of its own: torch notes the same one for all calls of a subgraph,
    and who counts storages would count one.
    """
    mode, seen = mode_of(value), look(value)
    return value if mode is None or seen is None else alike(mode, seen)


def _value_of(node: Node) -> Any:
    """What a node yields of the values that it is given now."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return fakes.run(node.target, args, kwargs)  # type: ignore[arg-type]
