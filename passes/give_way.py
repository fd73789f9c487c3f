"""Start all-gathers where no tokens are about to travel: in the longest stretch of computation
between the user's all-to-alls.

Before, where `prefetch_all_gather` has put the gather:

    %x1 = compute(%x)
    %a = all_gather(%flat1)
    %s0 = all_to_all_single(%x1)
    %t0 = wait(%s0)
    %s1 = all_to_all_single(mm(%t0, %t0))
    %t1 = wait(%s1)
    %y0 = mm(%t1, %t1)
    %y1 = mm(%y0, %y0)
    %w = view(wait(%a), shape)

After:

    %x1 = compute(%x)
    %s0 = all_to_all_single(%x1)
    %t0 = wait(%s0)
    %s1 = all_to_all_single(mm(%t0, %t0))
    %t1 = wait(%s1)
    %a = all_gather(%flat1)
    %y0 = mm(%t1, %t1)
    %y1 = mm(%y0, %y0)
    %w = view(wait(%a), shape)

Somebody waits for tokens as soon as they leave; a gather can wait. Both share the wire: beside a
gather, and a reduction that began where it did, an exchange takes two and three times as long.

Requires: gathers where they are to start at the earliest.
Ensures: a gather starts where it did, or behind the wait of an exchange between that and its own
    wait: where most computation follows before the next exchange or its own wait, of those places
    from which it is expected to arrive in time; of several alike the first. Gathers keep their
    order.
Leaves alone: reductions, which hold what backward wants to free; gathers of users' lists; a gather
    with no exchange in between; everything with `Plan(overlap_exchanges=False)`, and where costs
    place gathers, since they know of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find, move_before, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.planning.costs import assumed

from .base import consume

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.plan import Plan

ALIKE = 0.9  # from this share of the longest on, a stretch counts as long


def give_way(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    tokens = [node for node in find(gm.graph, EXCHANGE) if get_tag(node) is None]
    regions = sorted(
        (r for r in find_regions(gm.graph, "gather") if r.starts), key=lambda r: r.waits[0]
    )
    if not tokens or not regions:
        return gm
    consume(gm, "Plan.overlap_exchanges")
    if not plan.overlap_exchanges:
        return gm
    costs = plan.costs or assumed(value(tokens[0]).device.type)
    stretches = Stretches(gm.graph, tokens, costs)
    decided, place = [], -1
    for region in regions:
        place = stretches.place(region, place, may_move(region, plan))
        decided.append(([n for n in region.nodes if n <= region.starts[0]], place))
    stretches.move([pair for pair in decided if stretches.position[pair[0][-1]] < pair[1]])
    return gm


def may_move(region: Region, plan: Plan) -> bool:
    """Whether nothing but a distance has put the gather where it is."""
    spec, is_in_backward = region.spec, region.is_in_backward
    name = "backward_prefetch" if is_in_backward else "prefetch"
    listed = spec.backward_after if is_in_backward else spec.forward_after
    return not listed and plan.distance(name) is not None


class Stretches:
    """How much is computed from each place to the next exchange; a place is the number of the node
    that it is behind, as the graph is when this is made.

    tokens: the exchanges, in order.
    """

    def __init__(self, graph: Graph, tokens: list[Node], costs: Costs) -> None:
        self.costs = costs
        self.nodes = [*graph.nodes]
        self.position = {node: number for number, node in enumerate(self.nodes)}
        self.reached = [0.0, *accumulate(costs.compute(node) for node in self.nodes)]
        self.starts = [self.position[node] for node in tokens]
        awaited = (user for node in tokens for user in node.users if user.target is WAIT)
        self.waits = sorted(self.position[node] for node in awaited)

    def place(self, region: Region, last: int, may_move: bool) -> int:
        """Where the gather should start: where it does, or later; not before `last`."""
        start, end = region.starts[0], self.position[region.waits[0]]
        own = max(self.position[start], last)
        between = [place for place in self.waits if own < place < end] if may_move else []
        needed = self.costs.wire(start)
        places = [own, *(p for p in between if self.reached[end] - self.reached[p + 1] >= needed)]
        lengths = [self._to_next(place, end) for place in places]
        longest = max(lengths)
        return next(
            place
            for place, length in zip(places, lengths, strict=True)
            if length >= ALIKE * longest
        )

    def _to_next(self, place: int, end: int) -> float:
        """Seconds of computation between a place and the next exchange, or the end."""
        number = bisect_right(self.starts, place)
        following = min([end, *self.starts[number : number + 1]])
        return self.reached[following] - self.reached[place + 1]

    def move(self, decided: list[tuple[list[Node], int]]) -> None:
        """Put nodes behind their places, in this order."""
        moving = {node for nodes, _ in decided for node in nodes}
        for nodes, place in decided:
            anchor = self.nodes[place + 1]
            while anchor in moving:
                anchor = anchor.next
            move_before(nodes, anchor)
