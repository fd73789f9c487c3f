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
Leaves alone: an all-gather of a value that is computed later than that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import is_backward, move_before, point
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.planning.plan import DISTANCES
from compiled_fsdp.planning.planner import gather_anchors

from .base import consume

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def prefetch_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    regions = sorted(
        (r for r in find_regions(graph, "gather") if r.starts), key=lambda r: r.waits[0]
    )
    specs = [region.spec for region in regions]
    name = "backward_prefetch" if is_backward(graph) else "prefetch"
    after = [spec.backward_after if is_backward(graph) else spec.forward_after for spec in specs]
    distance = plan.distance(name)
    if distance is None and not any(after):
        assert plan.costs is not None
        consume(gm, "Plan.costs")
        anchors = gather_anchors(graph, plan.costs)
        decided = [(region, anchors[region.starts[0]]) for region in regions]
    else:
        by_default = DISTANCES[name] if distance is None else distance
        begin = beginnings(graph, regions)
        decided = decide(regions, by_default, after, begin)
        _note_lists(gm, after, begin)
    if regions:
        consume(gm, f"Plan.{name}")
    for region, anchor in bounded(decided, is_backward(graph)):
        start = region.starts[0]
        moved = [n for n in region.nodes if n is start or n < start]
        while (
            anchor in moved and anchor is not start
        ):  # what prepares the input may stand where the gather is to start
            anchor = anchor.next
        if all(n.op == "placeholder" or n < anchor for n in region.sources):
            move_before([n for n in moved if anchor < n], anchor)
    return gm


def bounded(decided: list[tuple[Region, Node]], in_backward: bool) -> list[tuple[Region, Node]]:
    """The same pairs, none further ahead of the use than the unit's settings allow."""
    waits = [region.waits[0] for region, _ in decided]
    found = []
    for i, (region, anchor) in enumerate(decided):
        limit = region.spec.backward_ahead if in_backward else region.spec.forward_ahead
        found.append(
            (
                region,
                anchor if limit < 0 else max(anchor, point(waits, max(0, i - limit), waits[i])),
            )
        )
    return found


def beginnings(graph: Graph, regions: list[Region]) -> dict[str, Node]:
    """Where each unit's work begins: where it awaits its gather, or, in backward and without one,
    where the unit before reduces.
    """
    found = {"": next(n for n in graph.nodes if n.op != "placeholder")}
    for region in regions:
        found.setdefault(region.spec.unit, region.waits[0])
    before = found[""]
    for region in find_regions(graph, "reduce"):
        found.setdefault(region.spec.unit, before)
        before = region.nodes[0]
    return found


def decide(
    regions: list[Region], distance: float, after: list[tuple[str, ...]], begin: dict[str, Node]
) -> list[tuple[Region, Node]]:
    """Pairs (all-gather, the node that it starts before), in order; `after` names the units whose
    lists name each.
    """
    waits = [region.waits[0] for region in regions]
    lists = {unit for units in after for unit in units}
    decided = []
    for i, (region, units) in enumerate(zip(regions, after, strict=True)):
        position = max(0, i - distance)
        while position < i and regions[int(position)].spec.unit in lists:
            position = int(position) + 1
        listed = [begin[unit] for unit in units if unit in begin]
        if len(listed) < len(units):
            _say_missing(region, [unit for unit in units if unit not in begin])
        decided.append((region, min([point(waits, position, waits[i]), waits[i], *listed])))
    return decided


def _note_lists(gm: GraphModule, after: list[tuple[str, ...]], begin: dict[str, Node]) -> None:
    """Notes whose explicit lists were followed."""
    option = f"set_modules_to_{'backward' if is_backward(gm.graph) else 'forward'}_prefetch"
    for unit in dict.fromkeys(unit for units in after for unit in units if unit in begin):
        consume(gm, option, unit=unit)


def _say_missing(region: Region, units: list[str]) -> None:
    warn_once(
        f"compiled_fsdp: unit {region.spec.unit} is in the prefetch lists of {units}, which "
        "neither gather nor reduce anything in its graph; so the plan decides when its all-gather "
        "starts"
    )
