"""Where a graph holds the most, compute first what is the last to read something large.

Before:

    %w = compute(%weight)
    %grad = div(%logits, 2)
    %columns = t(%grad)
    %of_weight = mm(%columns, %x)
    %of_x = mm(%grad, %w)

After, since `%w` may go once `%of_x` is there:

    %w = compute(%weight)
    %grad = div(%logits, 2)
    %columns = t(%grad)
    %of_x = mm(%grad, %w)
    %of_weight = mm(%columns, %x)

Autograd computes the gradient of a weight before that of what the weight was applied to. So at the
head, where a step often holds the most, the weight, its gradient and the gradient of the logits are
there at once, of which two are enough.

Requires: a lowered graph, with units in buckets.
Ensures: the same nodes. What moves only computes, stands between the same two waits for parameters
    or tokens as the peak, and moves up, so that collectives, writes and random numbers keep their
    order. The peak, as it is predicted before collectives are scheduled (`planning/lifetimes.py`),
    is lower by at least `LEAST` of it; where it is as high several times (micro-batches of a whole
    step), all are lower, or none.
Leaves alone: what needs something of the node at the peak, or awaited; what stands behind a write;
    copies and other things that no matmul is among; all that lowers the peak by less, so that
    layers which are alike stay so (`outline`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import is_heavy, move_before
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.movable import can_move, writes
from compiled_fsdp.planning.lifetimes import Lifetimes

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.lifetimes import Curve, Storage
    from compiled_fsdp.planning.plan import Plan

    Move = tuple[list[Node], Node]  # what moves, and what it then stands before

LEAST = 0.01
MOST = 8  # places that hold the most: heads, or micro-batches of one


def flatten_peak(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    lifetimes, order = Lifetimes(gm.graph, context_of(gm).is_fused), list(gm.graph.nodes)
    curve = lifetimes.curve(order)
    least = curve.peak * LEAST
    moves: list[Move] = []
    enough = curve.peak - least
    while curve.peak > enough and len(moves) < MOST:
        peak = Peak(order, curve)
        if (move := peak.best_move(lifetimes, least)) is None:
            return gm
        order = peak.reordered(*move)
        curve = lifetimes.curve(order)
        moves.append(move)
    if curve.peak <= enough:
        for nodes, anchor in moves:
            move_before(nodes, anchor)
    return gm


class Peak:
    """The node at which the most is alive, and what may move around it."""

    def __init__(self, nodes: list[Node], curve: Curve) -> None:
        self.nodes, self.curve, self.where = nodes, curve, curve.where
        self.position = {node: i for i, node in enumerate(nodes)}
        waits = [i for i, node in enumerate(nodes) if _brings(node)]
        self.first = max((i + 1 for i in waits if i <= self.where), default=0)
        self.end = min((i for i in waits if i > self.where), default=len(nodes))

    def best_move(self, lifetimes: Lifetimes, least: float) -> Move | None:
        """What lowers the most that is alive between the waits furthest, if by so many bytes."""
        found = []
        large = [s for s in lifetimes.storages if s.num_bytes >= least and self.has(s)]
        for anchor in self.anchors(large):
            for moved in filter(None, (self.ahead(storage, anchor) for storage in large)):
                during = lifetimes.curve(self.reordered(moved, anchor)).during
                # Outside, as much is alive as before.
                lower = max(during[self.first : self.end])
                if lower <= self.curve.peak - least:
                    found.append((lower, len(moved), moved, anchor))
        return min(found)[2:] if found else None

    def has(self, storage: Storage) -> bool:
        """Whether a storage is alive at the peak."""
        first, last = storage.span(self.position)
        return first <= self.where <= last

    def anchors(self, large: list[Storage]) -> list[Node]:
        """Before what others may be computed: the node itself, and what allocates what is alive."""
        found = (self.nodes[self.where], *(storage.node for storage in large))
        return [
            node
            for node in dict.fromkeys(found)
            if node.op == "call_function" and self.position[node] >= self.first
        ]

    def ahead(self, storage: Storage, anchor: Node) -> list[Node]:
        """The readers of a storage behind a node, with what they need from there on, in order; none
        if they may not all stand before the node, or are not worth it.
        """
        first, found = self.position[anchor], set()
        stack = [user for user in storage.users if self.position[user] >= first]
        if storage.is_kept or self.position[storage.node] >= first:
            return []
        while stack:
            node = stack.pop()
            if node in found or self.position[node] < first:
                continue
            if node is anchor or self.position[node] >= self.end or not can_move(node):
                return []
            found.add(node)
            stack.extend(node.all_input_nodes)
        if not any(map(is_heavy, found)):
            return []
        moved = sorted(found, key=self.position.__getitem__)
        passed = self.nodes[first : self.position[moved[-1]]]
        return [] if any(map(writes, passed)) else moved

    def reordered(self, moved: list[Node], anchor: Node) -> list[Node]:
        """The nodes, with these before that one."""
        first, ahead = self.position[anchor], set(moved)
        rest = [node for node in self.nodes[first:] if node not in ahead]
        return [*self.nodes[:first], *moved, *rest]


def _brings(node: Node) -> bool:
    """Whether parameters, or what the user exchanges, are there from this node on."""
    tag = get_tag(node)
    return node.target is WAIT and (tag is None or tag.kind == "gather")
