"""Which saved activations a memory budget would rather have in host memory than on the device, or
than compute again.

Each storage has one way to be given up: copied to the host and back, or computed again. What is
copied takes turns on the way there and on the way back, so that a copy that hides alone may leave
time exposed beside others. So the storages that cost most to compute again (those that cannot be,
first), and whose absence lowers the peak, are given their turns first; each goes to the host while
it leaves no more exposed there than computing it again would take, and while the host has room.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from compiled_fsdp.planning.offload import Trip, awaited, begun, clock, exposed, movable

from .peaks import OFFLOAD, Candidate, Span, longest_gap, uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.offload import Movable
    from compiled_fsdp.planning.recompute import Recompute, Saved

    from .trial import Trial

CALLS = 4  # two starts and two waits, which are launched


@dataclass(slots=True)
class Stay:
    """A storage that could be on the host.

    made: position, in the step, of the node that computes it.
    last, first: where it is used last before, and first after.
    out, home: its copies.
    """

    of: Movable
    made: int
    last: int
    first: int
    out: Trip
    home: Trip

    def span(self, reached: Sequence[float], done: float, begin: float) -> Span:
        """Where it is not on the device, if its copies are done and begin then."""
        after = max(self.last + 1, bisect_left(reached, done))
        until = min(self.first, bisect_right(reached, begin) - 1)
        return Span(after, until - 1, self.of.num_bytes)


@dataclass(slots=True)
class Host:
    """The host's memory and the ways there and back, with what has been decided on."""

    room: float
    turn: float | None
    stays: list[Stay] = field(default_factory=list)
    exposed: float = 0.0

    def would_expose(self, stay: Stay) -> float:
        """Seconds that one more leaves exposed."""
        both = [*self.stays, stay]
        return exposed([s.out for s in both], [s.home for s in both], self.turn) - self.exposed

    def has_room(self, stay: Stay) -> bool:
        """Whether its bytes fit beside those that are there at the same time."""
        change: dict[int, int] = {}
        for each in (*self.stays, stay):
            change[each.made] = change.get(each.made, 0) + each.of.num_bytes
            change[each.first + 1] = change.get(each.first + 1, 0) - each.of.num_bytes
        return max(accumulate(change[place] for place in sorted(change))) <= self.room

    def take(self, stay: Stay, seconds: float) -> None:
        """Decide on it."""
        self.stays.append(stay)
        self.exposed += seconds


def moved_to_host(
    trial: Trial,
    saved: Saved,
    recomputes: Sequence[Recompute],
    costs: Costs,
    host_room: float,
) -> list[Candidate]:
    """The saved storages that would rather be on the host, as candidates, in the order of forward.

    trial: in which every activation is saved.
    recomputes: those that could be computed again.
    host_room: bytes that the host has for them.
    """
    again = {each.name: each for each in recomputes}
    reached, turn = _clock(trial, costs)
    where = _peak_at(trial)
    found = []
    for stay in _stays(trial, movable(saved), recomputes, reached, costs):
        alone = stay.span(reached, stay.out.at + stay.out.seconds, stay.home.at - stay.home.seconds)
        if alone.first <= alone.last:
            other = again.get(stay.of.name)
            price = inf if other is None else other.seconds / stay.of.num_bytes
            found.append((not alone.first <= where <= alone.last, -price, stay.made, stay))
    host = Host(host_room, turn)
    seconds: dict[str, float] = {}
    for _, _, _, stay in sorted(found, key=lambda entry: entry[:3]):
        if host.has_room(stay):
            late, other = host.would_expose(stay), again.get(stay.of.name)
            cost = max(0.0, late) + CALLS * costs.overhead
            if other is None or cost <= other.seconds:
                host.take(stay, late)
                seconds[stay.of.name] = cost
    return _candidates(host, reached, seconds)


def _candidates(host: Host, reached: Sequence[float], seconds: dict[str, float]) -> list[Candidate]:
    stays = sorted(host.stays, key=lambda stay: stay.made)
    done = awaited([stay.out for stay in stays], host.turn)
    begins = begun([stay.home for stay in stays], host.turn)
    return [
        Candidate(
            OFFLOAD,
            (stay.of.module, stay.of.name),
            stay.of.num_bytes,
            seconds[stay.of.name],
            values=stay.of.values,
            away=(stay.span(reached, out, home),),
        )
        for stay, out, home in zip(stays, done, begins, strict=True)
    ]


def _clock(trial: Trial, costs: Costs) -> tuple[list[float], float | None]:
    """When each node of a step begins, and when its forward ends, if that is a graph by itself."""
    reached, ends = [0.0], []
    for lifetimes in trial.lifetimes:
        begin = reached.pop()
        reached += [begin + seconds for seconds in clock(lifetimes.graph, costs)]
        ends.append(reached[-1])
    return reached, ends[0] if len(ends) > 1 else None


def _peak_at(trial: Trial) -> int:
    """The position in the step of its peak."""
    during = [num for profile in trial.profiles for num in profile.curve.during]
    return during.index(max(during))


def _stays(
    trial: Trial,
    found: Sequence[Movable],
    recomputes: Sequence[Recompute],
    reached: Sequence[float],
    costs: Costs,
) -> list[Stay]:
    """When each is there, and needed. Where something else could be computed again from it, that
    comes as soon as the other is needed.
    """
    names = {each.name: each.values for each in found}
    names.update((each.name, each.values) for each in recomputes)
    used, made = uses(trial, {name for own, values in names.items() for name in (own, *values)})
    gaps = {
        own: longest_gap(used[own].union(*(used[value] for value in values)))
        for own, values in names.items()
    }
    sooner: dict[str, int] = {}
    for other in recomputes:
        for name in other.reads:
            sooner[name] = min(gaps[other.name][1], sooner.get(name, gaps[other.name][1]))
    stays = []
    for each in found:
        last, first = gaps[each.name]
        first = min(first, max(last, sooner.get(each.name, first)))
        if each.name in made and first > last:
            start, takes = made[each.name], costs.copy(each.num_bytes)
            stays.append(
                Stay(
                    each,
                    start,
                    last,
                    first,
                    Trip(reached[start + 1], takes),
                    Trip(reached[first], takes),
                )
            )
    return stays
