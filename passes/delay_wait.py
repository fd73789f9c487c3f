"""Await each reduction late, so that backward computes on while it is under way: when costs say it
is done, or by distance.

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
Ensures: by distance, what depends on the wait of the n-th reduction stands before the start of the
    (n + reduces_in_flight)-th (or, for a fraction, before a matmul that share of the way to it), or
    at the end of the graph; from costs, it stands where `planner.wait_anchors` says, within
    `Plan.reduction_bytes`. With HSDP the all-reduce starts there, and is awaited a unit later
    again. A unit's `set_reduce_scatter_max_input_buffers` comes before the plan.
Leaves alone: a wait on which the start that it would move to depends. Other computation with the
result moves with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import downstream, move_before, output, point
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.planning.plan_fields import DISTANCES
from compiled_fsdp.planning.planner import wait_anchors

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def delay_wait(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = [r for r in find_regions(gm.graph, "reduce") if r.starts]
    is_from_costs = plan.distance("reduces_in_flight") is None and not any(
        r.spec.reduces_in_flight for r in regions
    )
    for region in regions:
        if region.spec.reduces_in_flight > 0:
            consume(gm, "set_reduce_scatter_max_input_buffers", unit=region.spec.unit)
        else:
            consume(gm, "Plan.reduces_in_flight")
    if not is_from_costs and not any(distances(regions, plan)):
        return gm
    end = output(gm.graph)
    last = max((len(r.waits) for r in regions), default=0)
    for stage in reversed(range(last)):
        if is_from_costs and stage == 0:
            assert plan.costs is not None
            consume(gm, "Plan.costs", "Plan.reduction_bytes")
            anchors = wait_anchors(gm.graph, plan.costs, plan.reduction_bytes)
            decided = [(r.waits[0], anchors[r.starts[0]] or end) for r in regions]
        else:
            decided = decide(regions, stage, distances(regions, plan), end)
        for wait, anchor in decided:
            _sink(wait, anchor)
    return gm


def distances(regions: list[Region], plan: Plan) -> list[float]:
    """How many reductions late each is awaited."""
    by_default = plan.distance("reduces_in_flight")
    if by_default is None:
        by_default = DISTANCES["reduces_in_flight"]
    return [region.spec.reduces_in_flight or by_default for region in regions]


def decide(
    regions: list[Region], stage: int, late: list[float], end: Node
) -> list[tuple[Node, Node]]:
    """Pairs (wait, the node it goes before), for the stage-th wait of each reduction."""
    starts = [region.starts[0] for region in regions]
    return [
        (region.waits[stage], point(starts, i + late[i] * (stage + 1), end))
        for i, region in enumerate(regions)
        if stage < len(region.waits)
    ]


def _sink(wait: Node, anchor: Node) -> None:
    """Move the wait, and what of all that depends on it stands above the anchor, down to the
    anchor.
    """
    after = downstream(wait)
    if anchor in after and anchor.op != "output":
        return
    move_before(sorted(n for n in (wait, *after) if n.op != "output" and n < anchor), anchor)
