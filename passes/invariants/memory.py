"""Rules about memory: what is gathered is freed, not saved, and little is under way at once."""

from __future__ import annotations

from collections import Counter
from math import ceil, floor, inf
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.graph import aliases, find, order, output, phase_of
from compiled_fsdp.ir.meta import get_tag, is_computed_again
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import FREE, traits_of
from compiled_fsdp.planning.plan_fields import DISTANCES
from compiled_fsdp.planning.planner import AHEAD, UNITS_IN_FLIGHT, reduction_room

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations


def no_use_after_free(gm: GraphModule, plan: Plan) -> Violations:
    """No gathered buffer, nor a view of it, is read after its free, or by a collective that is not
    awaited by then.
    """
    position = order(gm.graph)
    for free in find(gm.graph, FREE):
        for alias in aliases(free.all_input_nodes[0]):
            for user in alias.users:
                if user.target is not FREE and position[user] > position[free]:
                    yield user, f"%{user.name} reads %{alias.name} after it is freed"
                elif traits_of(user.target).starts and any(
                    position[w] > position[free] for w in user.users
                ):
                    yield user, f"%{user.name} is still reading %{alias.name} when it is freed"


def freed_once(gm: GraphModule, plan: Plan) -> Violations:
    """A graph that frees, frees every buffer that it received exactly once, unless it returns
    it.
    """
    frees = Counter(node.all_input_nodes[0] for node in find(gm.graph, FREE))
    returned = set(output(gm.graph).all_input_nodes)
    for wait in find(gm.graph, WAIT) if frees else ():
        is_buffer = (
            traits_of(wait.all_input_nodes[0].target).is_buffer and get_tag(wait) is not None
        )
        is_returned = not returned.isdisjoint(aliases(wait))
        if frees[wait] > 1 or (is_buffer and frees[wait] != (not is_returned)):
            yield (
                wait,
                f"%{wait.name} is freed {frees[wait]} times"
                + (" and returned" if is_returned else ""),
            )


def nothing_gathered_saved(gm: GraphModule, plan: Plan) -> Violations:
    """No graph saves storage of a parameter that is to be dropped after forward; what the user
    returns is the user's.
    """
    saved = set(saved_for_backward(output(gm.graph)))
    for region in find_regions(gm.graph, "gather"):
        kept = [s.fqn for s in region.tag.specs if s.reshard == "keep"]
        first = region.waits[:1]
        full = [n for n in region.nodes if any(w is n or w < n for w in first)]
        for alias in dict.fromkeys(a for node in full for a in aliases(node)):
            if alias in saved and not kept:
                names = [s.fqn for s in region.tag.specs]
                yield (
                    alias,
                    f"%{alias.name} is saved for backward and shares storage with the gathered "
                    f"{names}",
                )


def computed_again_alike(gm: GraphModule, plan: Plan) -> Violations:
    """What backward computes again for the memory budget is not saved, and is no random
    op, collective or write.
    """
    is_forward = phase_of(gm.graph) == "forward"
    saved = set(saved_for_backward(output(gm.graph))) if is_forward else ()
    for node in (node for node in gm.graph.nodes if is_computed_again(node)):
        for alias in (alias for alias in aliases(node) if alias in saved):
            yield alias, f"%{alias.name} is saved for backward, which computes %{node.name} again"
        if _may_differ(node):
            yield node, f"%{node.name} ({node.target}) is computed again, and may differ"


def _may_differ(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return is_random or node.target._schema.is_mutable or bool(traits_of(node.target).starts)


def bounded_in_flight(gm: GraphModule, plan: Plan) -> Violations:
    """No more gathers or reductions are under way at once than the plan, or the user for a unit,
    allows.
    """
    for kind in ("gather", "reduce"):
        regions = [r for r in find_regions(gm.graph, kind) if r.starts]
        limit, room = _limit(gm, plan, kind, regions)
        first_waits = {r.waits[0]: r for r in regions if r.waits}
        first_starts = {r.starts[0]: r for r in regions if r.waits}
        under_way: dict[int, int] = {}
        for node in gm.graph.nodes:
            if node in first_starts:
                under_way[first_starts[node].tag.region] = first_starts[node].sent_bytes
            if node in first_waits:
                under_way.pop(first_waits[node].tag.region, None)
            num, total = len(under_way), sum(under_way.values())
            if node in first_starts and (num > limit or (num > 1 and total > room)):
                allowed = f"{room:g} bytes" if num <= limit else f"{limit:g}"
                yield (
                    node,
                    f"%{node.name} makes {num} {kind}s of together {total} bytes under way; the "
                    f"plan allows {allowed}",
                )


def _limit(gm: GraphModule, plan: Plan, kind: str, regions: list[Region]) -> tuple[float, float]:
    """How many may be under way at once, and bytes of several; with prefetch lists of the user, any
    number of gathers.
    """
    if kind == "reduce":
        distance = plan.distance("reduces_in_flight")
        asked = [r.spec.reduces_in_flight for r in regions if r.waits]
        if distance is None and not any(asked):
            return inf, reduction_room(regions, plan.reduction_bytes)
        by_default = DISTANCES["reduces_in_flight"] if distance is None else distance
        return max([1, *(ceil(number or by_default) for number in asked)]), inf
    sides = {r.is_in_backward for r in regions}
    if any(r.spec.backward_after if r.is_in_backward else r.spec.forward_after for r in regions):
        return inf, inf
    distances = [plan.distance("backward_prefetch" if side else "prefetch") for side in sides]
    return max((AHEAD if d is None else floor(d) for d in distances), default=0) + 1, inf


def bounded_left(gm: GraphModule, plan: Plan) -> Violations:
    """What a graph leaves in flight for the unit to await is no more than twice the bytes of its
    largest reduction.
    """
    regions = [r for r in find_regions(gm.graph, "reduce") if r.starts]
    in_flight = [r for r in regions if r.is_left_in_flight]
    sizes = [r.sent_bytes for r in in_flight]
    room = UNITS_IN_FLIGHT * max((r.sent_bytes for r in regions), default=0)
    if sum(sizes) > room:
        yield (
            in_flight[0].nodes[-1],
            f"{len(in_flight)} reductions of together {sum(sizes)} bytes; at most {room}",
        )
