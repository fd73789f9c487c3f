"""Which optimizer state a memory budget would rather have in host memory between updates.

One candidate is all that is remembered of the parameters of one flat buffer, as far as it may be
there. The first trial of a step has all of it on the host, so that what its copies leave exposed is
seen in that trial's timeline; to keep it on the device takes its bytes wherever it is not there for
its update. Where the host has no room for all, what costs least for each byte goes there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from compiled_fsdp.ir.graph import find, order, value
from compiled_fsdp.ir.schema import FETCH_STATE, REDUCE_GRAD, STORE_STATE, param_spec
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.wire import copies

from .peaks import STATE, Candidate, Span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Graph, Node

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.plan import Plan

    from .trial import Trial
    from .whole_step import WholeStep

CALLS = 4  # two starts and two waits, which are launched
States = dict[str, Candidate]  # by the name of the flat buffer in graphs


def hostable(joint: Graph, step: WholeStep | None, plan: Plan) -> States:
    """The optimizer state that could be on the host, in the order in which backward reduces the
    gradients; none but in the graph of a whole step, on a device with memory of its own.
    """
    if step is None or plan.optimizer_state is None:
        return {}
    names = dict(step.states)
    whole = {(matrix.unit, matrix.fqn) for matrix in step.matrices}
    specs: dict[Node, dict[tuple[str, str], ParamSpec]] = {}
    for node in find(joint, REDUCE_GRAD):
        flat, spec = cast("Node", node.args[1]), param_spec(node)
        key = spec.unit, spec.fqn
        if key in names and key not in whole and copies.is_planned_apart(value(flat).device):
            specs.setdefault(flat, {})[key] = spec
    found = {}
    for flat, members in specs.items():
        size = value(flat).itemsize
        num_bytes = sum(len(names[key]) * s.shard_numel * size for key, s in members.items())
        first = min(members, key=lambda key: members[key].offset)
        tensors = dict.fromkeys(name for key in members for name in names[key])
        if num_bytes:
            found[flat.name] = Candidate(STATE, first, num_bytes, values=tuple(tensors))
    return found


def priced(first: Trial, states: States, costs: Costs) -> States:
    """The same, with what their copies leave exposed, and where they are not on the device, by a
    trial in which all of them are on the host.
    """
    graph = first.lifetimes[-1].graph
    position, line = order(graph), predict(graph, costs)
    found = dict(states)
    stores = {cast("Node", node.args[1]).name: node for node in find(graph, STORE_STATE)}
    for fetch in find(graph, FETCH_STATE):
        name = cast("Node", fetch.args[0]).name
        if name not in states:
            continue
        store, num_bytes = stores[name], states[name].num_bytes
        seconds = sum(line.exposed.get(start, 0.0) for start in (fetch, store))
        last = max(position[user] for user in store.users)
        found[name] = replace(
            states[name],
            seconds=seconds + CALLS * costs.overhead,
            away=(
                Span(0, position[fetch] - 1, num_bytes),
                Span(last + 1, len(position) - 1, num_bytes),
            ),
        )
    return found


def cheapest(states: States, room: float) -> States:
    """Those that cost least for each byte, as far as the host has room."""
    found: States = {}
    for name in sorted(states, key=lambda name: _price(states[name])):
        if bytes_of([*found.values(), states[name]]) <= room:
            found[name] = states[name]
    return {name: found[name] for name in states if name in found}


def _price(candidate: Candidate) -> float:
    return (candidate.seconds or 0.0) / candidate.num_bytes


def bytes_of(candidates: Iterable[Candidate]) -> int:
    """On the host, if all of these are there."""
    return sum(candidate.num_bytes for candidate in candidates)
