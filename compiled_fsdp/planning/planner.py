"""When each collective starts and is awaited, decided from costs before a graph is rewritten.

A step is two machines in series: the training thread, which computes, starts collectives and waits
for them, and the wire, which carries one collective at a time in the order of their starts.
`simulate` plays a graph on both, and copies between host and device, of units and of activations,
on two more ways, one for each direction. From that:

- an all-gather starts as late as still hides it: working back from the last one, each must be done
  when it is awaited and when the next one needs the wire; whatever that leaves exposed is then
  started earlier, while the step gets shorter by it;
- what travels for the user (tokens for experts) goes before gathers that can wait;
- a reduction is awaited where it will be done anyway, or earlier where more bytes than allowed
  would be under way.

All of it is a function of the graph and of costs that all ranks share, so all ranks decide the
same.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import copied, is_heavy, phase_of, way_of
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.regions import Region, find_regions

from .costs import nbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx import Graph, Node

    from .costs import Costs

# A start comes earlier than the model asks for by this share of the collective's time: machines are
# not exact. On the wire of `make bench`, a step took 9 % longer with 0.25.
MARGIN = 1.0
# At most so many all-gathers have started ahead of the one in use.
AHEAD = 3
# Reductions under way send together at most so many times the bytes of the largest, if the plan
# says no number of bytes.
REDUCTIONS = 3
# With `overlap_optimizer`, backward leaves in flight so many times the bytes of its largest
# reduction.
UNITS_IN_FLIGHT = 2
# With `overlap_optimizer`, the step gathers at most so many bytes of full parameters ahead, if the
# user sets nothing else.
MAX_AHEAD_BYTES = 64 * 2**20
ROUNDS = 16
WORTH = 1e-3  # share of a graph's time for which a start is moved


@dataclass(slots=True)
class Point:
    """A place in the program: a start, a wait, or a heavy kernel, with the light ones that follow
    it.

    seconds: of computation up to the next point.
    transfer: for a start, its time on the wire; for a wait, 0.
    start: for a wait, the start that it waits for.
    way: for the start of a copy between host and device, its direction; "" for the wire.
    """

    node: Node
    seconds: float = 0.0
    transfer: float = 0.0
    start: Node | None = None
    way: str = ""


@dataclass(slots=True)
class Timeline:
    """A simulated run of one graph, in seconds from its beginning.

    reached: when the training thread comes to each point.
    carried: for each start, when its collective begins on the wire and when it is done.
    copied: for each direction, the same of each copy between host and device.
    exposed: for each start that is awaited, how long the training thread then stands still.
    """

    title: str = ""
    total: float = 0.0
    reached: dict[Node, float] = field(default_factory=dict)
    carried: dict[Node, tuple[float, float]] = field(default_factory=dict)
    copied: dict[str, dict[Node, tuple[float, float]]] = field(default_factory=dict)
    exposed: dict[Node, float] = field(default_factory=dict)

    @property
    def on_wire(self) -> float:
        """Seconds for which collectives are on the wire."""
        return _long(self.carried)

    def on_the_way(self, to: str) -> float:
        """Seconds for which something is copied in one direction."""
        return _long(self.copied.get(to, {}))

    def __str__(self) -> str:
        """Totals, then every collective: when it is on the wire, and what of it the training thread
        waits for.
        """
        lines = [
            f"{self.title}: {_ms(self.total)} predicted, of which "
            f"{_ms(sum(self.exposed.values()))} are exposed communication; {_ms(self.on_wire)} "
            "on the wire"
        ]
        for start, (begin, done) in self.carried.items():
            tag = get_tag(start)
            unit = tag.unit if tag is not None else ""
            lines.append(
                f"  {_ms(begin):>10} - {_ms(done):>10}  {_ms(self.exposed.get(start, 0)):>10} "
                f"exposed  %{start.name} {unit}"
            )
        return "\n".join(lines)


def predict(graph: Graph, costs: Costs) -> Timeline:
    """Returns what a finished graph is expected to take."""
    line = simulate(program(graph, costs))
    line.title = phase_of(graph)
    return line


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _long(carried: dict[Node, tuple[float, float]]) -> float:
    return sum(done - begin for begin, done in carried.values())


def program(graph: Graph, costs: Costs) -> list[Point]:
    """The graph as points in order; light computation counts to the point before it."""
    points: list[Point] = []
    for node in (n for n in graph.nodes if n.op != "placeholder"):
        is_start, way = node.target in comm.STARTS, way_of(node)
        if not points or is_start or way or node.target is comm.WAIT or is_heavy(node):
            start = node.all_input_nodes[0] if node.target is comm.WAIT else None
            takes = (
                costs.wire(node) if is_start else costs.copy(nbytes(copied(node))) if way else 0.0
            )
            points.append(Point(node, transfer=takes, start=start, way=way))
        points[-1].seconds += costs.compute(node)
    return points


def simulate(points: Sequence[Point], unawaited: Collection[Node] = ()) -> Timeline:
    """Play a program; the waits for the starts in `unawaited` are passed over, and come at the
    end.
    """
    line = Timeline()
    now = 0.0
    free, ends = dict[str, float](), dict["Node", float]()
    for point in points:
        line.reached[point.node] = now
        if point.transfer:
            begin = max(now, free.get(point.way, 0.0))
            ends[point.node] = free[point.way] = done = begin + point.transfer
            on = line.copied.setdefault(point.way, {}) if point.way else line.carried
            on[point.node] = begin, done
        elif point.start is not None and point.start in ends and point.start not in unawaited:
            done = ends[point.start]
            # A user may await his own again.
            line.exposed.setdefault(point.start, max(0.0, done - now))
            now = max(now, done)
        now += point.seconds
    line.total = max(now, *(ends[start] for start in unawaited if start in ends), 0.0)
    return line


class Gathers:
    """The all-gathers of a graph, to be started before points of the rest of it."""

    def __init__(self, graph: Graph, costs: Costs) -> None:
        points = {p.node: p for p in program(graph, costs)}
        starts = [r.starts[0] for r in find_regions(graph, "gather") if r.starts]
        self.starts = [points.pop(start) for start in starts]
        self.rest = list(points.values())
        waits = {p.start: index for index, p in enumerate(self.rest) if p.start is not None}
        self.waits = [waits[start] for start in starts]
        self.reductions = [s for r in find_regions(graph, "reduce") for s in r.starts]
        self._unawaited = set(self.reductions)
        self._points = [self._flat(point) for point in self.rest]

    def _flat(self, point: Point) -> tuple[float, float, Node | None]:
        """A point as `total` reads it: its transfer, its seconds,
        and the start whose end it sets or awaits.
        """
        awaited = None if point.start in self._unawaited else point.start
        return point.transfer, point.seconds, point.node if point.transfer else awaited

    def play(self, places: list[int]) -> Timeline:
        """A run in which the n-th all-gather starts before the point `rest[places[n]]`."""
        merged: list[Point] = []
        following = 0
        for index, point in enumerate(self.rest):
            while following < len(places) and places[following] <= index:
                merged.append(self.starts[following])
                following += 1
            merged.append(point)
        return simulate(merged, self.reductions)

    def total(self, places: list[int]) -> float:
        """The total of `play`, to the bit,
        by the arithmetic of `simulate` alone: for many trials.
        """
        now = wire = 0.0
        done: dict[Node | None, float] = {}
        following, starts = 0, self.starts
        for index, (transfer, seconds, start) in enumerate(self._points):
            while following < len(places) and places[following] <= index:
                gather = starts[following]
                if gather.transfer:
                    done[gather.node] = wire = max(now, wire) + gather.transfer
                now += gather.seconds
                following += 1
            if transfer:
                done[start] = wire = max(now, wire) + transfer
            elif start in done:
                now = max(now, done[start])
            now += seconds
        return max(now, *(done[start] for start in self.reductions if start in done), 0.0)

    def places_at(self, times: list[float], line: Timeline) -> list[int]:
        """The last points that are reached by these times: in order, before the waits, and not too
        far ahead of them.
        """
        reached = [line.reached[p.node] for p in self.rest]
        places = [max(0, bisect_right(reached, time) - 1) for time in times]
        for n in reversed(range(len(places))):
            first = self.waits[n - AHEAD] if n >= AHEAD else 0
            places[n] = max(first, min(places[n], self.waits[n], *places[n + 1 : n + 2]))
        return places

    def decide(self) -> list[int]:
        """Start each when it is needed; then those that leave time exposed earlier, while the whole
        gets shorter by it.
        """
        places = list(self.waits)
        line = self.play(places)
        for _ in range(ROUNDS):
            earlier = self.places_at(
                [self._begin(line, p) - self._late(line, p) for p in self.starts], line
            )
            tried = self.play(list(map(min, earlier, places)))
            if tried.total > line.total * (1 - WORTH):
                break
            places, line = list(map(min, earlier, places)), tried
        # None needs to start long before the wire is free for it.
        later = self.places_at(
            [self._begin(line, p) - MARGIN * p.transfer for p in self.starts], line
        )
        tried = self.play(list(map(max, later, places)))
        is_as_good = tried.total <= line.total * (1 + WORTH)
        return self.let_pass(list(map(max, later, places)) if is_as_good else places)

    def let_pass(self, places: list[int]) -> list[int]:
        """Let what is not ours, as tokens for experts, go first where a gather can wait: whoever
        awaits tokens has nothing else to do.
        """
        line = self.play(places)
        for index, point in enumerate(self.rest):
            if not point.transfer or point.node in self._unawaited:
                continue
            reached = line.reached[point.node]
            first = next(
                (n for n, p in enumerate(self.starts) if self._ends(line, p) > reached), len(places)
            )
            moved = [
                max(place, min(index + 1, wait)) if n >= first else place
                for n, (place, wait) in enumerate(zip(places, self.waits, strict=True))
            ]
            if moved != places and self.total(moved) <= line.total:
                places, line = moved, self.play(moved)
        return places

    def _ends(self, line: Timeline, point: Point) -> float:
        return line.carried[point.node][1] if point.transfer else 0.0

    def _begin(self, line: Timeline, point: Point) -> float:
        return line.carried[point.node][0]

    def _late(self, line: Timeline, point: Point) -> float:
        late = line.exposed.get(point.node, 0.0)
        return late + MARGIN * point.transfer if late else 0.0


def gather_anchors(graph: Graph, costs: Costs) -> dict[Node, Node]:
    """For each all-gather's start, the node before which it should start."""
    gathers = Gathers(graph, costs)
    places = gathers.decide()
    return {
        p.node: gathers.rest[place].node for p, place in zip(gathers.starts, places, strict=True)
    }


def reduction_room(regions: Sequence[Region], asked: int | None) -> int:
    """Bytes that reductions under way may send together, where costs decide when they are
    awaited.
    """
    return REDUCTIONS * max((r.sent_bytes for r in regions), default=0) if asked is None else asked


def wait_anchors(
    graph: Graph, costs: Costs, reduction_bytes: int | None = None
) -> dict[Node, Node | None]:
    """For each reduction's first start, the node before which it is awaited; None for the end of
    the graph.
    """
    points = program(graph, costs)
    regions = [r for r in find_regions(graph, "reduce") if r.starts]
    room = reduction_room(regions, reduction_bytes)
    every = [s for r in regions for s in r.starts]
    line = simulate(points, every)
    reached = [line.reached[p.node] for p in points]
    index = {p.node: n for n, p in enumerate(points)}
    starts = [r.starts[0] for r in regions]
    sizes = [r.sent_bytes for r in regions]
    anchors: dict[Node, Node | None] = {}
    for n, start in enumerate(starts):
        begin, done = line.carried[start]
        place = bisect_right(reached, done + MARGIN * (done - begin))
        under_way = accumulate(sizes[n:])  # those before it are awaited before it
        first_too_many = next(
            (m for m, size in enumerate(under_way, n) if m > n and size > room), len(starts)
        )
        if first_too_many < len(starts):
            place = min(place, index[starts[first_too_many]])
        anchors[start] = points[place].node if place < len(points) else None
    return anchors
