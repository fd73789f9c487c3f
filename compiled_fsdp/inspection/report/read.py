"""Read a folder of dumps for the report: the finished graphs of every rank."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_fsdp.dump.records import EXECUTORS, FORMAT
from compiled_fsdp.inspection.check import NUMBER, Check, DumpError, load
from compiled_fsdp.inspection.dump_folder import Dumped, DumpFolderError
from compiled_fsdp.wire import ranges

DOING = "reading the dump"
MEASURED = "measured.json"
HEAD = {"format": int, "kind": str, "executor": str}
TIMES = {
    "issued": NUMBER,
    "issuing": NUMBER,
    "begin": NUMBER,
    "end": NUMBER,
    "awaited": (NUMBER, None),
    "exposed": NUMBER,
}
RUN = {"total": NUMBER, "times": [TIMES], "compute": [list], "nodes": [NUMBER]}
COLLECTIVE = {
    "node": str,
    "op": str,
    "kind": str,
    "is_ours": bool,
    "units": [str],
    "parameters": [{"name": str, "unit": str, "shape": list, "bytes": NUMBER}],
    "bytes": NUMBER,
    "sent": NUMBER,
    "dtype": str,
    "group": str,
    "module": str,
}
COSTS = {
    "flops": NUMBER,
    "bandwidth": NUMBER,
    "overhead": NUMBER,
    "links": dict,
    "is_assumed": bool,
}
TIMELINE = {
    **HEAD,
    "costs": COSTS,
    "settings": {
        "plan": dict,
        "versions": dict,
        "rank": int,
        "world_size": int,
        "environment": dict,
    },
    "groups": dict,
    "collectives": [COLLECTIVE],
    "waits": [int],
    **dict.fromkeys(EXECUTORS, RUN),
}
PROFILE = {
    "peak": NUMBER,
    "where": int,
    "at_rest": NUMBER,
    "during": [NUMBER],
    "kinds": dict,
    "storages": [list],
}
MEMORY = {**HEAD, "after": (str, None), "nodes": [str], **dict.fromkeys(EXECUTORS, PROFILE)}
MEASURED_STEP = {
    "began": NUMBER,
    "total": NUMBER,
    "waiting": NUMBER,
    "starting": NUMBER,
    "compiling": NUMBER,
    "largest": (list, None),
    "parts": [list],
    "waits": [list],
    "starts": [list],
    "notes": [str],
}
MEASURED_RUN = {
    "total": NUMBER,
    "times": [TIMES],
    "compute": [list],
    "has_arrivals": bool,
    "of": str,
}


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass on one graph: what the dump says of it in its first line, and what it changed."""

    name: str
    provenance: str
    diff: str


@dataclass(frozen=True, slots=True)
class DumpedGraph:
    """A finished graph: its two records, its passes, and its text after the last of them.

    digest: what its runs are called in a profile; "" if the dump does not say.
    """

    name: str
    digest: str
    timeline: dict[str, Any]
    memory: dict[str, Any]
    passes: tuple[Pass, ...]
    text: str
    measured: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class DumpedRank:
    """What one rank dumped, in the order of compilation.

    joint: passes on graphs before they were split.
    step: the profiled step, if there is one.
    """

    rank: int
    folder: Path
    graphs: tuple[DumpedGraph, ...]
    joint: tuple[tuple[str, tuple[Pass, ...]], ...]
    step: dict[str, Any] | None


def read_dump(folder: Path) -> list[DumpedRank]:
    """Every rank of a dump, by number.

    Raises:
        DumpError: there is none, or a file is garbled; names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DumpError(
            f"{DOING}: {folder} is no folder; give one that dumped_to or COMPILED_FSDP_DUMP wrote"
        )
    ranks = [
        _rank(int(found[1]), path)
        for path in sorted(folder.iterdir())
        if (found := re.fullmatch(r"rank(\d+)", path.name))
    ]
    ranks = sorted((rank for rank in ranks if rank.graphs), key=lambda rank: rank.rank)
    if not ranks:
        raise DumpError(
            f"{DOING}: {folder} has no rank0/NNN_forward/timeline.json; finished graphs are "
            "written where a sharded model is compiled inside dumped_to, or with "
            "COMPILED_FSDP_DUMP: compile it with one of them"
        )
    return ranks


def _rank(rank: int, folder: Path) -> DumpedRank:
    measured, step = _measured(folder / MEASURED)
    graphs, joint = [], []
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        if (path / "timeline.json").exists():
            graphs.append(_graph(path, measured.get(path.name)))
        else:
            joint.append((path.name, _passes(path)))
    return DumpedRank(rank, folder, tuple(graphs), tuple(joint), step)


def _graph(path: Path, measured: dict[str, Any] | None) -> DumpedGraph:
    timeline, memory = _timeline(path / "timeline.json"), _memory(path / "memory.json")
    if measured is not None:
        check = Check(path.parent / MEASURED, DOING)
        check.same_length(
            f"graphs.{path.name} and the collectives", measured["times"], timeline["collectives"]
        )
        if measured["of"] != digest(path):
            check.fail(f"{path.name} was measured before it was dumped again")
    texts = sorted(path.glob("[0-9][0-9]_*.txt"))
    record = path / "record.json"
    return DumpedGraph(
        path.name,
        ranges.digest(_text(record)) if record.exists() else "",
        timeline,
        memory,
        _passes(path),
        _last(texts[-1]) if texts else "",
        measured,
    )


def digest(path: Path) -> str:
    """Of the timeline of a dumped graph, so that a measured run is not shown with another graph."""
    return hashlib.sha256((path / "timeline.json").read_bytes()).hexdigest()


def _timeline(path: Path) -> dict[str, Any]:
    found, check = _record(path, TIMELINE)
    for executor in EXECUTORS:
        check.same_length(
            f"{executor}.times and collectives", found[executor]["times"], found["collectives"]
        )
        _stretches(
            found[executor]["compute"], [NUMBER, NUMBER, str, str], f"{executor}.compute", check
        )
    if not all(-1 <= index < len(found["collectives"]) for index in found["waits"]):
        check.fail(f"waits names collectives out of 0 to {len(found['collectives']) - 1}")
    return found


def _memory(path: Path) -> dict[str, Any]:
    found, check = _record(path, MEMORY)
    for executor in EXECUTORS:
        profile = found[executor]
        for kind, curve in profile["kinds"].items():
            check(curve, [NUMBER], f"{executor}.kinds.{kind}")
            check.same_length(
                f"{executor}.kinds.{kind}, during and nodes",
                curve,
                profile["during"],
                found["nodes"],
            )
        if not 0 <= profile["where"] < len(found["nodes"]):
            check.fail(
                f"{executor}.where is {profile['where']}, should be from 0 to "
                f"{len(found['nodes']) - 1}"
            )
        _stretches(
            profile["storages"],
            [str, str, NUMBER, NUMBER, NUMBER, list],
            f"{executor}.storages",
            check,
        )
    return found


def _record(path: Path, form: dict[str, Any]) -> tuple[dict[str, Any], Check]:
    """A record of this form, and what checks the rest of it."""
    found: dict[str, Any] = load(path, DOING)
    check = Check(path, DOING)
    _head(found, check)
    check(found, form)
    return found, check


def _head(found: Any, check: Check) -> None:
    check(found, HEAD)
    _version(found, check)
    if found["executor"] not in EXECUTORS:
        check.fail(f"executor is {found['executor']!r}, should be one of {list(EXECUTORS)}")


def _version(found: Any, check: Check) -> None:
    if found["format"] != FORMAT:
        check.fail(f"format is {found['format']}, should be {FORMAT}")


def _stretches(rows: list[list[Any]], shapes: list[Any], where: str, check: Check) -> None:
    """Rows with a type for each column."""
    for index, row in enumerate(rows):
        if len(row) != len(shapes):
            check.fail(f"{where}[{index}] has {len(row)} columns, should have {len(shapes)}")
        for entry, shape in zip(row, shapes, strict=True):
            check(entry, shape, f"{where}[{index}]")


def _measured(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Measured runs by the folder's name of the graph, and the step that they are of."""
    if not path.exists():
        return {}, None
    found = load(path, DOING)
    check = Check(path, DOING)
    check(found, {"format": int})
    _version(found, check)
    check(found, {"graphs": dict, "step": MEASURED_STEP})
    graphs: dict[str, dict[str, Any]] = found["graphs"]
    for name, run in graphs.items():
        check(run, MEASURED_RUN, f"graphs.{name}")
        _stretches(run["compute"], [NUMBER, NUMBER, str, str], f"graphs.{name}.compute", check)
    _stretches(found["step"]["parts"], [NUMBER, NUMBER, str, str], "step.parts", check)
    for name in ("waits", "starts"):
        _stretches(found["step"][name], [NUMBER, NUMBER, str], f"step.{name}", check)
    return graphs, found["step"]


def _passes(path: Path) -> tuple[Pass, ...]:
    found = []
    for text in sorted(path.glob("[0-9][0-9]_*.txt")):
        diff = text.with_suffix(".diff")
        provenance = _text(text).split("\n", 1)[0].removeprefix("# ")
        found.append(Pass(text.stem, provenance, _text(diff).strip("\n") if diff.exists() else ""))
    return tuple(found)


def _last(path: Path) -> str:
    try:
        return Dumped(path.with_suffix("")).text
    except DumpFolderError as error:
        raise DumpError(f"{DOING}: {error}; dump again") from error


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DumpError(f"{DOING}: {path} cannot be read as text: {error}; dump again") from error
