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
    is lower by at least `LEAST` of it.
Leaves alone: what needs something of the node at the peak, or awaited; copies and other things that
    no matmul is among; all that lowers the peak by less, so that layers which are alike stay so
    (`outline`): also where it is as high twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import is_heavy, move_before
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.movable import can_move
from compiled_fsdp.planning.lifetimes import Lifetimes

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.lifetimes import Storage
    from compiled_fsdp.planning.plan import Plan

LEAST = 0.01


def flatten_peak(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    lifetimes = Lifetimes(gm.graph, context_of(gm).is_fused)
    nodes = list(gm.graph.nodes)
    curve = lifetimes.curve(nodes)
    least = curve.peak * LEAST
    peak = Peak(nodes, curve.where)
    large = [s for s in lifetimes.storages if s.num_bytes >= least and peak.has(s)]
    found = []
    for anchor in peak.anchors(large):
        for moved in filter(None, (peak.ahead(storage, anchor) for storage in large)):
            lower = lifetimes.curve(peak.reordered(moved, anchor)).peak
            if lower <= curve.peak - least:
                found.append((lower, len(moved), moved, anchor))
    if found:
        _, _, moved, anchor = min(found)
        move_before(moved, anchor)
    return gm


class Peak:
    """The node at which the most is alive, and what may move around it."""

    def __init__(self, nodes: list[Node], where: int) -> None:
        self.nodes, self.where = nodes, where
        self.position = {node: i for i, node in enumerate(nodes)}
        waits = [i for i, node in enumerate(nodes) if _brings(node)]
        self.first = max((i + 1 for i in waits if i <= where), default=0)
        self.end = min((i for i in waits if i > where), default=len(nodes))

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
        return sorted(found, key=self.position.__getitem__) if any(map(is_heavy, found)) else []

    def reordered(self, moved: list[Node], anchor: Node) -> list[Node]:
        """The nodes, with these before that one."""
        first, ahead = self.position[anchor], set(moved)
        rest = [node for node in self.nodes[first:] if node not in ahead]
        return [*self.nodes[:first], *moved, *rest]


def _brings(node: Node) -> bool:
    """Whether parameters, or what the user exchanges, are there from this node on."""
    tag = get_tag(node)
    return node.target is WAIT and (tag is None or tag.kind == "gather")
