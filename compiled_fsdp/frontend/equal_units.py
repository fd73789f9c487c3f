"""Units that compute the same become calls of one subgraph, before AOTAutograd traces them
(`Plan(regions="units")`).

[Note: equal units]
Of 48 equal layers Dynamo makes 48 copies, which AOTAutograd differentiates, torch's partitioner
cuts, our passes and Inductor walk, one by one. With `regions="units"` the forward of a unit that
occurs three times or more becomes a graph of its own, which torch's `invoke_subgraph` traces,
differentiates, cuts and compiles once:

    %w0 = unshard(%flat0, "w") becomes %w0 = unshard(%flat0, "w")
    %y0 = linear(relu(%x), %w0)        %y0 = invoke_subgraph(%fsdp_unit_0, "fsdp_unit_0", %x, %w0)
    %w1 = unshard(%flat1, "w")         %w1 = unshard(%flat1, "w")
    %y1 = linear(relu(%y0), %w1)       %y1 = invoke_subgraph(%fsdp_unit_0, "fsdp_unit_0", %y0, %w1)

Reads of parameters, and constants, stay outside, so that gathers, reductions and frees are nodes as
ever. What AOTAutograd makes of a call is tidied by `compiler/read_past_calls.py`; `outline` puts
what surrounds it, copies out of buckets and gradients into buckets, into the same kernels.

Two calls are equal if their nodes, one by one, have the same function, options, shapes, strides,
dtypes and `requires_grad`, and read the same places of each other. Left where it stands, and said
once: a unit whose nodes are not together, that writes to what it is given, or is given an input of
the graph that is written to elsewhere, whose results lie in what it is given, with a parameter that
leads to none of its results that are used (it would get zeros: `unit_gradients.py`), that draws
random numbers, communicates, has operators with functions of their own (`cond`; checkpoints are
kept inside: `unit_checkpoints.py`), that switches autograd or autocast on or off, or stands where
they are switched, or under a checkpoint with others; everything in graphs of dynamic shapes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.graph import erase_all, op_name
from compiled_fsdp.ir.meta import traced_value
from compiled_fsdp.ir.repeats import LEAST_TIMES
from compiled_fsdp.ir.subgraphs import UNIT
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.subgraphs import note_units, what_forbids

from .control_flow import hoist_from_checkpoints
from .unit_calls import Call, calls_in, look
from .unit_checkpoints import checkpointed, is_checkpoint
from .unit_gradients import gradients_of, needs_grad, that_lead_out
from .written import is_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule, Node

_FEW = f"it occurs {{}} times, and is compiled once from {LEAST_TIMES} on"


def outline_units(gm: GraphModule, written: set[int], *, writes_parameters: bool) -> None:
    """See the note above.

    written: the storages that the graph writes to in place.
    writes_parameters: whether a parameter is among them, so that it matters when one is read.
    """
    plan = current_plan()
    if not plan.shares_units:
        return
    why = "it writes to a parameter in place" if writes_parameters else _why_none(gm.graph)
    if why:
        _say(f"a graph of sharded units is compiled as it stands: {why}")
        return
    # of modules that a forward makes, `nn.Softmax(-1)(x)` say: yields nothing, decides nothing
    erase_all(node for node in gm.graph.nodes if op_name(node.target) == "_log_api_usage_once")
    hoist_from_checkpoints(gm)
    calls, lead_out = calls_in(gm.graph), that_lead_out(gm.graph)
    if isinstance(plan.regions, tuple):
        calls = _of_classes(calls, plan.regions)
    alone = {call.path: why for call in calls if (why := _why_written(call, written))}
    calls = [call for call in calls if call.path not in alone]
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
    """Let equal calls become calls of one subgraph; the paths of those that did.
    Others are noted with the reason.
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


def _of_classes(calls: list[Call], names: tuple[str, ...]) -> list[Call]:
    """Those of classes of these names, as the user wrote them;
    a name that none has is announced.
    """
    there = list(dict.fromkeys(call.class_name for call in calls))
    if missing := [name for name in names if name not in there]:
        _say(f"no unit of a graph is of class {shortened(missing)}; there are {shortened(there)}")
    return [call for call in calls if call.class_name in names]


def _say_what_stays(graph: Graph, number: int, alone: dict[str, str]) -> None:
    """Which units are compiled for their place, and why.

    number: of subgraphs that were made.
    alone: the reasons, by the paths of units that could not be subgraphs.
    """
    if not alone and any(map(is_checkpoint, graph.nodes)):
        _say("what is under activation checkpointing is compiled for its place")
    elif not number and not alone:
        _say(f"no unit occurs {LEAST_TIMES} times in a graph: each is compiled for its place")
    for why in dict.fromkeys(alone.values()):
        paths = [path for path, reason in alone.items() if reason == why]
        _say(f"units are compiled for their place: {shortened(paths, 3)}: {why}")


def _say(what: str) -> None:
    warn_once(f"compiled_fsdp: Plan(regions={current_plan().regions!r}): {what}")


def _why_none(graph: Graph) -> str:
    """Why no unit of a graph may be a subgraph; "" if they may."""
    for node in graph.nodes:
        if isinstance(traced_value(node), torch.SymInt):
            return f"dynamic shapes (%{node.name})"
    return ""


def _why_written(call: Call, written: set[int]) -> str:
    """Why a call may not be a subgraph, whose backward may read its inputs when they have other
    values; "" if it may.
    """
    inputs = (node for node in call.inputs if node.op == "placeholder")
    found = next((node for node in inputs if is_written(node, written)), None)
    return f"it reads %{found.name}, which the graph writes to" if found is not None else ""


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
        if line != like and checkpointed(mine) is not None and checkpointed(theirs) is not None:
            return f"%{mine.name}, a checkpoint, computes or keeps other than that of {other.path}"
        if line != like:
            return (
                f"%{mine.name} ({_named(mine)}) where {other.path} has %{theirs.name} "
                f"({_named(theirs)})"
            )
    if len(call.lines) != len(other.lines):
        return f"{len(call.lines)} nodes, where {other.path} has {len(other.lines)}"
    for given, instead in zip(call.inputs, other.inputs, strict=False):
        if look(given) != look(instead):
            return f"it is given {_described(given)}, where {other.path} has {_described(instead)}"
    return f"it has other results than {other.path}, or other arguments"


def _named(node: Node) -> str:
    return f"{op_name(node.target)} of {traced_value(node)!s}"


def _described(node: Node) -> str:
    return f"%{node.name} ({traced_value(node)!s}, requires_grad={needs_grad(node)})"
