"""Parameters that are read inside `torch.cond`, `while_loop`, `scan`, `map`, or a function that
FlexAttention is given, in a traced forward: they are gathered before it, once, by every rank.

[Note: reads inside control flow]
Dynamo gives the functions of these operators graphs of their own. Our passes do not go there, and
which of them run, and how often, is up to a rank's data, whereas a collective is everybody's. So
before the graph goes to its backend a read is moved out, and its value handed over like any other:

    %cond = cond(%p, %f, %g, (%x, %flat))         %w = unshard(%flat, "w")
      f: %w = unshard(%flat, "w")         becomes %cond = cond(%p, %f, %g, (%x, %w))
         linear(%x, %w)                             f: linear(%x, %w)
      g: %x                                         g: %x

A branch that is not taken gives its parameters zeros, as unused parameters get where others of the
graph's are used. What a checkpoint inside of such a function reads is moved out of both; one
elsewhere keeps its reads, which backward repeats, unless units become subgraphs (`equal_units.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compiled_fsdp.ir.meta import take_over, traced_as
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.torch_private.subgraphs import CHECKPOINT, operator_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Node
    from torch.nn import Module

# Which arguments of an operator are functions (or end in one, as block masks do), and which is the
# list of what Dynamo hands over to all of them: the last of their arguments, in its order.
OPERANDS: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "cond": [((1, 2), 3)],
    "while_loop": [((0, 1), 3)],
    "scan": [((0,), 3)],
    "map_impl": [((0,), 2)],
    "flex_attention": [((3,), 7), ((4,), 8)],
}


def switch_name(node: Node) -> str:
    """What switches autograd, autocast or inference mode on or off, by name; "" for other nodes."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    is_switch = name.startswith(("_enter_", "_exit_")) or name == "_set_grad_enabled"
    return name if is_switch else ""


def hoist_reads(gm: GraphModule) -> None:
    """See the note above."""
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    inside = {id(part) for module in modules for body in _bodies(module) for part in body.modules()}
    for module in reversed(modules):  # what is inside of another comes after it
        for node in list(module.graph.nodes):
            name = operator_name(node.target)
            for functions, where in OPERANDS.get(name, ()):
                bodies = [module.get_submodule(_function(node.args[i])) for i in functions]
                _hoist(node, bodies, slice(where, where + 1))  # type: ignore[arg-type]
            if name == CHECKPOINT and id(module) in inside:
                body = module.get_submodule(_function(node.args[0]))
                _hoist(node, [body], slice(1, None))  # type: ignore[list-item]


def hoist_from_checkpoints(gm: GraphModule) -> None:
    """Move reads out of what is under activation checkpointing."""
    for module in reversed([module for module in gm.modules() if isinstance(module, GraphModule)]):
        for node in list(module.graph.nodes):
            if operator_name(node.target) == CHECKPOINT:
                body = module.get_submodule(_function(node.args[0]))
                _hoist(node, [body], slice(1, None))  # type: ignore[list-item]


def _bodies(module: GraphModule) -> Iterator[Module]:
    """Yields the functions of a graph's own control flow."""
    for node in module.graph.nodes:
        for functions, _ in OPERANDS.get(operator_name(node.target), ()):
            yield from (module.get_submodule(_function(node.args[i])) for i in functions)


def _function(argument: Any) -> Any:
    """The name of a function's graph."""
    return (argument[-1] if isinstance(argument, tuple) else argument).target


def _hoist(call: Node, bodies: Sequence[GraphModule], where: slice) -> None:
    """Move reads out of the functions of one operator, which are given its arguments `where`: one
    of these, a list, or all of them.
    """
    is_list = where.stop is not None
    given: list[Any] = list(call.args[where.start] if is_list else call.args[where])
    inputs = [body.graph.find_nodes(op="placeholder") for body in bodies]
    inputs = [found[len(found) - len(given) :] for found in inputs]
    moved = _reads(inputs)
    for (i, *spec), reads in moved.items():
        with call.graph.inserting_before(call):
            outside = call.graph.call_function(UNSHARD, (given[i], *spec))
        take_over(outside, reads[0][1])
        given.append(outside)
        for body, nodes in zip(bodies, inputs, strict=True):
            with body.graph.inserting_after(nodes[-1]):
                nodes.append(body.graph.placeholder(f"gathered_{len(nodes)}"))
            traced_as(nodes[-1], reads[0][1])
        for number, read in reads:
            read.replace_all_uses_with(inputs[number][-1])
            read.graph.erase_node(read)
    for i in sorted({i for i, *_ in moved}, reverse=True):
        if not any(nodes[i].users for nodes in inputs):  # of the flat buffer nothing else is read
            del given[i]
            for nodes in inputs:
                unread = nodes.pop(i)
                unread.graph.erase_node(unread)
    if moved:
        if is_list:
            kind = type(call.args[where.start])
            given = [tuple(given) if issubclass(kind, tuple) else given]
        rest = call.args[where.stop :] if is_list else ()
        call.args = (*call.args[: where.start], *given, *rest)
        for body in bodies:
            body.recompile()


def _reads(inputs: Sequence[Sequence[Node]]) -> dict[tuple[Any, ...], list[tuple[int, Node]]]:
    """What functions gather of their inputs: by the input's number and the parameter, in which
    function and by which nodes.
    """
    found: dict[tuple[Any, ...], list[tuple[int, Node]]] = {}
    for number, nodes in enumerate(inputs):
        for i, node in enumerate(nodes):
            for read in node.users:
                if read.target is UNSHARD:
                    found.setdefault((i, *read.args[1:]), []).append((number, read))
    return found
