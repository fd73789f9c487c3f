"""In how many chunks a block's tokens travel to experts and back, where costs decide:
`in_chunks(fn, "auto", ...)`.

The number is part of what Dynamo traces. So a function is traced in one piece first; its joint
graph says what each block computes and sends, forward and backward; a block for which chunks are
predicted to take less time is traced again, in as many.

A block is priced as its chunks will be scheduled (`passes/overlap_exchanges.py`): all chunks come
to their first exchange, then all of them to their second, while exchanges are on the wire one after
another. A chunk of n has an n-th of what rows compute and of the bytes that they send; each chunk
has every launch and every message's latency, reads all weights, and makes a gradient of each, which
is added to the others'. What the step computes beside the block without needing it (a shared
expert) fills time on the wire in either case, so that there is less to gain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import backward_nodes, downstream, is_matmul, is_view
from compiled_fsdp.ir.meta import get_block
from compiled_fsdp.ir.schema import EXCHANGE, UNSHARD, traits_of
from compiled_fsdp.torch_private.dynamo import compilation, trace_number

from .consensus import agreed
from .costs import nbytes, traffic
from .planner import WORTH

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx import Graph, Node

    from .costs import Costs
    from .plan import Plan

NUMBERS = (1, 2, 4)  # of chunks, to be priced
AUTO = "auto"

Prices = dict[int, float]  # seconds by number of chunks


@dataclass(slots=True)
class Trace:
    """What Dynamo compiles now.

    compiling, attempt: which compilation, and which attempt at it.
    seen: blocks of this attempt so far that leave their number to costs.
    numbers, prices: of each block, by its place in the trace, once they are decided.
    """

    compiling: object = None
    attempt: object = None
    seen: int = 0
    is_decided: bool = False
    numbers: dict[int, int] = field(default_factory=dict)
    prices: dict[int, Prices] = field(default_factory=dict)


_now = Trace()


def next_block() -> int:
    """The place of a block in what is being traced, counted from 0; -1 outside of a trace."""
    global _now
    compiling, attempt = compilation(), trace_number()
    if compiling is None:
        return -1
    if _now.compiling is not compiling:
        _now = Trace(compiling)
    if _now.attempt != attempt:
        _now.attempt, _now.seen = attempt, 0
    _now.seen += 1
    return _now.seen - 1


def number_of(block: int) -> int:
    """In how many chunks a block is traced: 1 until it is decided."""
    return _now.numbers.get(block, 1)


def current() -> Trace | None:
    """What is being compiled, if blocks of it leave their number to costs."""
    return _now if _now.seen and _now.compiling is compilation() else None


def shown() -> list[dict[str, Any]]:
    """What was decided of the blocks that are being compiled, as it stands in a graph's record."""
    trace = current()
    if trace is None:
        return []
    return [
        {"number": number, "seconds": {str(n): s for n, s in trace.prices[block].items()}}
        for block, number in trace.numbers.items()
    ]


def settle(graph: Graph, plan: Plan) -> bool:
    """Decide for each block of a joint graph, the same on all ranks; whether to trace again."""
    trace = current()
    if trace is None or trace.is_decided:
        return False
    trace.is_decided = True
    if plan.costs is None:
        warn_once(
            'compiled_fsdp: in_chunks(fn, "auto", ...) leaves the number of chunks to costs, and '
            "no costs are known: tokens travel in one piece. Let them be measured (a plan that "
            "leaves something to costs, such as Plan(prefetch='auto'), set before the first "
            "forward), give them (Plan(costs=...)), or say a number"
        )
        return False
    trace.prices = prices(graph, plan.costs)
    blocks = sorted(trace.prices)
    mine = [cheapest(trace.prices[block]) for block in blocks]
    what = f"chunks of {len(blocks)} blocks"
    chosen = agreed(
        graph, plan, what, mine, lambda told: [min(each) for each in zip(*told, strict=True)]
    )
    trace.numbers = dict(zip(blocks, chosen, strict=True))
    return any(number > 1 for number in chosen)


def cheapest(seconds: Prices) -> int:
    """The number that takes the least time, if that is worth it; else 1."""
    best = min(seconds, key=lambda number: (seconds[number], number))
    return best if seconds[best] < seconds[1] * (1 - WORTH) else 1


def prices(graph: Graph, costs: Costs) -> dict[int, Prices]:
    """Seconds of each block of a joint graph, both ways, by its place in the trace."""
    blocks: dict[int, list[Node]] = {}
    for node in graph.nodes:
        place = get_block(node)
        if place is not None:
            blocks.setdefault(place, []).append(node)
    behind = backward_nodes(graph)
    return {
        place: {number: sum(half.seconds(number) for half in halves) for number in NUMBERS}
        for place, nodes in blocks.items()
        if (halves := _halves(graph, nodes, behind, costs))
    }


def _halves(graph: Graph, nodes: Sequence[Node], behind: set[Node], costs: Costs) -> list[Half]:
    """Forward and backward of a block, as far as they send something."""
    whole = _whole(graph, nodes)
    ways = ([n for n in nodes if n not in behind], [n for n in nodes if n in behind])
    return [
        Half(way, whole, costs, _beside(way, nodes, behind, costs))
        for way in ways
        if any(node.target is EXCHANGE for node in way)
    ]


class Half:
    """A block's forward, or its backward.

    whole: what every chunk reads or makes whole: weights, and their gradients.
    filler: seconds of computing beside the block, which may stand anywhere in it.
    """

    def __init__(
        self, nodes: Sequence[Node], whole: Collection[Node], costs: Costs, filler: float
    ) -> None:
        self.costs, self.whole, self.filler = costs, whole, filler
        self.stages: list[Stage] = []
        place: dict[Node, int] = {}
        for node in nodes:
            found = [place[n] + (n.target is EXCHANGE) for n in node.all_input_nodes if n in place]
            place[node] = max(found, default=0)
        for node in nodes:
            while len(self.stages) <= place[node]:
                self.stages.append(Stage())
            stage = self.stages[place[node]]
            (stage.starts if node.target is EXCHANGE else stage.rest).append(node)
        for stage in self.stages:
            stage.lead()

    def seconds(self, number: int) -> float:
        """Predicted, in so many chunks."""
        now = wire = 0.0
        filler = self.filler
        done: dict[int, float] = {}  # when what a chunk has sent is there
        for stage in self.stages:
            leading, rest = (
                sum(self._compute(node, number) for node in nodes)
                for nodes in (stage.leading, stage.rest)
            )
            for chunk in range(number):
                idle = max(0.0, done.get(chunk, 0.0) - now)
                filled = min(idle, filler)
                filler -= filled
                now += max(idle, filled) + leading
                for start in stage.starts:
                    wire = max(now, wire) + self._wire(start, number)
                    now += self._start(start, number)
                    done[chunk] = wire
                now += rest
        return max(now, *done.values()) + filler

    def _compute(self, node: Node, number: int) -> float:
        seconds = self.costs.compute_part(node, number, self.whole)
        if number > 1 and node in self.whole and is_matmul(node):  # a gradient, to be added
            seconds += (number - 1) / number * 3 * nbytes(node) / self.costs.bandwidth
        return seconds

    def _wire(self, start: Node, number: int) -> float:
        sent, group = traffic(start)
        link = self.costs.link(group)
        return link.seconds(sent / number, getattr(link, traits_of(start.target).price))

    def _start(self, start: Node, number: int) -> float:
        sent, group = traffic(start)
        link = self.costs.link(group)
        return max(self.costs.overhead, link.start) + sent / number * link.issue


@dataclass(slots=True)
class Stage:
    """From one exchange to the next: what leads to it, the exchange itself, and the rest."""

    leading: list[Node] = field(default_factory=list)
    starts: list[Node] = field(default_factory=list)
    rest: list[Node] = field(default_factory=list)

    def lead(self) -> None:
        """Tell what leads to the exchange from what does not."""
        needed = {n for start in self.starts for n in start.all_input_nodes}
        for node in reversed(self.rest):
            if node in needed:
                needed.update(node.all_input_nodes)
        self.leading = [node for node in self.rest if node in needed]
        self.rest = [node for node in self.rest if node not in needed]


def _whole(graph: Graph, nodes: Sequence[Node]) -> set[Node]:
    """What a block reads or makes that no row is in."""
    given: set[Node] = set()
    for node in graph.nodes:
        reads = node.all_input_nodes
        is_same = is_view(node) or traits_of(node.target).is_alias or "convert" in str(node.target)
        if (
            node.op == "placeholder"
            or node.target is UNSHARD
            or (reads and is_same and all(n in given for n in reads))
        ):
            given.add(node)
    shapes = {_shape(n) for node in nodes for n in node.all_input_nodes if n in given and _shape(n)}
    found = set(given)
    for node in nodes:
        is_gradient = is_matmul(node) and _shape(node) in shapes
        reads = node.all_input_nodes
        if is_gradient or (reads and all(n in found for n in reads)):
            found.add(node)
    return found


def _shape(node: Node) -> tuple[int, ...]:
    """Sizes in any order, since weights are transposed; () of what only data decides."""
    found: Any = node.meta.get("val")
    sizes = tuple(getattr(found, "shape", ()))
    return tuple(sorted(sizes)) if all(isinstance(size, int) for size in sizes) else ()


def _beside(way: Sequence[Node], nodes: Sequence[Node], behind: set[Node], costs: Costs) -> float:
    """Seconds of what is computed between a block's first exchange and that of the next block, the
    same way, and neither leads to the block nor needs it.
    """
    first = next((node for node in way if node.target is EXCHANGE), None)
    if first is None:
        return 0.0
    members, is_behind, seconds = set(nodes), first in behind, 0.0
    needing = downstream(first)
    node = first.next
    while node.op != "output" and not (node.target is EXCHANGE and node not in members):
        if node not in members and node not in needing and (node in behind) == is_behind:
            leads = any(n in members for n in downstream(node) if n is not first)
            seconds += 0.0 if leads else costs.compute(node)
        node = node.next
    return seconds
