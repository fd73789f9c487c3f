"""What the passes may choose, decided before any rewriting and the same on every rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Plan:
    """The first schedule: fixed distances, in units (buckets). A fraction means that share of a unit's matmuls.

    prefetch: how far ahead of its first use an all-gather starts in forward; 0 starts it where it is needed.
    backward_prefetch: the same in backward, where memory is scarcest: 0.5 starts it halfway through the unit before.
    reduces_in_flight: for how long a reduction is under way before it is awaited; 0 awaits it at once, 0.5 halfway through
        the next unit's backward, 2 when the second reduction after it is about to start.
    """

    prefetch: float = 2
    backward_prefetch: float = 1
    reduces_in_flight: float = 1

    def __post_init__(self) -> None:
        for name in ("prefetch", "backward_prefetch", "reduces_in_flight"):
            distance = getattr(self, name)
            if isinstance(distance, bool) or not isinstance(distance, int | float) or not 0 <= distance < inf:
                raise ValueError(f"Plan: {name}={distance!r}; should be a number of units, at least 0")


_current = Plan()


def current_plan() -> Plan:
    """The plan that graphs compiled from now on get."""
    return _current


def set_plan(plan: Plan) -> None:
    """Use `plan` for graphs compiled from now on; call it alike on every rank. Compiled graphs keep theirs."""
    global _current
    _current = plan


@contextmanager
def planned(**changes: float) -> Iterator[Plan]:
    """Change fields of the plan for graphs compiled inside; the backward compiles at the first `.backward()`."""
    before = current_plan()
    set_plan(replace(before, **changes))
    try:
        yield current_plan()
    finally:
        set_plan(before)
