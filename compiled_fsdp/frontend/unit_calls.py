"""The calls of units in a graph of Dynamo's: which nodes compute each, what it is given and yields,
and when two are equal (`equal_units.py`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as StockFSDP
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from compiled_fsdp.ir.graph import op_name
from compiled_fsdp.ir.meta import (
    take_over,
    traced_as,
    traced_as_value,
    traced_value,
)
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.ir.subgraphs import INVOKE
from compiled_fsdp.torch_private.subgraphs import grad_mode_at_start, is_plain_fake
from compiled_fsdp.units.reads import extended_as
from compiled_fsdp.units.unit import originals

from .control_flow import switch_name
from .unit_checkpoints import (
    calls_around,
    checkpointed,
    computed_in,
    is_checkpoint,
    policy_key,
    with_checkpointed,
)
from .unit_gradients import needs_grad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

NO_TENSOR = "%{} yields no plain tensor (a DTensor, or no tensor at all)"


@dataclass(eq=False)
class Call:
    """What a graph computes in one call of a unit's forward.

    path: of the module, "layers.3".
    kind: its class.
    around: the paths of the units that it is in, the outermost first.
    between: a node among them that is not of the call.
    switch: a node that has switched autograd, autocast or inference mode on or off where it starts,
        or has set something else of torch's before.
    within: a checkpoint that computes more than this call.
    """

    path: str
    kind: type
    around: tuple[str, ...]
    nodes: list[Node]
    between: Node | None = None
    switch: Node | None = None
    within: Node | None = None

    @property
    def depth(self) -> int:
        """In how many other units it is."""
        return len(self.around)

    @property
    def class_name(self) -> str:
        """Of the module, as the user wrote it; of what is inside, if it is a wrapper of FSDP1."""
        kind = self.kind
        if issubclass(kind, StockFSDP):
            stacks = [calls_around(node) for node in self.nodes]
            below = (
                inner[2]
                for stack in stacks
                for outer, inner in pairwise(stack)
                if outer[1] == self.path
            )
            kind = next(below, kind)
        return originals.get(kind, kind).__name__

    @cached_property
    def reads(self) -> list[Node]:
        """What stays outside: reads of parameters, and constants."""
        return [node for node in self.nodes if _stays_outside(node)]

    @cached_property
    def computed(self) -> dict[Node, None]:
        """The others."""
        return {node: None for node in self.nodes if not _stays_outside(node)}

    @cached_property
    def inputs(self) -> list[Node]:
        """What is read from outside, parameters included, in order of first reading."""
        read = (each for node in self.computed for each in node.all_input_nodes)
        return list(dict.fromkeys(each for each in read if each not in self.computed))

    @cached_property
    def outputs(self) -> list[Node]:
        """What is read outside."""
        return [n for n in self.computed if any(user not in self.computed for user in n.users)]

    @property
    def why_not(self) -> str:
        """Why it cannot be a subgraph, as far as its own nodes say; "" if it can."""
        if self._why_here:
            return self._why_here
        for node in self.computed:
            if why := _why_not(node):
                return why
        for node in (*self.inputs, *self.outputs):
            if not is_plain_fake(traced_value(node)):
                return NO_TENSOR.format(node.name)
        return "" if self.inputs and self.outputs else "nothing goes in, or nothing comes out"

    @property
    def _why_here(self) -> str:
        """Why it cannot be one because of where it stands: among nodes of other modules, under a
        checkpoint with others, or where autograd, autocast or inference mode is switched on or off;
        "" if it can.
        """
        if self.within is not None:
            return f"%{self.within.name}, a checkpoint, computes it together with others"
        if self.between is not None:
            return f"%{self.between.name}, of another module, stands in between"
        if self.switch is not None:
            return f"it stands behind %{self.switch.name} ({op_name(self.switch.target)})"
        if inside := next(filter(switch_name, with_checkpointed(self.computed)), None):
            return f"%{inside.name} switches autograd, autocast or inference mode on or off"
        return ""

    def made_up(self, leads: Sequence[set[int]], lead_out: set[Node]) -> int | None:
        """The number of an input that would get zeros for a gradient, and gets None where each op
        is differentiated by itself; None if there is none. It leads to none of the results, or only
        to those that the graph's results have no gradient for.

        leads: which inputs have a gradient from each result.
        lead_out: what the graph's results have a gradient for.
        """
        pairs = zip(self.outputs, leads, strict=True)
        have = set().union(*(from_it for node, from_it in pairs if node in lead_out))
        wanted = (i for i, node in enumerate(self.inputs) if needs_grad(node))
        return next((i for i in wanted if i not in have), None)

    @cached_property
    def lines(self) -> list[tuple[Any, ...]]:
        """Its nodes without names: equal for equal calls."""
        return _lines(self.inputs, self.computed)

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for calls that may share a subgraph."""
        place = {node: i for i, node in enumerate(self.computed)}
        inputs, outputs = map(look, self.inputs), (place[node] for node in self.outputs)
        return (tuple(self.lines), tuple(inputs), tuple(outputs))

    def body(self, gm: GraphModule) -> GraphModule:
        """The subgraph."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for i, node in enumerate(self.inputs):
            copies[node] = graph.placeholder(f"arg{i}_1")
            traced_as(copies[node], node)
        for node in self.computed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.outputs))
        return GraphModule(gm, graph)

    def now(self) -> Call:
        """The same, when others have become subgraphs."""
        return Call(self.path, self.kind, self.around, self.nodes, switch=self.switch)

    def replace_by(self, name: str) -> None:
        """Let a call of the subgraph of this name stand for it."""
        last = self.nodes[-1]
        graph = last.graph
        with graph.inserting_after(last):
            region = graph.get_attr(name)
        for read in self.reads:
            region.prepend(read)
        with graph.inserting_after(region):
            call = graph.call_function(INVOKE, (region, name, *self.inputs))
        take_over(call, last)
        traced_as_value(call, tuple(map(traced_value, self.outputs)))
        at = call
        for i, node in enumerate(self.outputs):
            with graph.inserting_after(at):
                at = graph.call_function(operator.getitem, (call, i))
            take_over(at, node)
            node.replace_all_uses_with(at, lambda user: user not in self.computed)
        for node in reversed(self.computed):
            graph.erase_node(node)
            if node.op == "get_attr":  # what was checkpointed is part of the subgraph
                graph.owning_module.delete_submodule(str(node.target))  # type: ignore[union-attr]


def _why_not(node: Node) -> str:
    """Why this node of Dynamo's graph cannot be one of a subgraph; "" if it can."""
    if (body := checkpointed(node)) is not None:
        return next(filter(None, map(_why_not, computed_in(body))), "")
    if node.op not in ("call_function", "call_method"):
        return f"%{node.name} is {node.op} {node.target}"
    if isinstance(node.target, torch._ops.HigherOrderOperator) and not is_checkpoint(node):
        return f"%{node.name} ({node.target.name()}) has functions of its own"
    if node.target is operator.setitem and not node.users:
        return ""
    values = traced_value(node)
    for value in values if isinstance(values, list | tuple) else [values]:
        if not is_plain_fake(value):
            return NO_TENSOR.format(node.name)
    return ""


def _lines(inputs: Iterable[Node], computed: Iterable[Node]) -> list[tuple[Any, ...]]:
    """Nodes without names, and what they are given."""
    number = {node: f"%arg{i}" for i, node in enumerate(inputs)}
    number |= {node: f"%{i}" for i, node in enumerate(computed)}

    def numbered(argument: Any) -> Any:
        return _Text(number[argument]) if isinstance(argument, Node) else argument

    def text(node: Node) -> str:
        return repr(map_aggregate((node.args, node.kwargs), numbered))

    lines: list[tuple[Any, ...]] = []
    for node in computed:
        if (body := checkpointed(node)) is None:
            lines.append((node.op, node.target, text(node), look(node)))
            continue
        given, end = body.graph.find_nodes(op="placeholder"), body.graph.output_node()
        inside = _lines(given, [*computed_in(body), end])
        lines.append((node.op, policy_key(body), tuple(map(look, given)), tuple(inside)))
    return lines


class _Text(str):
    """Is shown without quotes, so that no argument that is a text looks like a node."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def calls_in(graph: Graph) -> list[Call]:
    """All calls of units, in graph order."""
    found: dict[tuple[str, ...], Call] = {}
    stands: dict[Node, int] = {}
    switched: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if switch_name(node) or _is_setting(node):
            _follow(switched, node)
        stands[node] = len(stands)
        units = _units_around(node)
        for depth, (_, path, kind) in enumerate(units):
            keys = tuple(key for key, *_ in units[: depth + 1])
            around = tuple(path for _, path, _ in units[:depth])
            if keys not in found:
                found[keys] = Call(path, kind, around, [], switch=(*switched, None)[0])
            found[keys].nodes.append(node)
        for keys in _within(node):
            if keys in found:
                found[keys].within = node
    order = list(stands)
    for call in found.values():
        first, last = stands[call.nodes[0]], stands[call.nodes[-1]]
        if last - first + 1 > len(call.nodes):
            inside = set(call.nodes)
            call.between = next(n for n in order[first:last] if n not in inside)
    return list(found.values())


def _units_around(node: Node) -> list[tuple[str, str, type]]:
    return [call for call in calls_around(node) if hasattr(call[2], "_fsdp_call")]


def _within(node: Node) -> Iterator[tuple[str, ...]]:
    """Yields the calls of units that a checkpoint computes together with others, as in
    `calls_in`.
    """
    if is_checkpoint(node):
        depth = len(_units_around(node))
        for each in with_checkpointed(node.args[:1]):  # type: ignore[arg-type]
            units = _units_around(each)
            for k in range(depth, len(units)):
                yield tuple(key for key, *_ in units[: k + 1])


def _stays_outside(node: Node) -> bool:
    """Whether this reads a parameter, or is `torch.tensor([1.0, 2.0])`: AOTAutograd makes an
    attribute of a graph of it, and a subgraph that is called has none.
    """
    if node.target in (UNSHARD, extended_as):
        return True
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name in ("tensor", "as_tensor") and not node.all_input_nodes


def _is_setting(node: Node) -> bool:
    """Whether a node sets something of torch's, `_sdpa_kernel` say: it yields nothing, and is given
    no tensor.
    """
    return (
        node.op == "call_function"
        and traced_value(node) is None
        and node.target is not operator.setitem
        and op_name(node.target) != "_backend_from_string"
        and all(traced_value(each) is None for each in node.all_input_nodes)
    )


def _follow(switched: list[Node], node: Node) -> None:
    """Keep in `switched` what has been switched, and not back, after this node as well.

    An exit names what it ends. Autograd is as it was once it is switched to what it was where the
    graph begins. Of other settings it is not known what they were.
    """
    name = switch_name(node)
    if name.startswith("_exit_"):
        begun = name.replace("_exit_", "_enter_", 1)
        switched[:] = [
            other
            for other in switched
            if (other is not node.args[0] if node.args else switch_name(other) != begun)
        ]
        return
    if name == "_set_grad_enabled":
        switched[:] = [other for other in switched if switch_name(other) != name]
        if node.args[0] is grad_mode_at_start():
            return
    switched.append(node)


def look(node: Node) -> Any:
    """What a node yields, as far as a compiler may depend on it."""
    values = traced_value(node)
    if isinstance(values, list | tuple):
        return tuple(map(_look_of, values))
    return None if values is None else _look_of(values)


def _look_of(value: Tensor) -> tuple[Any, ...]:
    shape, strides = tuple(value.shape), tuple(value.stride())
    return (
        value.dtype,
        shape,
        strides,
        value.storage_offset(),
        value.device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
    )
