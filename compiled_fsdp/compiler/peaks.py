"""What keeping parameters and activations is expected to do to the peak of a step, and the search
for as many as fit.

From one trial in which no parameter is kept and every activation is saved (`trial.py`) follows what
each would change (`PeakModel`): a kept parameter's bytes are alive from where forward drops it on,
and what gathering it again takes (shard, bucket, copies) is not; an activation that backward
computes again is not alive from its last use in forward to where it, or what is made of it, is
needed first. So keeping may take less than gathering again, and nothing kept need not be the least.
What is expected is checked, and corrected, by further trials (`most`).

Candidates are taken in the order of their prices (`ordered`): the seconds that each saves for each
byte that it takes where the peak is.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.planning.lifetimes import GATHERED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from compiled_fsdp.ir.regions import Region
    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.lifetimes import Lifetimes

    from .trial import Trial

SLICE, KEEP, SAVE, OFFLOAD, STATE = "slice", "keep", "save", "offload", "state"
TRIALS = 5  # at most, after the first, where something fits
# Where nothing that was tried fits, as many more as take about as long as five of a graph of 4,000
# nodes: of a small graph, every number of parameters.
MOST_TRIALS, NODES_TRIED = 64, 20_000

Param = tuple[str, str]


class Span(NamedTuple):
    """Bytes, from one position in a step to another, both included."""

    first: int
    last: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to use more memory.

    kind: a slice, a whole parameter, an activation that backward would else compute again, or one
        that would else be on the host; or what the optimizer remembers of a flat buffer's
        parameters, which would else be there between updates.
    param: unit and name; of an activation, module and the forward node that allocates it; of state,
        the first parameter.
    num_bytes: that stay from forward to backward; of state, all the time.
    seconds: that this saves: of gathering the parameter again, what is exposed; of computing the
        activation again, all of it; of copies to the host and back, what is exposed; None where
        nobody asked.
    scratch, values, needs, sooner: of an activation, as in `planning.recompute.Recompute`. values:
        of state, the names of its tensors.
    away: where it is not on the device, if it goes to the host.
    """

    kind: str
    param: Param
    num_bytes: int
    seconds: float | None = None
    scratch: int = 0
    values: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    sooner: tuple[str, ...] = ()
    away: tuple[Span, ...] = ()

    @property
    def is_activation(self) -> bool:
        """Whether it is a saved value, and no parameter."""
        return self.kind in (SAVE, OFFLOAD)


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

    curve: bytes alive at each node, of forward and then of backward; while no activation is on the
        device that could be computed again, or be on the host.
    where: the node at which the peak of the trial was.
    changes: for each candidate, spans of bytes more or (negative) fewer.
    """

    curve: tuple[int, ...]
    changes: tuple[tuple[Span, ...], ...]
    where: int = 0

    @staticmethod
    def of(trial: Trial, candidates: Sequence[Candidate]) -> PeakModel:
        """From a trial that keeps no parameter, saves every activation, and has all state on the
        host.
        """
        gathers: dict[Param, list[Gather]] = {}
        start = 0
        for lifetimes, profile in zip(trial.lifetimes, trial.profiles, strict=True):
            _add_gathers(lifetimes, start, gathers)
            start += len(profile.nodes)
        slices: dict[Param, Span] = {}
        changes: list[tuple[Span, ...]] = []
        for candidate in candidates:
            found = gathers.get(candidate.param, [])
            if candidate.kind in (OFFLOAD, STATE):
                changes.append(candidate.away)
            elif candidate.kind == SAVE:
                changes.append(())
            elif len(found) < 2:  # backward has no use for it
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
        curve = list(chain.from_iterable(profile.curve.during for profile in trial.profiles))
        where = curve.index(max(curve))
        saved = [i for i, candidate in enumerate(candidates) if candidate.kind == SAVE]
        for i, spans in zip(saved, _saved(trial, [candidates[i] for i in saved]), strict=True):
            changes[i] = spans
        given_up = [c for c, each in zip(changes, candidates, strict=True) if each.is_activation]
        for span in chain.from_iterable(given_up):
            for place in range(span.first, span.last + 1):
                curve[place] -= span.num_bytes
        return PeakModel(tuple(curve), tuple(changes), where)

    def prices(self, candidates: Sequence[Candidate]) -> list[float]:
        """The seconds that each saves for each byte that it takes where the peak was; infinite for
        slices, and for what takes none there.
        """
        found = []
        for candidate, change in zip(candidates, self.changes, strict=True):
            here = sum(s.num_bytes for s in change if s.first <= self.where <= s.last)
            is_free = here <= 0 or candidate.kind == SLICE
            found.append(inf if is_free else (candidate.seconds or 0.0) / here)
        return found

    def ordered(self, order: Sequence[int]) -> PeakModel:
        """The same for the candidates in this order."""
        return PeakModel(self.curve, tuple(self.changes[i] for i in order), self.where)

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


def _saved(trial: Trial, saved: Sequence[Candidate]) -> list[tuple[Span, ...]]:
    """For each activation, in the order of forward, what saving it changes: its bytes where nothing
    needs them, less what is alive while, or since, it is computed again; nothing where it is needed
    all the time.
    """
    wanted = {name for each in saved for name in (each.param[1], *each.values, *each.sooner)}
    used, _ = uses(trial, wanted)
    made = _made(trial, {name for each in saved for name in each.sooner})
    spans: dict[str, tuple[Span, ...]] = {}
    needed: dict[str, int] = {}  # where what is made of it is needed first
    for candidate in reversed(saved):
        name = candidate.param[1]
        places = used[name].union(*(used[value] for value in candidate.values))
        first, last = longest_gap(places)
        last = min(last, needed.get(name, last))
        for other in candidate.needs:
            needed[other] = min(last, needed.get(other, last))
        spans[name] = ()
        if first + 1 < last:
            later = [made[other] for other in candidate.sooner if other in made]
            spans[name] = (
                Span(first + 1, last - 1, candidate.num_bytes),
                Span(last, last, -candidate.scratch),
                *(Span(last, s.first - 1, -s.num_bytes) for s in later if s.first > last),
            )
    return [spans[candidate.param[1]] for candidate in saved]


def uses(trial: Trial, names: set[str]) -> tuple[dict[str, set[int]], dict[str, int]]:
    """For each of these nodes, by name, the positions in the step at which its storage is used; and
    where it is computed, in forward if in both.
    """
    used: dict[str, set[int]] = {name: set() for name in names}
    made: dict[str, int] = {}
    start = 0
    for lifetimes in trial.lifetimes:
        position = {node: i + start for i, node in enumerate(lifetimes.graph.nodes)}
        for node in (node for node in position if node.name in names):
            made.setdefault(node.name, position[node])
            for storage in lifetimes.of(node)[:1]:
                users = (user for user in storage.users if user.op not in ("output", "placeholder"))
                used[node.name].update(position[user] for user in users)
        start += len(position)
    return used, made


def longest_gap(places: Iterable[int]) -> tuple[int, int]:
    """The two neighbours among positions that are farthest apart."""
    return max(pairwise(sorted(places)), key=lambda gap: gap[1] - gap[0], default=(0, 0))


def _made(trial: Trial, names: set[str]) -> dict[str, Span]:
    """Where each of these nodes runs, in backward if in both, and its bytes."""
    made: dict[str, Span] = {}
    start = 0
    for lifetimes in trial.lifetimes:
        nodes = list(lifetimes.graph.nodes)
        for place, node in enumerate(nodes, start):
            if node.name in names:
                own = sum(s.num_bytes for s in lifetimes.of(node) if s.node is node)
                made[node.name] = Span(place, place, own)
        start += len(nodes)
    return made


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
    peak: Callable[[int], int],
    expected: Sequence[int],
    room: float,
    patience: int = MOST_TRIALS,
    known: Mapping[int, int] | None = None,
) -> tuple[int, int]:
    """Returns how many candidates are kept, and the peak with them: as many as fit, by few calls of
    `peak`, which are expensive; where none that was tried fits, the number with the least peak.

    What is returned fits, if anything that was tried does. More might fit, where `expected` is
    wrong. Nothing is said not to fit before `patience` numbers, or all, were tried.

    expected: for each number; the first is right, if `known` says nothing else.
    known: what was tried before, the first number among it.
    """
    tried = dict(known or {0: expected[0]})
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
