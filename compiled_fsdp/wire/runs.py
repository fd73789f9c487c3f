"""Which graphs have run in this process: each begins with an op that brings its record along, warm
cache or cold.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiled_fsdp.options import now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(eq=False, slots=True)
class Run:
    """The runs of one graph.

    record: what the graph is, as `graph_record.GraphRecord` writes it.
    first, last: moments (see `options.py`).
    """

    record: str
    count: int = 0
    first: int = field(default_factory=now)
    last: int = 0


_runs: dict[str, Run] = {}
_told: list[Callable[[str], None]] = []  # of each run that starts


def note_run(record: str) -> None:
    """A graph starts to run."""
    if not record:
        return
    run = _runs.get(record)
    if run is None:
        run = _runs[record] = Run(record)
    run.count += 1
    run.last = now()
    for tell in _told:
        tell(record)


@contextmanager
def told_of_runs(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, `tell` is called with its record whenever a graph starts to run."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def all_runs() -> list[Run]:
    """In the order of their first run."""
    return list(_runs.values())
