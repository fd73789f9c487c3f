"""Units that compute the same become calls of one subgraph, before AOTAutograd traces them
(`Plan(regions="units")`).

[Note: equal units]
Of 48 equal layers Dynamo makes 48 copies, which AOTAutograd differentiates, torch's partitioner
cuts, our passes and Inductor walk, one by one. With `regions="units"` the forward of a unit that
occurs three times or more becomes a graph of its own, which torch's `invoke_subgraph` traces,
differentiates, cuts and compiles once:

    %w0 = unshard(%flat0, "w")            %w0 = unshard(%flat0, "w")
    %y0 = linear(relu(%x), %w0)   becomes %y0 = invoke_subgraph(%fsdp_unit_0, "fsdp_unit_0", %x, %w0)
    %w1 = unshard(%flat1, "w")            %w1 = unshard(%flat1, "w")
    %y1 = linear(relu(%y0), %w1)          %y1 = invoke_subgraph(%fsdp_unit_0, "fsdp_unit_0", %y0, %w1)

Reads of parameters, and constants, stay outside, so that gathers, reductions and frees are nodes as ever. What
AOTAutograd makes of a call is tidied by `compiler/read_past_calls.py`; `outline` puts what surrounds
it, copies out of buckets and gradients into buckets, into the same kernels.

Two calls are equal if their nodes, one by one, have the same function, options, shapes, strides,
dtypes and `requires_grad`, and read the same places of each other. Left where it stands, and said
once: a unit whose nodes are not together, that writes to what it is given, whose results lie in
what it is given, with a parameter that leads to none of its results that are used (it would get
zeros: `unit_gradients.py`), that draws random numbers, communicates, has operators with functions of
their own (checkpoints, `cond`), that switches autograd or autocast on or off, or stands where they
are switched; everything in graphs of dynamic shapes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.meta import (
    module_calls,
    take_over,
    traced_as,
    traced_as_value,
    traced_value,
)
from compiled_fsdp.ir.repeats import LEAST_TIMES
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.ir.subgraphs import INVOKE, UNIT
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.subgraphs import (
    is_plain_fake,
    note_units,
    operator_name,
    what_forbids,
)

from .control_flow import CHECKPOINT
from .unit_gradients import gradients_of, needs_grad, that_lead_out

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_TENSOR = "%{} yields no tensor"
_FEW = f"it occurs {{}} times, and is compiled once from {LEAST_TIMES} on"


def outline_units(gm: GraphModule, *, writes_parameters: bool) -> None:
    """See the note above.

    writes_parameters: whether the graph writes to a parameter in place, so that it matters when
        one is read.
    """
    if current_plan().regions != "units":
        return
    why = "it writes to a parameter in place" if writes_parameters else _why_none(gm.graph)
    if why:
        _say(f"a graph of sharded units is compiled as it stands: {why}")
        return
    calls, lead_out = _calls(gm.graph), that_lead_out(gm.graph)
    alone: dict[str, str] = {}
    number = 0
    for depth in range(max((call.depth for call in calls), default=-1) + 1):
        for group in _groups([call for call in calls if call.depth == depth], alone):
            if shared := _share(gm, group, f"{UNIT}{number}", lead_out, alone):
                number += 1
                calls = [c for c in calls if shared.isdisjoint((c.path, *c.around))]
    _say_what_stays(gm.graph, number, alone)
    if number:
        note_units()
        gm.recompile()


def _share(
    gm: GraphModule, group: list[Call], name: str, lead_out: set[Node], alone: dict[str, str]
) -> set[str]:
    """Let equal calls become calls of one subgraph; the paths of those that did. Others are noted with
    the reason.
    """
    first = group[0].now()
    body, inputs = first.body(gm), list(map(traced_value, first.inputs))
    if why := what_forbids(body, inputs):
        alone.update((call.path, why) for call in group)
        return set()
    leads = gradients_of(body, inputs)
    equal = []
    for call in group:
        at = call.now().made_up(leads, lead_out)
        if at is None:
            equal.append(call)
            continue
        some = "what is used" if any(at in each for each in leads) else "any"
        why = f"has no gradient from {some} of its results, and would get zeros"
        alone[call.path] = f"%{first.inputs[at].name} of {first.path} {why}"
    if len(equal) < LEAST_TIMES:
        alone.update((call.path, _FEW.format(len(equal))) for call in equal)
        return set()
    gm.add_submodule(name, body)
    for call in equal:
        call.now().replace_by(name)
    return {call.path for call in equal}


def _say_what_stays(graph: Graph, number: int, alone: dict[str, str]) -> None:
    """Which units are compiled for their place, and why.

    number: of subgraphs that were made.
    alone: the reasons, by the paths of units that could not be subgraphs.
    """
    if any(operator_name(node.target) == CHECKPOINT for node in graph.nodes):
        _say("what is under activation checkpointing is compiled for its place")
    elif not number and not alone:
        _say(f"no unit occurs {LEAST_TIMES} times in a graph: each is compiled for its place")
    for why in dict.fromkeys(alone.values()):
        paths = [path for path, reason in alone.items() if reason == why]
        _say(f"units are compiled for their place: {shortened(paths, 3)}: {why}")


def _say(what: str) -> None:
    warn_once(f"compiled_fsdp: Plan(regions='units'): {what}")


def _why_none(graph: Graph) -> str:
    """Why no unit of a graph may be a subgraph; "" if they may."""
    for node in graph.nodes:
        if isinstance(traced_value(node), torch.SymInt):
            return f"dynamic shapes (%{node.name})"
    return ""


@dataclass(eq=False)
class Call:
    """What a graph computes in one call of a unit's forward.

    path: of the module, "layers.3".
    kind: its class.
    around: the paths of the units that it is in, the outermost first.
    between: a node among them that is not of the call.
    switch: a node that has switched autograd, autocast or inference mode on or off where it starts.
    """

    path: str
    kind: type
    around: tuple[str, ...]
    nodes: list[Node]
    between: Node | None = None
    switch: Node | None = None

    @property
    def depth(self) -> int:
        """In how many other units it is."""
        return len(self.around)

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
            if node.op not in ("call_function", "call_method"):
                return f"%{node.name} is {node.op} {node.target}"
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return f"%{node.name} ({node.target.name()}) has functions of its own"
            if node.target is operator.setitem and not node.users:
                continue
            values = traced_value(node)
            for value in values if isinstance(values, list | tuple) else [values]:
                if not is_plain_fake(value):
                    return NO_TENSOR.format(node.name)
        for node in (*self.inputs, *self.outputs):
            if not is_plain_fake(traced_value(node)):
                return NO_TENSOR.format(node.name)
        return "" if self.inputs and self.outputs else "nothing goes in, or nothing comes out"

    @property
    def _why_here(self) -> str:
        """The same, as far as what stands around says, and what changes how others compute."""
        if self.between is not None:
            return f"%{self.between.name}, of another module, stands in between"
        if self.switch is not None:
            return f"it stands behind %{self.switch.name} ({_switch(self.switch)})"
        if inside := next(filter(_switch, self.computed), None):
            return f"%{inside.name} switches autograd, autocast or inference mode on or off"
        return ""

    def made_up(self, leads: Sequence[set[int]], lead_out: set[Node]) -> int | None:
        """The number of an input that would get zeros for a gradient, and gets None where each op is
        differentiated by itself; None if there is none. It leads to none of the results, or only to
        those that the graph's results have no gradient for.

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
        number = {node: f"%arg{i}" for i, node in enumerate(self.inputs)}
        number |= {node: f"%{i}" for i, node in enumerate(self.computed)}

        def numbered(argument: Any) -> Any:
            return _Text(number[argument]) if isinstance(argument, Node) else argument

        return [
            (
                node.op,
                node.target,
                repr(map_aggregate((node.args, node.kwargs), numbered)),
                _look(node),
            )
            for node in self.computed
        ]

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for calls that may share a subgraph."""
        place = {node: i for i, node in enumerate(self.computed)}
        inputs, outputs = map(_look, self.inputs), (place[node] for node in self.outputs)
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


class _Text(str):
    """Is shown without quotes, so that no argument that is a text looks like a node."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _calls(graph: Graph) -> list[Call]:
    """All calls of units, in graph order."""
    found: dict[tuple[str, ...], Call] = {}
    stands: dict[Node, int] = {}
    switched: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _switch(node):
            _follow(switched, node)
        stands[node] = len(stands)
        units = [
            (k, path, kind) for k, path, kind in module_calls(node) if hasattr(kind, "_fsdp_call")
        ]
        for depth, (_, path, kind) in enumerate(units):
            keys = tuple(key for key, *_ in units[: depth + 1])
            around = tuple(path for _, path, _ in units[:depth])
            if keys not in found:
                found[keys] = Call(path, kind, around, [], switch=(*switched, None)[0])
            found[keys].nodes.append(node)
    order = list(stands)
    for call in found.values():
        first, last = stands[call.nodes[0]], stands[call.nodes[-1]]
        if last - first + 1 > len(call.nodes):
            inside = set(call.nodes)
            call.between = next(n for n in order[first:last] if n not in inside)
    return list(found.values())


def _stays_outside(node: Node) -> bool:
    """Whether this reads a parameter, or is `torch.tensor([1.0, 2.0])`: AOTAutograd makes an attribute of
    a graph of it, and a subgraph that is called has none.
    """
    if node.target is UNSHARD:
        return True
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name in ("tensor", "as_tensor") and not node.all_input_nodes


def _switch(node: Node) -> str:
    """What switches autograd, autocast or inference mode on or off, by name; "" for other nodes."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    is_switch = name.startswith(("_enter_", "_exit_")) or name == "_set_grad_enabled"
    return name if is_switch else ""


def _follow(switched: list[Node], node: Node) -> None:
    """Keep in `switched` what has been switched, and not back, after this node as well.

    An exit names what it ends. Autograd is as it was when the graph began once it is switched to
    what is on now, in the compilation.
    """
    name = _switch(node)
    if name.startswith("_exit_"):
        switched[:] = [other for other in switched if other is not node.args[0]]
        return
    if name == "_set_grad_enabled":
        switched[:] = [other for other in switched if _switch(other) != name]
        if node.args[0] is torch.is_grad_enabled():
            return
    switched.append(node)


def _groups(calls: Sequence[Call], alone: dict[str, str]) -> list[list[Call]]:
    """Equal calls, of classes that occur often enough; those that are not are noted with the
    reason.
    """
    kinds: dict[type, list[Call]] = defaultdict(list)
    for call in calls:
        kinds[call.kind].append(call)
    found = []
    for alike in kinds.values():
        if len(alike) < LEAST_TIMES:
            continue
        forms: dict[Any, list[Call]] = defaultdict(list)
        for call in alike:
            if why := call.why_not:
                alone[call.path] = why
            else:
                forms[call.form].append(call)
        often = [group for group in forms.values() if len(group) >= LEAST_TIMES]
        found += often
        for group in forms.values():
            if len(group) < LEAST_TIMES:
                alone.update((call.path, _why_alone(call, group, often)) for call in group)
    return found


def _why_alone(call: Call, group: Sequence[Call], often: Sequence[Sequence[Call]]) -> str:
    if not often:
        return _FEW.format(len(group))
    other = often[0][0]
    pairs = zip(call.computed, call.lines, other.computed, other.lines, strict=False)
    for mine, line, theirs, like in pairs:
        if line != like:
            return (
                f"%{mine.name} ({_named(mine)}) where {other.path} has %{theirs.name} "
                f"({_named(theirs)})"
            )
    if len(call.lines) != len(other.lines):
        return f"{len(call.lines)} nodes, where {other.path} has {len(other.lines)}"
    for given, instead in zip(call.inputs, other.inputs, strict=False):
        if _look(given) != _look(instead):
            return f"it is given {_described(given)}, where {other.path} has {_described(instead)}"
    return f"it has other results than {other.path}, or other arguments"


def _named(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f"{name} of {traced_value(node)!s}"


def _described(node: Node) -> str:
    return f"%{node.name} ({traced_value(node)!s}, requires_grad={needs_grad(node)})"


def _look(node: Node) -> Any:
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
