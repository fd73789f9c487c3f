"""Start each all-gather ahead of its use, as early as costs ask for, or by the distance that the plan sets.

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
Ensures: by distance (`plan.prefetch` in forward, `plan.backward_prefetch` in backward), the n-th all-gather, with what prepares
    its input, stands before the wait of the (n - prefetch)-th, or, for a fraction, before a matmul that share of the way to the
    next wait; from costs, it stands where `planner.gather_anchors` says. The order of all-gathers is unchanged.
Leaves alone: an all-gather of a value that is computed later than that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.graph import is_backward, move_before, point
from compiled_fsdp.planner import gather_anchors
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def prefetch_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = [r for r in find_regions(gm.graph, "gather") if r.starts]
    distance = plan.distance("backward_prefetch" if is_backward(gm.graph) else "prefetch")
    if distance is None:
        assert plan.costs is not None
        anchors = gather_anchors(gm.graph, plan.costs)
        decided = [(region, anchors[region.starts[0]]) for region in regions]
    else:
        decided = decide(regions, distance)
    for region, anchor in decided:
        start = region.starts[0]
        moved = [n for n in region.nodes if n is start or n < start]
        if all(n.op == "placeholder" or n < anchor for n in region.sources):
            move_before([n for n in moved if anchor < n], anchor)
    return gm


def decide(regions: list[Region], distance: float) -> list[tuple[Region, Node]]:
    """Pairs (all-gather, the node that it starts before), in order."""
    waits = [region.waits[0] for region in regions]
    return [(region, point(waits, max(0, i - distance), waits[i])) for i, region in enumerate(regions)]
