"""Read what a unit's subgraph hands through from where it came, and let it return nothing that
nobody reads.

Before, of what AOTAutograd and the partitioner make of `Plan(regions="units")`:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)     forward: return (%y, %arg1, permute(%arg1), %z)
    %y = getitem(%call, 0)
    %saved = getitem(%call, 1)
    %saved_1 = getitem(%call, 2)
    %back = invoke_subgraph(%backward, "backward", %saved, %saved_1, %tangent)

After:

    %w0 = unshard(%flat0, "w")
    %call = invoke_subgraph(%forward, "forward", %x, %w0)     forward: return (%y,)
    %y = getitem(%call, 0)
    %view = permute(%w0)
    %back = invoke_subgraph(%backward, "backward", %w0, %view, %tangent)

So parameters that backward reads are seen to be parameters, and gathered again; and no result lies
in the memory of what the call was given.

Requires: a joint graph as AOTAutograd made it, or one for inference.
Ensures: no result of a call is one of its arguments, or a view of one; each is read.
Leaves alone: subgraphs that are not ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx.node import map_arg

from compiled_fsdp.ir import fakes
from compiled_fsdp.ir.graph import erase_all, is_view, output, placeholders
from compiled_fsdp.ir.meta import keep_strides, set_returned
from compiled_fsdp.ir.subgraphs import unit_called_by
from compiled_fsdp.torch_private.fakes import alike, look, mode_of

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node


def read_past_calls(gm: GraphModule) -> None:
    """See the module docstring."""
    calls: dict[Graph, list[Node]] = {}
    for node in gm.graph.nodes:
        if (body := unit_called_by(node)) is not None:
            calls.setdefault(body, []).append(node)
    for body, nodes in calls.items():
        through = _through(body)
        for call in nodes:
            _read_past(call, through)
        _return_less(body, nodes)


def _through(body: Graph) -> dict[int, tuple[int, list[Node]]]:
    """Results that are arguments, or views of them: which argument, and the views on the way."""
    places = {node: i for i, node in enumerate(placeholders(body))}
    found: dict[int, tuple[int, list[Node]]] = {}
    results: tuple[Node, ...] = output(body).args[0]  # type: ignore[assignment]
    for k, result in enumerate(results):
        node, views = result, []
        while node is not None and node not in places and is_view(node):
            views.append(node)
            node = node.args[0]  # type: ignore[assignment]
        if node in places:
            found[k] = (places[node], views[::-1])
    return found


def _read_past(call: Node, through: dict[int, tuple[int, list[Node]]]) -> None:
    """Let those who read such a result of a call read the argument, through views of their own."""
    for read in list(call.users):
        if not read.users:
            call.graph.erase_node(read)
        elif read.args[1] in through:
            place, views = through[read.args[1]]  # type: ignore[index]
            value: Node = call.args[2 + place]  # type: ignore[assignment]
            with call.graph.inserting_before(read):
                for view in views:
                    copies = {view.args[0]: value}
                    value = call.graph.node_copy(view, copies.__getitem__)
                    value.meta["val"] = _value_of(value)
            read.replace_all_uses_with(value)
            call.graph.erase_node(read)


def _return_less(body: Graph, calls: list[Node]) -> None:
    """Let a subgraph return what some call's result is read of, with the strides that it has."""
    end = output(body)
    results: tuple[Node, ...] = end.args[0]  # type: ignore[assignment]
    read_of: set[Any] = {read.args[1] for call in calls for read in call.users}
    kept: list[int] = sorted(read_of)
    number = {k: i for i, k in enumerate(kept)}
    set_returned(end, [(results[k], None) for k in kept])
    end.meta["val"] = tuple(result.meta["val"] for result in end.args[0])  # type: ignore[union-attr]
    keep_strides(end, [value.stride() for value in end.meta["val"]])
    body.eliminate_dead_code()
    body.owning_module.recompile()  # type: ignore[union-attr]
    for call in calls:
        call.meta["val"] = tuple(_afresh(call.meta["val"][k]) for k in kept)
        for read in list(call.users):
            place: Any = read.args[1]
            read.args = (call, number[place])
            read.meta["val"] = call.meta["val"][number[place]]
    erase_all([call for call in calls if not call.users])


def _afresh(value: Any) -> Any:
    """A fake value in a storage of its own: torch notes the same one for all calls of a subgraph, and
    who counts storages would count one.
    """
    mode, seen = mode_of(value), look(value)
    return value if mode is None or seen is None else alike(mode, seen)


def _value_of(view: Node) -> Any:
    """What a view yields of the value that it is a view of now."""
    args, kwargs = map_arg((view.args, view.kwargs), lambda node: node.meta["val"])
    return fakes.run(view.target, args, kwargs)  # type: ignore[arg-type]
