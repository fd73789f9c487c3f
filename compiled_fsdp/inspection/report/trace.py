"""The timelines of a dump as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing:
predicted and measured tracks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.inspection.dump_folder import read_finished
from compiled_fsdp.ir.printer import printable

if TYPE_CHECKING:
    from compiled_fsdp.dump.layout import MeasuredRun, Run
    from compiled_fsdp.inspection.dump_folder import DumpedGraph, DumpedRank

MICROSECONDS = 1e6
COMPUTE, WIRE, MEMORY = 1, 2, 3
DETAILS = ("node", "op", "bytes", "sent", "dtype", "group")  # of a collective
LANES = {COMPUTE: "training thread", WIRE: "wire"}


def write_trace(dump_dir: Path, out: Path) -> None:
    """Write the predicted timeline of every dumped rank, and the measured one where `add_profile`
    left it, to `out`.

    Raises:
        DumpError: there is no dump, or a file of it is garbled; names the file.
    """
    Path(out).write_text(json.dumps(chrome_trace(read_finished(Path(dump_dir)))) + "\n")


def chrome_trace(ranks: list[DumpedRank]) -> dict[str, Any]:
    """The trace as an object. A rank's processes are one for what is predicted and one for what was
    measured.
    """
    events: list[dict[str, Any]] = []
    for rank in ranks:
        for source, pid in (("predicted", 2 * rank.rank), ("measured", 2 * rank.rank + 1)):
            found = _graphs(rank, source, pid)
            events += [*_names(rank.rank, source, pid), *found] if found else []
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(rank: int, source: str, pid: int) -> list[dict[str, Any]]:
    named = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {rank}, {source}"}}
    ]
    named += [
        {"ph": "M", "pid": pid, "tid": t, "name": "thread_name", "args": {"name": n}}
        for t, n in LANES.items()
    ]
    return named


def _graphs(rank: DumpedRank, source: str, pid: int) -> list[dict[str, Any]]:
    """The graphs one after the other, each from where the one before ends."""
    events: list[dict[str, Any]] = []
    start = 0.0
    for graph in rank.finished:
        run = rank.measured(graph) if source == "measured" else graph.expected
        if run is None:
            continue
        events += [{**event, "pid": pid} for event in _graph(graph, run, start)]
        if source == "predicted":
            events += _memory(graph, start, pid)
        start += run["total"]
    return events


def _graph(graph: DumpedGraph, run: Run | MeasuredRun, start: float) -> list[dict[str, Any]]:
    events = [_range(graph.name, COMPUTE, start, 0.0, run["total"], {})]
    for begin, end, node, module in run["compute"]:
        name = module or node or "computes"
        events.append(_range(name, COMPUTE, start, begin, end, {"node": node}))
    for collective, times in zip(graph.timeline["collectives"], run["times"], strict=True):
        name = printable(
            f"{collective['kind']} {', '.join(collective['units']) or collective['module']}"
        )
        details = {
            "parameters": [printable(p["name"]) for p in collective["parameters"]],
            **{k: v for k, v in collective.items() if k in DETAILS},
            "exposed_ms": times["exposed"] * 1e3,
        }
        events.append(_range(name, WIRE, start, times["begin"], times["end"], details))
        if times["issuing"]:
            events.append(
                _range(
                    f"start: {name}",
                    COMPUTE,
                    start,
                    times["issued"],
                    times["issued"] + times["issuing"],
                    {},
                )
            )
        if times["exposed"] and times["awaited"] is not None:
            events.append(
                _range(
                    f"wait: {name}",
                    COMPUTE,
                    start,
                    times["awaited"],
                    times["awaited"] + times["exposed"],
                    {},
                )
            )
    return events


def _range(
    name: str, lane: int, start: float, begin: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    when = {"ts": (start + begin) * MICROSECONDS, "dur": (end - begin) * MICROSECONDS}
    return {"ph": "X", "name": printable(name), "tid": lane, **when, "args": details}


def _memory(graph: DumpedGraph, start: float, pid: int) -> list[dict[str, Any]]:
    """A counter of the bytes of each kind; of nodes that begin at the same time the one with the
    most counts.
    """
    profile = graph.expected_memory
    most: dict[float, int] = {}
    for index, when in enumerate(graph.expected["nodes"]):
        if when not in most or profile["during"][index] > profile["during"][most[when]]:
            most[when] = index
    return [
        {
            "ph": "C",
            "pid": pid,
            "name": "memory above rest, bytes",
            "ts": (start + when) * MICROSECONDS,
            "args": {kind: curve[index] for kind, curve in profile["kinds"].items()},
        }
        for when, index in most.items()
    ]
