"""What the passes may choose, decided before any rewriting and the same on every rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Plan:
    """The first schedule: fixed counts.

    prefetch: how many buckets ahead of its first use an all-gather starts; 0 starts it where it is needed.
    reduces_in_flight: how many reductions may be under way before the oldest is awaited; 0 awaits each at once.
    """

    prefetch: int = 1
    reduces_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in ("prefetch", "reduces_in_flight"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"Plan: {name}={count!r}; should be an int of at least 0 (number of buckets)")


_current = Plan()


def current_plan() -> Plan:
    """The plan that graphs compiled from now on get."""
    return _current


def set_plan(plan: Plan) -> None:
    """Use `plan` for graphs compiled from now on; call it alike on every rank. Compiled graphs keep theirs."""
    global _current
    _current = plan


@contextmanager
def planned(**changes: int) -> Iterator[Plan]:
    """Change fields of the plan for graphs compiled inside; the backward compiles at the first `.backward()`."""
    before = current_plan()
    set_plan(replace(before, **changes))
    try:
        yield current_plan()
    finally:
        set_plan(before)
