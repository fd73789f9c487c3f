"""What keeping parameters is expected to do to the peak of a step, and the search for as many as
fit.

From one trial without any (`trial.py`) follows what each would change (`PeakModel`): its bytes are
alive from where forward drops it on, and what gathering it again takes (shard, bucket, copies) is
not. So keeping may take less than gathering again, and nothing kept need not be the least. What is
expected is checked, and corrected, by further trials (`most`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.planning.lifetimes import GATHERED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from compiled_fsdp.ir.regions import Region
    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.lifetimes import Lifetimes

    from .trial import Trial

SLICE, KEEP = "slice", "keep"
TRIALS = 5  # at most, after the first, where something fits
# Where nothing that was tried fits, as many more as take about as long as five of a graph of 4,000
# nodes: of a small graph, every number of parameters.
MOST_TRIALS, NODES_TRIED = 64, 20_000

Param = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to use more memory.

    kind: a slice, or a whole parameter.
    param: unit and name.
    num_bytes: that stay from forward to backward.
    """

    kind: str
    param: Param
    num_bytes: int


class Span(NamedTuple):
    """Bytes, from one position in a step to another, both included."""

    first: int
    last: int
    num_bytes: int


@dataclass(slots=True)
class Gather:
    """What one gather of a parameter takes: the spans of its storages, or its share of them."""

    spans: list[Span] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Where it begins."""
        return min(span.first for span in self.spans)

    @property
    def last(self) -> int:
        """Where the parameter is read last."""
        return max(span.last for span in self.spans)


@dataclass(frozen=True, slots=True)
class PeakModel:
    """The memory of a step in which nothing is kept, and what candidates change about it.

    curve: bytes alive at each node, of forward and then of backward.
    changes: for each candidate, spans of bytes more or (negative) fewer.
    """

    curve: tuple[int, ...]
    changes: tuple[tuple[Span, ...], ...]

    @staticmethod
    def of(trial: Trial, candidates: Sequence[Candidate]) -> PeakModel:
        """From a trial without any."""
        gathers: dict[Param, list[Gather]] = {}
        start = 0
        for lifetimes, profile in zip(trial.lifetimes, trial.profiles, strict=True):
            _add_gathers(lifetimes, start, gathers)
            start += len(profile.nodes)
        slices: dict[Param, Span] = {}
        changes: list[tuple[Span, ...]] = []
        for candidate in candidates:
            found = gathers.get(candidate.param, [])
            if len(found) < 2:  # backward has no use for it
                changes.append(())
            elif candidate.kind == SLICE:
                until = found[1].first - 1
                slices[candidate.param] = Span(found[0].last + 1, until, candidate.num_bytes)
                changes.append((slices[candidate.param],))
            else:
                again = chain.from_iterable(gather.spans for gather in found[1:])
                in_place_of = slices.get(candidate.param)
                changes.append(
                    (
                        Span(found[0].last + 1, found[-1].last, candidate.num_bytes),
                        *map(_without, again),
                        *([_without(in_place_of)] if in_place_of else []),
                    )
                )
        curve = chain.from_iterable(profile.curve.during for profile in trial.profiles)
        return PeakModel(tuple(curve), tuple(changes))

    def peaks(self) -> list[int]:
        """The peak of the step with the first n candidates kept, for each n from 0 on."""
        spans = [s for change in self.changes for s in change if s.first <= s.last]
        ends = sorted({0, *(s.first for s in spans), *(s.last + 1 for s in spans), len(self.curve)})
        intervals = _Maximum(max(self.curve[a:b]) for a, b in pairwise(ends))
        found = [intervals.most]
        for change in self.changes:
            for span in change:
                if span.first <= span.last:
                    first, end = bisect_left(ends, span.first), bisect_left(ends, span.last + 1)
                    intervals.add(first, end, span.num_bytes)
            found.append(intervals.most)
        return found


def _without(span: Span) -> Span:
    return span._replace(num_bytes=-span.num_bytes)


def _add_gathers(lifetimes: Lifetimes, start: int, gathers: dict[Param, list[Gather]]) -> None:
    """Of a graph whose first node is at the position `start` of the step."""
    position = {node: i for i, node in enumerate(lifetimes.graph.nodes)}
    for region in find_regions(lifetimes.graph, "gather"):
        for spec, spans in _shares(lifetimes, region, position):
            if spans:
                moved = [Span(s.first + start, s.last + start, s.num_bytes) for s in spans]
                gathers.setdefault((spec.unit, spec.fqn), []).append(Gather(moved))


def _shares(
    lifetimes: Lifetimes, region: Region, position: dict[object, int]
) -> Iterator[tuple[ParamSpec, list[Span]]]:
    """For each parameter of a gather, what it takes of the gather's storages: those that are for it
    alone, and its share of the others.
    """
    inside, specs = set(region.nodes), region.tag.specs
    own = dict.fromkeys(
        s for node in region.nodes for s in lifetimes.touched[node] if s.node in inside
    )
    total = sum(spec.full_bytes() for spec in specs)
    names = {spec.fqn for spec in specs}
    placed = [(s, *s.span(position)) for s in own if s.num_bytes]  # type: ignore[arg-type]
    for spec in specs:
        spans = []
        for storage, first, last in placed:
            if storage.kind is GATHERED and storage.owner in names:
                num_bytes = storage.num_bytes if storage.owner == spec.fqn else 0
            else:
                num_bytes = storage.num_bytes * spec.full_bytes() // total
            if num_bytes:
                spans.append(Span(first, last, num_bytes))
        yield spec, spans


class _Maximum:
    """The largest of a row of numbers, while something is added to ranges of it: a tree of maxima,
    in which what is added to all below a place is kept at that place.
    """

    def __init__(self, row: Iterable[int]) -> None:
        leaves = list(row)
        self._size = len(leaves)
        self._most = [0] * self._size + leaves
        self._added = [0] * 2 * self._size
        for place in reversed(range(1, self._size)):
            self._refresh(place)

    @property
    def most(self) -> int:
        """The largest."""
        return self._most[1]

    def add(self, first: int, end: int, number: int) -> None:
        """Add a number from one place of the row up to another, which is left out."""
        low, high = first + self._size, end + self._size
        changed = (low, high - 1)
        while low < high:
            if low & 1:
                self._raise(low, number)
                low += 1
            if high & 1:
                high -= 1
                self._raise(high, number)
            low, high = low >> 1, high >> 1
        for place in changed:
            above = place >> 1
            while above:
                self._refresh(above)
                above >>= 1

    def _raise(self, place: int, number: int) -> None:
        self._most[place] += number
        self._added[place] += number

    def _refresh(self, place: int) -> None:
        below = max(self._most[2 * place], self._most[2 * place + 1])
        self._most[place] = below + self._added[place]


def most(
    peak: Callable[[int], int], expected: Sequence[int], room: float, patience: int = MOST_TRIALS
) -> tuple[int, int]:
    """Returns how many candidates are kept, and the peak with them: as many as fit, by few calls of
    `peak`, which are expensive; where none that was tried fits, the number with the least peak.

    What is returned fits, if anything that was tried does. More might fit, where `expected` is
    wrong. Nothing is said not to fit before `patience` numbers, or all, were tried.

    expected: for each number; the first is right.
    """
    tried = {0: expected[0]}
    while True:
        fits = max((num for num, found in tried.items() if found <= room), default=None)
        if len(tried) > (patience if fits is None else TRIALS):
            break
        num = _next(tried, expected, room, fits)
        if num is None:
            break
        tried[num] = peak(num)
    if fits is None:
        fits = min(tried, key=lambda num: (tried[num], num))
    return fits, tried[fits]


def patience(num_nodes: int) -> int:
    """How many numbers to try, of a graph of this size, before nothing is said to fit."""
    return max(TRIALS, min(MOST_TRIALS, NODES_TRIED // max(1, num_nodes)))


def _next(
    tried: dict[int, int], expected: Sequence[int], room: float, fits: int | None
) -> int | None:
    """The number to try next: the largest that should fit, by what is expected and by how far that
    was off at the neighbours that were tried; None where nothing is left to be found out.
    """
    known = sorted(tried)
    off = [tried[num] - expected[num] for num in known]

    def corrected(num: int) -> float:
        place = bisect_left(known, num)
        if place == len(known):
            return expected[num] + off[-1]
        low, high = known[place - 1], known[place]
        share = (num - low) / (high - low)
        return expected[num] + off[place - 1] + share * (off[place] - off[place - 1])

    start = 0 if fits is None else fits + 1
    untried = [num for num in range(start, len(expected)) if num not in tried]
    likely = [num for num in untried if corrected(num) <= room]
    if likely:
        return likely[-1]
    if fits is None:
        return min(untried, key=lambda num: (corrected(num), num), default=None)
    hopeful = [num for num in untried if expected[num] <= room]  # if the correction is wrong
    middle = (fits + hopeful[-1]) // 2 if hopeful else fits
    return middle if middle in untried else None
