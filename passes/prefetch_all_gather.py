"""Start each all-gather `plan.prefetch` buckets before the one it is needed for.

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
Ensures: the n-th all-gather, with what prepares its input, stands before the wait of the (n - prefetch)-th; the order of
    all-gathers is unchanged.
Leaves alone: an all-gather of a value that is computed later than that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.graph import move_before
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def prefetch_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = [r for r in find_regions(gm.graph, "gather") if r.starts]
    for region, anchor in decide(regions, plan.prefetch):
        start = region.starts[0]
        moved = [n for n in region.nodes if n is start or n < start]
        if all(n.op == "placeholder" or n < anchor for n in region.sources):
            move_before([n for n in moved if anchor < n], anchor)
    return gm


def decide(regions: list[Region], prefetch: int) -> list[tuple[Region, Node]]:
    """Pairs (all-gather, the wait that it starts before), in order."""
    return [(region, regions[max(0, i - prefetch)].waits[0]) for i, region in enumerate(regions)]
