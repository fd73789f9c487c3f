"""What an optimizer remembers of parameters (Adam's averages, say), on the host between updates: in
the graph of a whole step, when it is copied to the device and back.

One `update_` has one copy each way, of all that rests on the host of its parameters. It begins so
late that it is there for the update, and is awaited on its way back when it should be done. Where
updates follow each other faster than copies, as behind a clipped norm, neither says how much may be
on the device at once: then no copy begins before the second update ahead of its own has run, and
none is under way back when the second update behind its own begins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from compiled_fsdp.ir.graph import order, output
from compiled_fsdp.ir.states import state_bytes

from .offload import Trip, clock, outward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

    from .costs import Costs

AHEAD = 2  # updates between which and their own a copy to the device may begin
BEHIND = 2  # updates behind its own before which a copy to the host is awaited


class Visit(NamedTuple):
    """A stay of state on the device: the update that it is for, the node before which its copy
    begins, and the one before which its way back is awaited.
    """

    update: Node
    begin: Node
    end: Node


def visits(graph: Graph, updates: Sequence[Node], costs: Costs) -> list[Visit]:
    """When the states of these updates, in their order, come and go."""
    nodes, position = list(graph.nodes), order(graph)
    reached, end = clock(graph, costs), position[output(graph)]
    first = 1 + max(position[n] for n in nodes if n.op == "placeholder")
    seconds = [costs.copy(state_bytes(update)) for update in updates]
    places = [position[update] for update in updates]
    back = [Trip(reached[at + 1], each) for at, each in zip(places, seconds, strict=True)]
    # Before the graph has begun, or the second update ahead has run, none begins.
    earliest = [first] * AHEAD + [at + 1 for at in places]
    begins, following = [0.0] * len(updates), inf
    for i in reversed(range(len(updates))):
        in_time = min(following, reached[places[i]]) - seconds[i]
        begins[i] = following = max(reached[earliest[i]], in_time)
    found = []
    for i, (update, done) in enumerate(zip(updates, outward(back), strict=True)):
        is_bound = begins[i] <= reached[earliest[i]]
        begin = earliest[i] if is_bound else bisect_right(reached, begins[i]) - 1
        latest = places[i + BEHIND] if i + BEHIND < len(updates) else end
        until = max(places[i] + 1, bisect_left(reached, done))
        found.append(Visit(update, nodes[min(begin, places[i])], nodes[min(until, latest)]))
    return found
