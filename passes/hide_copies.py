"""Hide the copies of activations to the host and back: start each early, await it late.

Before, in the graph of a whole step, where a copy takes as long as two things that are computed:

    %a = mm(%x, %w)
    %h = copy_to(%a, "host")
    ... compute with %a ...
    ... compute with %y ...
    ... compute with %y ...
    ... compute with %y ...
    ... compute with %y ...
    %b = copy_to(%h, "cuda")
    %d = mm(%y, %b)

After:

    %a = mm(%x, %w)
    %o = offload(%a)
    ... compute with %a ...
    ... compute with %y ...
    %h = wait(%o)
    ... compute with %y ...
    %r = reload(%h, "cuda")
    ... compute with %y ...
    ... compute with %y ...
    %b = wait(%r)
    %d = mm(%y, %b)

Requires: the final order of collectives, and of what is computed.
Ensures: a copy to the host starts where its source is computed; it is awaited behind the last use
    of the source, and not before it should be done, by the plan's costs or those that are assumed
    for the device; at the latest at the end. A copy back starts as late as it should be there where
    it is read first, and is awaited there. Copies of one direction take turns. Each is started and
    awaited once. Where a forward or a backward is shorter than its copies, it stands still early
    instead of at its end, or starts copies late, so that few values are there beside their copies.
Leaves alone: copies that belong to a communication (`copy_aside`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import HOST, WAIT
from compiled_fsdp.ir.graph import Builder, find, last_read, order, phase_of, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import COPY_TO, OFFLOAD, RELOAD
from compiled_fsdp.planning.costs import assumed, nbytes
from compiled_fsdp.planning.offload import Trip, awaited, begun, clock
from compiled_fsdp.planning.recompute import origin

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.plan import Plan


def hide_copies(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    copies = [node for node in find(gm.graph, COPY_TO) if get_tag(node) is None]
    if not copies:
        return gm
    there = [node for node in copies if node.args[1] == HOST]
    back = [node for node in copies if node.args[1] != HOST]
    on_device = [node.all_input_nodes[0] for node in there] + back
    costs = plan.costs or assumed(value(on_device[0]).device.type)
    _offload(gm, there, costs)
    _reload(gm, back, costs)
    return gm


def _offload(gm: GraphModule, copies: list[Node], costs: Costs) -> None:
    """Start each copy to the host where there is something to copy, and await it late."""
    nodes, position = [n for n in gm.graph.nodes if n not in copies], order(gm.graph)
    places = [position[node] for node in nodes]
    reached = clock(gm.graph, costs)
    sources = [copy.all_input_nodes[0] for copy in copies]
    trips = [Trip(reached[position[source] + 1], costs.copy(nbytes(source))) for source in sources]
    turn = reached[-1] if phase_of(gm.graph) == "forward" else None
    for copy, source, done in zip(copies, sources, awaited(trips, turn), strict=True):
        place = max(last_read(origin(source), position) + 1, bisect_left(reached, done))
        latest = min(position[user] for user in copy.users)
        before = nodes[bisect_left(places, min(place, latest))]
        start = Builder(source.next, copy)(OFFLOAD, source, copy.args[2])
        copy.replace_all_uses_with(Builder(before, copy)(WAIT, start))
        gm.graph.erase_node(copy)


def _reload(gm: GraphModule, copies: list[Node], costs: Costs) -> None:
    """Start each copy to the device so that it is there where it is read first."""
    nodes, position = [n for n in gm.graph.nodes if n not in copies], order(gm.graph)
    places = [position[node] for node in nodes]
    reached = clock(gm.graph, costs)
    inputs = max(position[n] for n in nodes if n.op == "placeholder")
    first = [min(copy.users) for copy in copies]
    trips = [
        Trip(reached[position[user]], costs.copy(nbytes(copy)))
        for copy, user in zip(copies, first, strict=True)
    ]
    starts = []
    turn = 0.0 if phase_of(gm.graph) == "backward" else None
    for copy, user, begin in zip(copies, first, begun(trips, turn), strict=True):
        source = copy.all_input_nodes[0]
        place = max(inputs + 1, position[source] + 1, bisect_right(reached, begin) - 1)
        before = nodes[bisect_left(places, min(place, position[user]))]
        starts.append(Builder(before, copy)(RELOAD, source, copy.args[1]))
    # Behind all starts: of two at one place, the second does not begin behind the first's wait.
    for copy, user, start in zip(copies, first, starts, strict=True):
        copy.replace_all_uses_with(Builder(user, copy)(WAIT, start))
        gm.graph.erase_node(copy)
