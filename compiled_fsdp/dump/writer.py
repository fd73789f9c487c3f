"""The folder of dumps, one file a pass; the same goes to torch's structured trace and to our
log.
"""

from __future__ import annotations

import difflib
import gzip
import json
import logging
import os
import platform
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from compiled_fsdp import log
from compiled_fsdp.ir.collectives import WAIT, group_of
from compiled_fsdp.ir.graph import find, is_matmul, starts
from compiled_fsdp.ir.printer import collectives, provenance, show
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import FREE, traits_of
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import ASKED, current_plan
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.torch_private.groups import group_named
from compiled_fsdp.torch_private.tracing import is_traced, trace_artifact
from compiled_fsdp.version import __version__

from . import graph_json
from .records import write_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from enum import Enum

    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.plan import Plan


AS_AFTER = "# as after "  # in the place of a graph that a pass has not changed: its files' name

_folder: Path | None = None
_written: Path | None = None
_number = 0
_groups: dict[
    Path, dict[str, list[int]]
] = {}  # for each folder, that its graphs communicate over: names, and ranks


def folder() -> Path | None:
    """Where dumps go: the innermost `dumped_to`, else COMPILED_FSDP_DUMP, else nowhere."""
    if _folder is not None:
        return _folder
    name = os.environ.get("COMPILED_FSDP_DUMP")
    return Path(name) if name else None


@contextmanager
def dumped_to(path: str | Path) -> Iterator[Path]:
    """Write dumps of graphs compiled inside to `path`; compile caches are bypassed, so that every
    pass runs.
    """
    global _folder
    if not isinstance(path, str | Path):
        raise TypeError(f"dumped_to: path is {path!r}; should be the path of a folder")
    if Path(path).exists() and not Path(path).is_dir():
        raise NotADirectoryError(f"dumped_to: {path} is a file; should be a folder, or nothing yet")
    before, _folder = _folder, Path(path)
    try:
        yield _folder
    finally:
        _folder = before


def rank_folder() -> Path | None:
    """This rank's folder in the last dump that was written, if that still stands; None if nothing
    was dumped.
    """
    return _written if _written is not None and _written.is_dir() else None


class Ran(Protocol):
    """What a dump needs to know of a pass that has run."""

    @property
    def name(self) -> str:
        """The pass, by the name of its function."""
        ...

    @property
    def provides(self) -> Enum | None:
        """What holds of the graph from now on; None for a pass of the user's."""
        ...


class Dump:
    """One graph on its way through the passes, for everybody who wants to look: the folder, torch's
    structured trace, our log.

    In the folder: `rank0/003_backward/02_bucket_all_gather.txt`, `.diff` and `.json.gz`
        (`graph_json.py`) beside it; after a pass that changed nothing, the text names the pass that
        did last, and there is no other file. In the trace, the texts as artifacts:
        `compiled_fsdp_003_backward_02_bucket_all_gather.txt`. In the log, a line a pass, at DEBUG
        with the graph.
    """

    def __init__(
        self,
        gm: GraphModule,
        kind: str,
        plan: Plan,
        held: Sequence[str] = (),
        is_fused: bool = False,
    ) -> None:
        global _number, _written
        root = folder()
        self.path: Path | None = None
        self.plan = plan
        self.is_fused = is_fused
        self.held = list(held)
        self.step = 0
        self.before: list[str] = []
        self.written = "", ""  # the last graph that was, and the name of its files
        self.is_on = root is not None or is_traced() or log.is_on()
        if not self.is_on:
            return
        self.name = f"{_number:03d}_{kind}"
        _number += 1
        if root is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            _written = root / f"rank{rank}"
            self.path = _written / self.name
            self.path.mkdir(parents=True, exist_ok=True)
        self.counts = Counts.of(gm.graph)
        self._write_pass(gm, "capture")

    def after_pass(self, gm: GraphModule, entry: Ran) -> None:
        """Write the graph after a pass."""
        holds = entry.provides.name if entry.provides is not None else ""
        self.held.extend([holds] if holds else [])
        if not self.is_on:
            return
        if holds == "OUTLINED":
            self._write_regions(gm)
            return
        before, self.counts = self.counts, Counts.of(gm.graph)
        log.log.info("%s %s: %s", self.name, entry.name, before.changes(self.counts))
        self._write_pass(gm, entry.name)
        if holds == "SUMMARIZED" and (self.path is not None or is_traced()):
            self._write_memory(gm.graph)
            self._write_timeline(gm.graph)
            if self.path is not None:
                write_records(gm.graph, self.path, self.is_fused)
                self._write_settings(gm.graph)

    def write_record(self, record: str) -> None:
        """Write what the finished graph says of itself when it runs, by which a profile finds it."""
        if self.path is not None:
            (self.path / "record.json").write_text(record)

    def _write_settings(self, graph: Graph) -> None:
        """What all graphs of this rank have in common, `settings.json`: written again as more
        groups become known.
        """
        assert self.path is not None
        groups = _groups.setdefault(self.path.parent, {})
        for name in (group_of(start) for start in starts(graph)):
            groups[name] = dist.get_process_group_ranks(group_named(name))
        found = {**settings(), "groups": groups}
        (self.path.parent / "settings.json").write_text(f"{json.dumps(found, indent=1)}\n")

    def _write_regions(self, gm: GraphModule) -> None:
        """The subgraphs that are compiled once, and the graph that calls them, `regions.txt`; what
        is read afterwards is the graph before, which computes the same.
        """
        found: list[tuple[str, Any]] = list(gm.named_children())
        calls = [node.args[1] for node in gm.graph.nodes if str(node.target) == "invoke_subgraph"]
        log.log.info("%s outline: %d regions, %d calls", self.name, len(found), len(calls))
        if found:
            shown = [f"# {n}, called {calls.count(n)} times\n{show(m.graph)}" for n, m in found]
            self._write("regions.txt", "\n\n".join([*shown, f"# calls\n{show(gm.graph)}"]) + "\n")

    def _write_memory(self, graph: Graph) -> None:
        """The memory of the finished graph, `memory.txt`, for both executors."""
        plain, fused = profile(graph), profile(graph, is_fused=True)
        self._write("memory.txt", f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write_timeline(self, graph: Graph) -> None:
        """What the finished graph is expected to take, `timeline.txt`, for both executors; nothing
        without costs.
        """
        costs = current_plan().costs
        if costs is not None:
            plain, fused = predict(graph, costs.fused(False)), predict(graph, costs.fused(True))
            self._write("timeline.txt", f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write_pass(self, gm: GraphModule, name: str) -> None:
        stem = f"{self.step:02d}_{name}"
        now = collectives(gm.graph)
        if (self.path is not None or is_traced()) and self._write_graph(gm, name, stem):
            changes = difflib.unified_diff(
                self.before, now, "before", f"after {name}", lineterm="", n=1
            )
            if self.step:
                self._write(f"{stem}.diff", "\n".join(changes) + "\n")
        if log.is_on(logging.DEBUG):
            log.log.debug("%s after %s\n%s", self.name, name, show(gm.graph))
        self.before = now
        self.step += 1

    def _write_graph(self, gm: GraphModule, name: str, stem: str) -> bool:
        """Returns whether the pass has changed the graph, which is written then."""
        made_by = provenance(gm.graph, name, self.held)
        values = graph_json.to_text(gm.graph, "", self.plan)
        known, where = self.written
        if values == known:
            self._write(f"{stem}.txt", f"{made_by}\n{AS_AFTER}{where}\n")
            return False
        self.written = values, stem
        self._write(f"{stem}.txt", f"{made_by}\n{show(gm.graph)}\n")
        if self.path is not None:
            text = values.replace('"pass":""', f'"pass":"{name}"', 1)
            (self.path / f"{stem}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        return True

    def _write(self, name: str, text: str) -> None:
        if self.path is not None:
            (self.path / name).write_text(text)
        trace_artifact(f"compiled_fsdp_{self.name}_{name}", "string", lambda: text)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a log line about a pass compares.

    places: for each start and wait of a collective, how many matmuls stand before it.
    """

    nodes: int
    gathers: int
    reductions: int
    frees: int
    places: dict[str, int]

    @classmethod
    def of(cls, graph: Graph) -> Counts:
        """Of a graph before or after lowering."""
        places: dict[str, int] = {}
        heavy = 0
        kept = {*starts(graph)}
        for node in graph.nodes:
            heavy += is_matmul(node)
            if node in kept or node.target is WAIT:
                places[node.name] = heavy
        unlowered = [traits_of(node.target).lowers_to for node in graph.nodes]
        gathers, reductions = (
            unlowered.count(kind) + sum(bool(r.starts) for r in find_regions(graph, kind))
            for kind in ("gather", "reduce")
        )
        return cls(len(graph.nodes), gathers, reductions, len(find(graph, FREE)), places)

    def changes(self, after: Counts) -> str:
        """From here to there, in words."""
        named = (
            ("nodes", "nodes"),
            ("all-gathers", "gathers"),
            ("reductions", "reductions"),
            ("frees", "frees"),
        )
        found = [
            f"{text} {getattr(self, name)} -> {getattr(after, name)}"
            for text, name in named
            if getattr(self, name) != getattr(after, name)
        ]
        moved = sum(place != after.places.get(name, place) for name, place in self.places.items())
        if moved:
            found.append(f"{moved} of {len(after.places)} starts and waits moved past matmuls")
        return ", ".join(found) or "no change"


def settings() -> dict[str, Any]:
    """What all graphs of a dump have in common, `settings.json`."""
    is_there = dist.is_initialized()
    plan = current_plan()
    return {
        "versions": {
            "torch": torch.__version__,
            "compiled_fsdp": __version__,
            "python": platform.python_version(),
        },
        "rank": dist.get_rank() if is_there else 0,
        "world_size": dist.get_world_size() if is_there else 1,
        "backend": dist.get_backend() if is_there else "",
        "plan": {name: str(plan.shown(name)) for name in ASKED},
    }


def trace_schedule(graph: Graph, *, is_fused: bool) -> None:
    """The collectives in order, as tlparse compares them between ranks: under the name and in the
    form in which Inductor writes those that it knows. It leaves out ours (`fsdp::all_gather`), so
    where it would leave out some, all are written here.
    """
    found = starts(graph)
    if not found or (
        is_fused and all(str(node.target).startswith("_c10d_functional.") for node in found)
    ):
        return
    trace_artifact(
        "inductor_collective_schedule",
        "json",
        lambda: [f"torch.ops.{node.target}" for node in found],
    )
