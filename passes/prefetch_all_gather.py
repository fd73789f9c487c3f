"""Start each all-gather ahead of its use, as early as costs ask for, or by the distance that the
plan sets.

A user's explicit lists (`set_modules_to_forward_prefetch`, `_backward_prefetch`) come before the
plan.

Before:

    %a0 = all_gather(%flat0)
    %w0 = view(wait(%a0), shape0)
    ... compute with %w0 ...
    %a1 = all_gather(%flat1)
    %w1 = view(wait(%a1), shape1)

After, with prefetch=1:

    %a0 = all_gather(%flat0)
    %a1 = all_gather(%flat1)
    %w0 = view(wait(%a0), shape0)
    ... compute with %w0 ...
    %w1 = view(wait(%a1), shape1)

Requires: a lowered graph.
Ensures: by distance (`plan.prefetch` in forward, `plan.backward_prefetch` in backward), the n-th
    all-gather, with what prepares its input, stands before the wait of the (n - prefetch)-th, or,
    for a fraction, before a matmul that share of the way to the next wait; from costs, it stands
    where `planner.gather_anchors` says. In the order of their waits. With lists: where the first
    unit whose list names it begins (the outermost: at the start of the graph), and where a unit
    with a list begins, nothing else; the others by distance. However it is decided, no further
    ahead than a unit's settings allow (`forward_ahead`, `backward_ahead`).
Leaves alone: an all-gather of a value that is computed later than that wait, from more than the
    graph's inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.ir.graph import is_step, move_before, point, preparation
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.planning.plan_fields import DISTANCES
from compiled_fsdp.planning.planner import gather_anchors

from .base import consume

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def prefetch_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    regions = sorted(
        (r for r in find_regions(graph, "gather") if r.starts), key=lambda r: r.waits[0]
    )
    names = ["backward_prefetch" if r.is_in_backward else "prefetch" for r in regions]
    if not any(map(_after, regions)) and all(plan.distance(name) is None for name in names):
        decided = _from_costs(gm, plan, regions)
    else:
        decided = _by_distance(gm, plan, regions, names)
    for name in dict.fromkeys(names):
        consume(gm, f"Plan.{name}")
    for region, anchor in bounded(decided):
        start = region.starts[0]
        before = preparation(region.sources)
        moved = [*(before or ()), *(n for n in region.nodes if n is start or n < start)]
        # What prepares the input may stand where the gather is to start.
        while anchor in moved and anchor is not start:
            anchor = anchor.next
        if before is not None or all(n < anchor for n in region.sources):
            move_before([n for n in moved if anchor < n], anchor)
    return gm


def _from_costs(gm: GraphModule, plan: Plan, regions: list[Region]) -> list[tuple[Region, Node]]:
    """Pairs (all-gather, the node that it starts before), in order."""
    if not regions:
        return []
    assert plan.costs is not None
    consume(gm, "Plan.costs")
    anchors = gather_anchors(gm.graph, plan.costs)
    return [(region, anchors[region.starts[0]]) for region in regions]


def _by_distance(
    gm: GraphModule, plan: Plan, regions: list[Region], names: list[str]
) -> list[tuple[Region, Node]]:
    """The same by explicit lists, or else by the distance of these names for each."""
    after = [_after(region) for region in regions]
    given = [plan.distance(name) for name in names]
    distances = [
        DISTANCES[name] if distance is None else distance
        for name, distance in zip(names, given, strict=True)
    ]
    begin = {
        name: beginnings(
            gm.graph, [r for r, its in zip(regions, names, strict=True) if its == name]
        )
        for name in dict.fromkeys(names)
    }
    _note_lists(gm, [(name, units, begin[name]) for name, units in zip(names, after, strict=True)])
    return decide(regions, distances, after, [begin[name] for name in names])


def _after(region: Region) -> tuple[str, ...]:
    """The units whose explicit lists name this one, in its direction."""
    return region.spec.backward_after if region.is_in_backward else region.spec.forward_after


def bounded(decided: list[tuple[Region, Node]]) -> list[tuple[Region, Node]]:
    """The same pairs, none further ahead of the use than the unit's settings allow."""
    waits = [region.waits[0] for region, _ in decided]
    found = []
    for i, (region, anchor) in enumerate(decided):
        spec = region.spec
        limit = spec.backward_ahead if region.is_in_backward else spec.forward_ahead
        found.append(
            (
                region,
                anchor if limit < 0 else max(anchor, point(waits, max(0, i - limit), waits[i])),
            )
        )
    return found


def beginnings(graph: Graph, regions: list[Region]) -> dict[str, Node]:
    """Where each unit's work begins, in forward or in backward, of which these are the gathers:
    where it awaits its gather, or, in backward and without one, where the unit before reduces.
    """
    is_half = not is_step(graph)
    found = {"": next(n for n in graph.nodes if n.op != "placeholder")}
    if not is_half and regions[0].is_in_backward:
        found[""] = regions[0].waits[0]
    for region in regions:
        found.setdefault(region.spec.unit, region.waits[0])
    before = found[""]
    for region in find_regions(graph, "reduce") if is_half or regions[0].is_in_backward else ():
        found.setdefault(region.spec.unit, before)
        before = region.nodes[0]
    return found


def decide(
    regions: list[Region],
    distances: Sequence[float],
    after: list[tuple[str, ...]],
    begins: list[dict[str, Node]],
) -> list[tuple[Region, Node]]:
    """Pairs (all-gather, the node that it starts before), in order; `after` names the units whose
    lists name each, `begins` says where units begin in that direction.
    """
    waits = [region.waits[0] for region in regions]
    lists = {unit for units in after for unit in units}
    decided = []
    for i, (region, units) in enumerate(zip(regions, after, strict=True)):
        distance, begin = distances[i], begins[i]
        position = max(0, i - distance)
        while position < i and regions[int(position)].spec.unit in lists:
            position = int(position) + 1
        listed = [begin[unit] for unit in units if unit in begin]
        if len(listed) < len(units):
            _say_missing(region, [unit for unit in units if unit not in begin])
        decided.append((region, min([point(waits, position, waits[i]), waits[i], *listed])))
    return decided


def _note_lists(gm: GraphModule, lists: list[tuple[str, tuple[str, ...], dict[str, Node]]]) -> None:
    """Notes whose explicit lists were followed."""
    for name, units, begin in lists:
        direction = "backward" if name == "backward_prefetch" else "forward"
        for unit in (unit for unit in units if unit in begin):
            consume(gm, f"set_modules_to_{direction}_prefetch", unit=unit)


def _say_missing(region: Region, units: list[str]) -> None:
    unit, *lists = (key.split("#")[0] for key in (region.spec.unit, *units))
    warn_once(
        f"compiled_fsdp: unit {unit!r} is in the prefetch list of {shortened(lists)}, which "
        "gathers and reduces nothing in its graph, as where blocks are compiled one by one. So the "
        "plan decides when its all-gather starts"
    )
