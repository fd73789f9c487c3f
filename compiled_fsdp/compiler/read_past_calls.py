"""Read what a unit's subgraph hands through from where it came, and let it return nothing that
nobody reads.

Before, of what AOTAutograd and the partitioner make of `Plan(regions="units")`:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)
        # forward: return (%y, %arg1, permute(%arg1), %z)
    %y = getitem(%call, 0)
    %saved = getitem(%call, 1)
    %saved_1 = getitem(%call, 2)
    %back = invoke_subgraph(%backward, "backward", %saved, %saved_1, %tangent)

After:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)  # forward: return (%y,)
    %y = getitem(%call, 0)
    %view = permute(%w0)
    %back = invoke_subgraph(%backward, "backward", %w0, %view, %tangent)

So parameters that backward reads are seen to be parameters, and gathered again; and no result lies
in the memory of what the call was given, or of another result, which who writes over one would not
see.

Requires: a joint graph as AOTAutograd made it, or one for inference.
Ensures: no result of a call is one of its arguments, another result, or a view; each is read.
Leaves alone: subgraphs that are not ours.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch.fx.node import map_arg

from compiled_fsdp.ir import fakes
from compiled_fsdp.ir.descriptors import set_returned
from compiled_fsdp.ir.graph import erase_all, is_view, output, placeholders
from compiled_fsdp.ir.meta import keep_strides
from compiled_fsdp.ir.subgraphs import unit_called_by
from compiled_fsdp.torch_private.fakes import alike, look, mode_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Graph, GraphModule, Node


def read_past_calls(gm: GraphModule) -> None:
    """See the module docstring."""
    calls: dict[Graph, list[Node]] = {}
    for node in gm.graph.nodes:
        if (body := unit_called_by(node)) is not None:
            calls.setdefault(body, []).append(node)
    for body, nodes in calls.items():
        _settle(body, nodes)


def _settle(body: Graph, calls: list[Node]) -> None:
    """Let a subgraph return values that have memory of their own, each once, and those alone that
    are read of some call; who reads others reads an argument of the call, or makes the view.
    """
    end = output(body)
    results: Any = end.args[0]
    place_of = {node: i for i, node in enumerate(placeholders(body))}
    sources = [_source(result, place_of) for result in results]
    read_of: set[Any] = {read.args[1] for call in calls for read in call.users if read.users}
    roots = dict.fromkeys(sources[k][0] for k in sorted(read_of))
    number = {root: i for i, root in enumerate(r for r in roots if r not in place_of)}
    for call in calls:
        reads = {read: sources[read.args[1]] for read in call.users}  # type: ignore[index]
        call.meta["val"] = tuple(_afresh(root.meta["val"]) for root in number)
        made: dict[Node, Node] = {}
        for read, (root, views) in reads.items():
            if read.users:
                if root in place_of:
                    made[root] = call.args[2 + place_of[root]]  # type: ignore[assignment]
                elif root not in made:
                    made[root] = _result(call, number[root])
                read.replace_all_uses_with(_viewed(made[root], views, before=read))
            call.graph.erase_node(read)
    set_returned(end, [(root, None) for root in number])
    end.meta["val"] = tuple(root.meta["val"] for root in number)
    keep_strides(end, [value.stride() for value in end.meta["val"]])
    body.eliminate_dead_code()
    body.owning_module.recompile()  # type: ignore[union-attr]
    erase_all([call for call in calls if not call.users])


def _source(result: Node | None, arguments: Collection[Node]) -> tuple[Any, list[Node]]:
    """The value in whose memory a result lies, an argument or what the subgraph computes, and the
    views on the way.
    """
    node: Any = result
    views: list[Node] = []
    while node is not None and node not in arguments and is_view(node):
        views.insert(0, node)
        node = node.args[0]
    return node, views


def _result(call: Node, number: int) -> Node:
    with call.graph.inserting_after(call):
        result = call.graph.call_function(operator.getitem, (call, number))
    result.meta["val"] = call.meta["val"][number]
    return result


def _viewed(value: Node, views: list[Node], before: Node) -> Node:
    """The same views of a value in the graph that calls."""
    with before.graph.inserting_before(before):
        for view in views:
            copies = {view.args[0]: value}
            value = before.graph.node_copy(view, copies.__getitem__)
            value.meta["val"] = _value_of(value)
    return value


def _afresh(value: Any) -> Any:
    """A fake value in a storage of its own: torch notes the same one for all calls of a subgraph,
    and who counts storages would count one.
    """
    mode, seen = mode_of(value), look(value)
    return value if mode is None or seen is None else alike(mode, seen)


def _value_of(view: Node) -> Any:
    """What a view yields of the value that it is a view of now."""
    args, kwargs = map_arg((view.args, view.kwargs), lambda node: node.meta["val"])
    return fakes.run(view.target, args, kwargs)  # type: ignore[arg-type]
