"""A profiled step laid over the predicted one: which events of a profile are which collectives of
which dumped graph.

A graph that communicates begins with `fsdp::agree`; from there on, its collectives start, and are
awaited, in the order of the graph. So a run is recognised by the kinds of its collectives, and the
n-th start in it is the graph's n-th. Of several runs of a graph the last counts.

A profile of the CPU does not say when a message arrives. Events named `compiled_fsdp::carried` do,
if whoever profiled added them: one for each exchange of ours over gloo, in the order of their
starts. Without, a collective counts as under way until its wait is over.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.dump.records import FORMAT

from .check import NUMBER, Check, DumpError, load
from .read import MEASURED, DumpedGraph, digest, read_dump

if TYPE_CHECKING:
    from torch.profiler import profile

DOING = "reading the profile"
AGREE, WAIT, CARRIED = "fsdp::agree", "_c10d_functional::wait_tensor", "compiled_fsdp::carried"
NAMESPACES = ("fsdp", "_c10d_functional")
KINDS = {
    "all_gather": "gather",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "custom_all_gather": "gather",
    "gather_ahead": "gather",
    "all_to_all": "reduce",
    "reduce_scatter_tensor": "reduce",
    "reduce_scatter_tensor_out": "reduce",
    "custom_reduce_scatter": "reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
EXCHANGES = ("fsdp::all_gather", "fsdp::all_to_all")
MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Event:
    """A range in a profile, in seconds."""

    name: str
    begin: float
    end: float
    thread: object

    @property
    def kind(self) -> str:
        """ "gather", "reduce" or "all_reduce" for what starts a collective, else ""."""
        namespace, _, op = self.name.partition("::")
        return KINDS.get(op, "") if namespace in NAMESPACES else ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a graph: what starts collectives and what waits for them, in order, and the range
    that encloses it.
    """

    begin: float
    end: float | None
    starts: list[Event]
    waits: list[Event]
    carried: list[Event]

    def is_of(self, graph: DumpedGraph) -> bool:
        """Whether it starts as many collectives as the graph, or more, and those of the graph
        first.
        """
        kinds = [c["kind"] for c in graph.timeline["collectives"]]
        enough = len(self.waits) >= len(graph.timeline["waits"])
        return bool(kinds) and enough and [e.kind for e in self.starts[: len(kinds)]] == kinds


def add_profile(dump_dir: Path, profile: profile | Path, rank: int = 0) -> Path:
    """Lay a profile over the graphs that `rank` dumped: what `write_report` and `write_trace` show
    as measured.

    profile: a finished `torch.profiler.profile`, or a Chrome trace that it exported (.json or
        .json.gz), of at least one step.

    Returns:
        The file that was written, `measured.json` in the rank's folder.

    Raises:
        DumpError: the profile is garbled, or no dumped graph runs in it.
        NotImplementedError: it is of a device, whose collectives run on after their starts and
            waits return.
    """
    ranks = {found.rank: found for found in read_dump(Path(dump_dir))}
    if rank not in ranks:
        raise DumpError(
            f"add_profile: rank is {rank}; {dump_dir} has dumps of ranks {list(ranks)}: give one "
            "of them"
        )
    if isinstance(profile, str | Path):
        source, events = Path(profile).name, read_events(Path(profile))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profile.export_chrome_trace(str(path))
            source, events = "a profile of this process", read_events(path)
    graphs = match(ranks[rank].graphs, events)
    if not graphs:
        raise DumpError(
            f"add_profile: {source} has {sum(e.name == AGREE for e in events)} runs of graphs "
            f"({AGREE}), none with the collectives of "
            f"{', '.join(g.name for g in ranks[rank].graphs)}; profile a step of the model that "
            f"was dumped, on rank {rank}"
        )
    out = ranks[rank].folder / MEASURED
    graphs = {
        name: {**run, "of": digest(ranks[rank].folder / name)} for name, run in graphs.items()
    }
    out.write_text(json.dumps({"format": FORMAT, "source": source, "graphs": graphs}) + "\n")
    return out


def read_events(path: Path) -> list[Event]:
    """The ranges of a Chrome trace, by time; a range comes before what it encloses.

    Raises:
        DumpError: it is no Chrome trace; names the file.
        NotImplementedError: it is of a device.
    """
    found = load(path, DOING)
    check = Check(path, DOING)
    check(found, {"traceEvents": [dict]})
    events = []
    if any(event.get("cat") == "kernel" for event in found["traceEvents"]):
        raise NotImplementedError(
            f"{DOING}: {path.name} has kernels of a device; only a step on the CPU can be laid "
            "over the predicted one so far, since on a device starts and waits return at once. "
            "Look at it beside the trace that write_trace writes"
        )
    for index, event in enumerate(found["traceEvents"]):
        if event.get("ph") == "X":
            check(event, {"name": str, "ts": NUMBER, "dur": NUMBER}, f"traceEvents[{index}]")
            begin = event["ts"] * MICROSECOND
            events.append(
                Event(event["name"], begin, begin + event["dur"] * MICROSECOND, event.get("tid"))
            )
    return sorted(events, key=lambda event: (event.begin, -event.end))


def match(graphs: tuple[DumpedGraph, ...], events: list[Event]) -> dict[str, dict[str, Any]]:
    """Measured times of every graph that runs in the profile, by its folder's name."""
    found = {}
    for run in find_runs(events):
        graph = next((g for g in reversed(graphs) if run.is_of(g)), None)
        if graph is not None:
            found[graph.name] = times(graph, run)
    return found


def find_runs(events: list[Event]) -> list[Run]:
    """Runs of graphs, in order."""
    carried = iter([e for e in events if e.name == CARRIED])
    arrivals = {
        id(e): c
        for e, c in zip(
            _outermost([e for e in events if e.name in EXCHANGES]), carried, strict=False
        )
    }
    runs = []
    marks = [e for e in events if e.name == AGREE]
    for mark in marks:
        later = [m.begin for m in marks if m.thread == mark.thread and m.begin > mark.begin]
        until = min(later, default=float("inf"))
        inside = [
            e
            for e in events
            if e.thread == mark.thread
            and mark.end <= e.begin < until
            and (e.kind or e.name == WAIT)
        ]
        inside = _outermost(inside)
        starts = [e for e in inside if e.kind]
        around = [
            e.end
            for e in events
            if e.thread == mark.thread and e.begin <= mark.begin and mark.end < e.end <= until
        ]
        waits = [e for e in inside if not e.kind]
        runs.append(
            Run(
                mark.begin,
                max(around, default=None),
                starts,
                waits,
                [arrivals.get(id(e), e) for e in starts],
            )
        )
    return runs


def _outermost(events: list[Event]) -> list[Event]:
    """Without those that lie inside another one of the same thread."""
    found: list[Event] = []
    reached: dict[object, float] = {}
    for event in events:
        if event.end > reached.get(event.thread, float("-inf")):
            found.append(event)
            reached[event.thread] = event.end
    return found


def times(graph: DumpedGraph, run: Run) -> dict[str, Any]:
    """A run of a graph in the form of a predicted one: seconds from its beginning; what is not
    awaited in it has no wait.

    issuing: how long the thread was busy with starting a collective.
    exposed: how long it stood in the wait, if the message was not there before; a wait for one that
        was there hides it.
    """
    awaited = list(zip(graph.timeline["waits"], run.waits, strict=False))
    waits = {
        index: wait for index, wait in reversed(awaited) if index >= 0
    }  # a user may await his own again
    number = len(graph.timeline["collectives"])
    has_arrivals = all(c.name == CARRIED for c in run.carried[:number])
    found, busy = [], []
    for index, start in enumerate(run.starts[:number]):
        wait, arrival = waits.get(index), run.carried[index]
        end = arrival.end if has_arrivals else wait.end if wait else start.end
        is_exposed = wait is not None and end > wait.begin
        busy += [start, wait] if wait is not None and is_exposed else [start]
        found.append(
            {
                "issued": start.begin - run.begin,
                "issuing": start.end - start.begin,
                "begin": start.begin - run.begin,
                "end": max(end, start.end) - run.begin,
                "awaited": wait and wait.begin - run.begin,
                "exposed": wait.end - wait.begin if wait and is_exposed else 0.0,
            }
        )
    last = max((event.end for event in (*busy, *run.waits[: len(awaited)])), default=run.begin)
    total = max(last, run.end or last) - run.begin
    return {
        "total": total,
        "times": found,
        "compute": _between(busy, run.begin, total),
        "has_arrivals": has_arrivals,
    }


def _between(busy: list[Event], begin: float, total: float) -> list[list[float]]:
    """The stretches in which the training thread neither starts a collective nor waits for one."""
    found, reached = [], 0.0
    for event in sorted(busy, key=lambda event: event.begin):
        if event.begin - begin > reached:
            found.append([reached, event.begin - begin])
        reached = max(reached, event.end - begin)
    return [*found, [reached, total]] if total > reached else found
