"""Writes dumps, and nobody else does: one file a pass into the folder (`layout.py`); the same
goes to torch's structured trace and to our log.
"""

from __future__ import annotations

import difflib
import gzip
import json
import logging
import os
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from compiled_fsdp import log
from compiled_fsdp.ir.collectives import group_of, shared_group
from compiled_fsdp.ir.graph import phase_of, starts
from compiled_fsdp.ir.printer import collectives, provenance, show
from compiled_fsdp.ir.subgraphs import called_by, unit_called_by
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.torch_private.groups import group_named
from compiled_fsdp.torch_private.tracing import is_traced, trace_artifact

from . import graph_json, layout
from .counts import Counts
from .memory import memory
from .settings import settings
from .timeline import timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from enum import Enum

    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

    from .layout import Head, Measured, RankSettings

LARGE = 1 << 16  # characters of a graph, of which only changes are written while they are few
FEW = 0.25  # of its characters

_folder: Path | None = None
_written: Path | None = None
_number = 0
_begun: set[Path] = set()  # folders of a rank that this process has written to
# For each folder of a rank, the groups that its graphs communicate over: names, and ranks.
_groups: dict[Path, dict[str, list[int]]] = {}


def folder() -> Path | None:
    """Where dumps go: the innermost `dumped_to`, else COMPILED_FSDP_DUMP, else nowhere."""
    if _folder is not None:
        return _folder
    name = os.environ.get("COMPILED_FSDP_DUMP")
    return Path(name) if name else None


@contextmanager
def dumped_to(path: str | Path) -> Iterator[Path]:
    """Write dumps of graphs compiled inside to `path`; compile caches are bypassed, so that every
    pass runs. The first graph of a process removes what an earlier one has left in the folder.
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


def _rank_folder(root: Path) -> Path:
    """The folder of this rank. What an earlier process has left in it goes: a dump is of one run,
    and what reads it (a report, `verify`) would take the graphs of both for one's. With it, by
    rank 0, go the folders of ranks that this world does not have.
    """
    is_parallel = dist.is_initialized()
    number, world = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
    rank = layout.rank_folder(root, number)
    if (begun := rank.resolve()) in _begun:
        return rank
    _begun.add(begun)
    others = layout.ranks_of(root) if number == 0 and root.is_dir() else []
    stale = [path for other, path in others if other >= world and path.resolve() not in _begun]
    for path in [rank, *stale]:
        if path.is_dir():
            _clear(path)
    return rank


def _clear(rank: Path) -> None:
    """Remove what a dump has in a rank's folder, and the folder if nothing else is in it."""
    log.log.info("%s: the dump of an earlier run goes", rank)
    for graph in filter(Path.is_dir, layout.graphs_of(rank)):
        shutil.rmtree(graph)
    for name in (layout.SETTINGS, layout.EXPLANATION, layout.MEASURED):
        (rank / name).unlink(missing_ok=True)
    if not any(rank.iterdir()):
        rank.rmdir()


def write_explanation(values: dict[str, Any]) -> None:
    """Write what `explain` knows of a model beside the last dump of this rank, if there is one and
    it still stands.
    """
    if _written is not None and _written.is_dir():
        _write_indented(_written / layout.EXPLANATION, values)


def write_measured(rank: Path, values: Measured) -> Path:
    """Write what a profile has shown of a rank's graphs into its folder; returns the file."""
    path = rank / layout.MEASURED
    _write_json(path, values)
    return path


def write_records(graph: Graph, path: Path, is_fused: bool) -> None:
    """Write what is expected of a finished graph, for programs, into its folder."""
    head: Head = {
        "format": layout.FORMAT,
        "kind": phase_of(graph),
        "executor": "fused" if is_fused else "plain",
    }
    for name, record in (
        (layout.TIMELINE, timeline(graph, head)),
        (layout.MEMORY, memory(graph, path, head)),
    ):
        _write_packed(path / name, f"{json.dumps(record)}\n")


def _write_packed(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _write_json(path: Path, values: object) -> None:
    path.write_text(f"{json.dumps(values)}\n")


def _write_indented(path: Path, values: object) -> None:
    path.write_text(f"{json.dumps(values, indent=1)}\n")


class Ran(Protocol):
    """A pass that has run, as far as a dump needs to know it."""

    @property
    def name(self) -> str:
        """The pass, by the name of its function."""
        ...

    @property
    def provides(self) -> Enum | None:
        """Returns what holds of the graph from now on; None for a pass of the user's."""
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
        self.written = "", "", ""  # the last graph that was, as JSON and text, its files' name
        self.is_on = root is not None or is_traced() or log.is_on()
        if not self.is_on:
            return
        self.name = layout.graph_name(_number, kind)
        _number += 1
        if root is not None:
            _written = _rank_folder(root)
            self.path = _written / self.name
            self.path.mkdir(parents=True, exist_ok=True)
        self.counts = Counts.of(gm.graph)
        self._write_units(gm.graph)
        self._write_pass(gm, "capture")

    def after_pass(self, gm: GraphModule, entry: Ran) -> None:
        """Write the graph after a pass."""
        holds = entry.provides.name if entry.provides is not None else ""
        self.held.extend([holds] if holds else [])
        if not self.is_on:
            return
        if holds == "OUTLINED":
            self._write_regions(gm)
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
        """Write the text by which a profile finds the finished graph when it runs."""
        if self.path is not None:
            (self.path / layout.RECORD).write_text(record)

    def _write_settings(self, graph: Graph) -> None:
        """Write what all graphs of this rank have in common, again as more groups become known."""
        assert self.path is not None
        groups = _groups.setdefault(self.path.parent, {})
        for name in (group_of(start) for start in starts(graph)):
            groups[name] = dist.get_process_group_ranks(group_named(shared_group(name)))
        found: RankSettings = {**settings(), "groups": groups}
        _write_indented(self.path.parent / layout.SETTINGS, found)

    def _write_regions(self, gm: GraphModule) -> None:
        """Write the subgraphs that are compiled once, and the graph that calls them; what is read
        afterwards is the graph before, which computes the same.
        """
        calls = [node for node in gm.graph.nodes if _calls_region(node)]
        shown = _called(calls)
        log.log.info("%s outline: %d regions, %d calls", self.name, len(shown), len(calls))
        if calls:
            self._write(
                layout.REGIONS_TEXT, "\n\n".join([*shown, f"# calls\n{show(gm.graph)}"]) + "\n"
            )

    def _write_units(self, graph: Graph) -> None:
        """Write the graphs of units that are traced once (`Plan(regions="units")`): passes change
        the graph that calls them, and not these.
        """
        shown = _called([node for node in graph.nodes if unit_called_by(node)])
        if shown:
            self._write(layout.UNITS_TEXT, "\n\n".join(shown) + "\n")

    def _write_memory(self, graph: Graph) -> None:
        """Write the memory of the finished graph for people, for both executors."""
        plain, fused = profile(graph), profile(graph, is_fused=True)
        self._write(layout.MEMORY_TEXT, f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write_timeline(self, graph: Graph) -> None:
        """Write what the finished graph is expected to take for people, for both executors;
        nothing without costs.
        """
        costs = current_plan().costs
        if costs is not None:
            plain, fused = predict(graph, costs.fused(False)), predict(graph, costs.fused(True))
            self._write(layout.TIMELINE_TEXT, f"as it is, {plain}\n\nunder Inductor, {fused}\n")

    def _write_pass(self, gm: GraphModule, name: str) -> None:
        stem = layout.pass_stem(self.step, name)
        now = collectives(gm.graph)
        if (self.path is not None or is_traced()) and self._write_graph(gm, name, stem):
            changes = difflib.unified_diff(
                self.before, now, "before", f"after {name}", lineterm="", n=1
            )
            if self.step:
                self._write(stem + layout.DIFF, "\n".join(changes) + "\n")
        if log.is_on(logging.DEBUG):
            log.log.debug("%s after %s\n%s", self.name, name, show(gm.graph))
        self.before = now
        self.step += 1

    def _write_graph(self, gm: GraphModule, name: str, stem: str) -> bool:
        """Returns whether the pass has changed the graph, which is written then."""
        made_by = provenance(gm.graph, name, self.held)
        values = graph_json.to_text(gm.graph, "", self.plan)
        known, before, where = self.written
        if values == known or any(map(_calls_region, gm.graph.nodes)):
            self._write(stem + layout.TEXT, f"{made_by}\n{layout.AS_AFTER}{where}\n")
            return False
        shown = show(gm.graph)
        self.written = values, shown, stem
        changes = _changes(before, shown)
        text = f"{layout.AS_AFTER}{where}{layout.BUT_FOR}{changes}" if changes else shown
        self._write(stem + layout.TEXT, f"{made_by}\n{text}\n")
        if self.path is not None:
            text = values.replace('"pass":""', f'"pass":"{name}"', 1)
            _write_packed(self.path / (stem + layout.GRAPH), text)
        return True

    def _write(self, name: str, text: str) -> None:
        if self.path is not None:
            (self.path / name).write_text(text)
        trace_artifact(f"compiled_fsdp_{self.name}_{name}", "string", lambda: text)


def _calls_region(node: Node) -> bool:
    return called_by(node) is not None and unit_called_by(node) is None


def _called(calls: Sequence[Node]) -> list[str]:
    """Returns the text of each graph of ours that is called, with how often it is."""
    names = Counter(str(call.args[1]) for call in calls)
    graphs = {str(call.args[1]): called_by(call) for call in calls}
    return [
        f"# {name}, called {names[name]} times\n{show(graph)}"
        for name, graph in graphs.items()
        if graph is not None
    ]


def _changes(before: str, now: str) -> str:
    """Returns what is new in the text of a large graph, as a diff; "" if that is most of it."""
    if not before or len(now) < LARGE:
        return ""
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
    changes = "\n".join([*lines][2:])
    return changes if len(changes) < FEW * len(now) else ""


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
