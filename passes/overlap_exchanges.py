"""Compute what does not need tokens while they travel: around each all-to-all of the user's.

Before:

    %y = compute(%x)
    %grad = compute(%y)
    %s = all_to_all_single(%y)
    %routed = compute(wait(%s))
    %shared = mm(%y, %y)

After:

    %y = compute(%x)
    %s = all_to_all_single(%y)
    %grad = compute(%y)
    %shared = mm(%y, %y)
    %routed = compute(wait(%s))

Two things move. What stands before a start, back to the collective or wait before it, and is not
needed by it (gradients of weights, mostly) goes behind it. What stands behind a wait and does not
need it (a shared expert, the next chunk of a block's tokens) goes before it:

- first what leads to another exchange, and that exchange's start, so that with `in_chunks` one
  chunk travels while another computes. A wait goes along only if it is for what started earlier.
- then computation, in its order. Where it could fill several exchanges, each gets as much as it
  takes of their time on the wire (by costs; without, by those assumed for the device).

Requires: a lowered graph, with units in buckets.
Ensures: the same nodes; collectives, writes and random numbers of ours and of the user's keep their
    order, but for exchanges that do not depend on each other. Nothing comes from further below than
    the exchanges of the next block (`LEVELS`).
Leaves alone: with `Plan(overlap_exchanges=False)` everything; what reads nothing but parameters and
    inputs, unless something that moves needs it; calls of other libraries' ops, which may be a
    dispatch of their own.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import CONVERT, WAIT
from compiled_fsdp.ir.graph import find, is_view, move_before, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.movable import can_move, writes
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.planning.costs import assumed

from .base import consume

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.plan import Plan

# Counts, tokens there, and back: an exchange of the next block is three further from the first.
LEVELS = 2
CASTS = (CONVERT, torch.ops.aten._to_copy.default)


def overlap_exchanges(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    awaited = [(start, wait) for start in exchanges(graph) for wait in _waits(start)[:1]]
    if not awaited:
        return gm
    consume(gm, "Plan.overlap_exchanges")
    if not plan.overlap_exchanges:
        return gm
    costs = plan.costs or assumed(value(awaited[0][0]).device.type)
    for start, _ in awaited:
        _defer(start)
    levels, sources = _levels(graph), _sources(graph)
    for start, wait in sorted(awaited, key=lambda pair: pair[1]):
        move_before(Filling(start, wait, levels, sources, costs).found(), wait)
    return gm


def exchanges(graph: Graph) -> list[Node]:
    """The user's all-to-alls, in order."""
    return [node for node in find(graph, EXCHANGE) if get_tag(node) is None]


def _waits(start: Node) -> list[Node]:
    return [user for user in start.users if user.target is WAIT]


def _defer(start: Node) -> None:
    """Put what stands above the start, and is not needed by it, behind it."""
    needed, window = {*start.all_input_nodes}, []
    node = start.prev
    while can_move(node) or _is_assert(node):
        window.append(node)
        if node in needed or _is_assert(node):
            needed.update(node.all_input_nodes)
        node = node.prev
    for node in window:  # last first
        if node not in needed:
            start.append(node)


def _is_assert(node: Node) -> bool:
    return node.target is torch.ops.aten._assert_scalar.default


class Filling:
    """What may move up to the wait of one exchange.

    levels: how many exchanges lead to each.
    sources: parameters, inputs, and views of them.
    """

    def __init__(
        self, start: Node, wait: Node, levels: dict[Node, int], sources: set[Node], costs: Costs
    ) -> None:
        self.start, self.wait, self.costs, self.sources = start, wait, costs, sources
        self.levels = levels
        self.free: dict[Node, bool] = {}  # does not need the wait -> reads what is computed here
        self.waits = [(wait, start)]  # in the order of the graph, to the end of what is looked at
        self._look()

    def _look(self) -> None:
        blocked = {self.wait}
        for node in self._below():
            may = node in self.levels or can_move(node)
            if node.target is WAIT and (begun := node.all_input_nodes[0]) in self.levels:
                self.waits.append((node, begun))
                may = begun < self.start
            if not may or any(read in blocked for read in node.all_input_nodes):
                blocked.add(node)
                continue
            self.free[node] = any(
                self.free.get(read, read not in self.sources) for read in node.all_input_nodes
            )

    def _below(self) -> Iterator[Node]:
        """The nodes behind the wait, to the exchanges of the next block, or a write."""
        last = self.levels[self.start] + LEVELS
        node = self.wait.next
        while node.op != "output" and self.levels.get(node, 0) <= last and not writes(node):
            yield node
            node = node.next

    def found(self) -> list[Node]:
        """The nodes to move, in order: those that lead to exchanges, then computation."""
        leading = self._with_inputs(n for n in self.free if n in self.levels and self.free[n])
        computing = self._with_inputs(
            n
            for n, shares in self.free.items()
            if shares and n not in leading and n.target is not WAIT and n not in self.levels
        )
        rest = [n for n in computing if n not in leading]
        return [*(n for n in self.free if n in leading), *self._share(rest)]

    def _with_inputs(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """These, and what of the free ones they need, in the order of the graph."""
        found, stack = set(), [*nodes]
        while stack:
            node = stack.pop()
            if node in self.free and node not in found:
                found.add(node)
                stack.extend(node.all_input_nodes)
        return dict.fromkeys(n for n in self.free if n in found)

    def _share(self, nodes: list[Node]) -> list[Node]:
        """As many, from the first on, as this exchange should have: it, and those behind it up to
        the last of them, fill their time on the wire alike.
        """
        if not nodes:
            return []
        wire = [self.costs.wire(start) for wait, start in self.waits if wait < nodes[-1]]
        seconds = [self.costs.compute(node) for node in nodes]
        if not any(wire):  # over a group of one rank, without latency
            return nodes
        room, taken = sum(seconds) * wire[0] / sum(wire), 0.0
        for number, each in enumerate(seconds):
            if taken + each / 2 > room:
                return nodes[:number]
            taken += each
        return nodes


def _levels(graph: Graph) -> dict[Node, int]:
    """For each exchange, the length of the longest chain of them that ends with it."""
    found: dict[Node, int] = {}
    behind: dict[Node, int] = {}
    for node in graph.nodes:
        behind[node] = max((behind[read] for read in node.all_input_nodes), default=0)
        if node.target is EXCHANGE and get_tag(node) is None:
            behind[node] += 1
            found[node] = behind[node]
    return found


def _sources(graph: Graph) -> set[Node]:
    """What is there without computing: inputs, gathered parameters, views and casts of them."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_given = node.op in ("placeholder", "get_attr") or get_tag(node) is not None
        is_same = is_view(node) or node.target is operator.getitem or node.target in CASTS
        if is_given or (is_same and all(read in found for read in node.all_input_nodes)):
            found.add(node)
    return found
