"""Which graphs have run in this process: each begins with an op that brings its record along, warm
cache or cold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_fsdp.options import now


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


def note_run(record: str) -> None:
    """A graph starts to run."""
    if not record:
        return
    run = _runs.get(record)
    if run is None:
        run = _runs[record] = Run(record)
    run.count += 1
    run.last = now()


def all_runs() -> list[Run]:
    """In the order of their first run."""
    return list(_runs.values())
