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

Reads of parameters stay outside, so that gathers, reductions and frees are nodes as ever. What
AOTAutograd makes of a call is tidied by `compiler/read_past_calls.py`; `outline` puts what surrounds
it, copies out of buckets and gradients into buckets, into the same kernels.

Two calls are equal if their nodes, one by one, have the same function, options, shapes, strides,
dtypes and `requires_grad`, and read the same places of each other. Left where it stands, and said
once: a unit whose nodes are not together, that writes to what it is given, whose results lie in
what it is given, with a parameter that leads to some of its results only (it would get zeros where
the others alone are used), that draws random numbers, communicates, or has operators with functions
of their own (checkpoints, `cond`); everything in graphs of dynamic shapes, or that switch autograd
or autocast on or off.
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

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_TENSOR = "%{} yields no tensor"


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
    calls = _calls(gm.graph)
    alone: dict[str, str] = {}
    number = 0
    for depth in range(max((call.depth for call in calls), default=-1) + 1):
        for group in _groups([call for call in calls if call.depth == depth], alone):
            name = f"{UNIT}{number}"
            first = group[0].now()
            body = first.body(gm)
            why = first.why_zeros or what_forbids(body, list(map(traced_value, first.inputs)))
            if why:
                alone.update((call.path, why) for call in group)
                continue
            number += 1
            gm.add_submodule(name, body)
            for call in group:
                call.now().replace_by(name)
            inside = {call.path for call in group}
            calls = [c for c in calls if inside.isdisjoint((c.path, *c.around))]
    _say_what_stays(gm.graph, number, alone)
    if number:
        note_units()
        gm.recompile()


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
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and (
            name.startswith(("_enter_", "_exit_")) or name == "_set_grad_enabled"
        ):
            return f"it switches autograd, autocast or inference mode on or off ({name})"
    return ""


@dataclass(eq=False)
class Call:
    """What a graph computes in one call of a unit's forward.

    path: of the module, "layers.3".
    kind: its class.
    around: the paths of the units that it is in, the outermost first.
    between: a node among them that is not of the call.
    """

    path: str
    kind: type
    around: tuple[str, ...]
    nodes: list[Node]
    between: Node | None = None

    @property
    def depth(self) -> int:
        """In how many other units it is."""
        return len(self.around)

    @cached_property
    def reads(self) -> list[Node]:
        """Reads of parameters."""
        return [node for node in self.nodes if node.target is UNSHARD]

    @cached_property
    def computed(self) -> dict[Node, None]:
        """The others."""
        return {node: None for node in self.nodes if node.target is not UNSHARD}

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
        if self.between is not None:
            return f"%{self.between.name}, of another module, stands in between"
        for node in self.computed:
            if node.op not in ("call_function", "call_method"):
                return f"%{node.name} is {node.op} {node.target}"
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return f"%{node.name} ({node.target.name()}) has functions of its own"
            values = traced_value(node)
            for value in values if isinstance(values, list | tuple) else [values]:
                if not is_plain_fake(value):
                    return NO_TENSOR.format(node.name)
        for node in (*self.inputs, *self.outputs):
            if not is_plain_fake(traced_value(node)):
                return NO_TENSOR.format(node.name)
        return "" if self.inputs and self.outputs else "nothing goes in, or nothing comes out"

    @property
    def why_zeros(self) -> str:
        """Why some gradient would come out as zeros that is None where each op is differentiated by
        itself; "" if none would: what leads to some results alone has no gradient where the others
        alone are used.
        """
        ends = {node for node in self.outputs if _needs_grad(node)}
        leads: dict[Node, set[Node]] = {}
        for node in reversed(self.computed):
            found = {node} & ends
            for user in node.users:
                found |= leads.get(user, set())
            leads[node] = found if _needs_grad(node) else set()
        for node in filter(_needs_grad, self.inputs):
            found = set().union(*(leads[user] for user in node.users if user in leads))
            if found != ends:
                part = "some only" if found else "none"
                return (
                    f"of its results %{node.name} leads to {part}, and would get zeros for a "
                    "gradient where there is none"
                )
        return ""

    @cached_property
    def lines(self) -> list[tuple[Any, ...]]:
        """Its nodes without names: equal for equal calls."""
        names = [*self.inputs, *self.computed]
        number = {node: f"%{i}" for i, node in enumerate(names)}

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
        return Call(self.path, self.kind, self.around, self.nodes)

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
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stands[node] = len(stands)
        units = [
            (k, path, kind) for k, path, kind in module_calls(node) if hasattr(kind, "_fsdp_call")
        ]
        for depth, (_, path, kind) in enumerate(units):
            keys = tuple(key for key, *_ in units[: depth + 1])
            around = tuple(path for _, path, _ in units[:depth])
            found.setdefault(keys, Call(path, kind, around, [])).nodes.append(node)
    order = list(stands)
    for call in found.values():
        first, last = stands[call.nodes[0]], stands[call.nodes[-1]]
        if last - first + 1 > len(call.nodes):
            inside = set(call.nodes)
            call.between = next(n for n in order[first:last] if n not in inside)
    return list(found.values())


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
        return f"it occurs {len(group)} times, and is compiled once from {LEAST_TIMES} on"
    other = often[0][0]
    pairs = zip(call.computed, call.lines, other.computed, other.lines, strict=False)
    for mine, line, theirs, like in pairs:
        if line != like:
            return (
                f"%{mine.name} ({_named(mine)}) where {other.path} has %{theirs.name} "
                f"({_named(theirs)})"
            )
    return f"{len(call.lines)} nodes, and what they read, where {other.path} has {len(other.lines)}"


def _named(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f"{name} of {traced_value(node)!s}"


def _needs_grad(node: Node) -> bool:
    values = traced_value(node)
    return any(
        value.requires_grad for value in (values if isinstance(values, list | tuple) else [values])
    )


def _look(node: Node) -> Any:
    """What a node yields, as far as a compiler may depend on it."""
    values = traced_value(node)
    if isinstance(values, list | tuple):
        return tuple(map(_look_of, values))
    return _look_of(values)


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
