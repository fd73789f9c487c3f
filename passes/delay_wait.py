"""Await each reduction late, so that backward computes on while it is under way; at most `plan.reduces_in_flight` at once.

Before:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    ... compute ...
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)

After, with reduces_in_flight=1:

    %r1 = reduce_scatter(%rows1)
    ... compute ...
    %g1 = div(wait(%r1), world)
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)

Requires: a lowered graph.
Ensures: what depends on the wait of the n-th reduction stands before the start of the (n + reduces_in_flight)-th, or at the
    end of the graph. With HSDP the all-reduce starts there, and is awaited as much later again.
Leaves alone: a reduction whose result the computation itself uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.graph import downstream, move_before, order, output
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
    """Move the wait and all that depends on it down to the anchor, if only the result and its bookkeeping do."""
    position = order(wait.graph)
    moved = {wait, *downstream(wait)}
    moved = {n for n in moved if n.op != "output" and position[n] < position[anchor]}
    if anchor in downstream(wait) and anchor.op != "output":
        return
    move_before(sorted(moved, key=lambda n: position[n]), anchor)
