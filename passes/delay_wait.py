"""Await each reduction late, so that backward computes on while it is under way; at most `plan.reduces_in_flight` at once.

Before:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    ... compute with %x ...
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)
    mark_grads_(%g0, %flat0, offsets0)

After, with reduces_in_flight=1:

    %r1 = reduce_scatter(%rows1)
    ... compute with %x ...
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)
    mark_grads_(%g0, %flat0, offsets0)

Requires: a lowered graph.
Ensures: what depends on the wait of the n-th reduction stands before the start of the (n + reduces_in_flight)-th, or at the
    end of the graph. With HSDP the all-reduce starts there, and is awaited as much later again.
Leaves alone: a wait on which the start that it would move to depends. Other computation with the result moves with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.graph import downstream, move_before, output
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def delay_wait(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    if not plan.reduces_in_flight:
        return gm
    regions = [r for r in find_regions(gm.graph, "reduce") if r.starts]
    last = max((len(r.waits) for r in regions), default=0)
    for stage in reversed(range(last)):
        for wait, anchor in decide(regions, stage, plan.reduces_in_flight, output(gm.graph)):
            _sink(wait, anchor)
    return gm


def decide(regions: list[Region], stage: int, in_flight: int, end: Node) -> list[tuple[Node, Node]]:
    """Pairs (wait, the node it goes before), for the stage-th wait of each reduction."""
    pairs = []
    for i, region in enumerate(regions):
        if stage < len(region.waits):
            later = i + in_flight * (stage + 1)
            anchor = regions[later].starts[0] if later < len(regions) else end
            pairs.append((region.waits[stage], anchor))
    return pairs


def _sink(wait: Node, anchor: Node) -> None:
    """Move the wait, and what of all that depends on it stands above the anchor, down to the anchor."""
    after = downstream(wait)
    if anchor in after and anchor.op != "output":
        return
    move_before(sorted(n for n in (wait, *after) if n.op != "output" and n < anchor), anchor)
