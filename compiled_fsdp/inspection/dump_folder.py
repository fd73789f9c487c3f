"""Reads a dump back, and nobody else does: its ranks, their graphs, each graph after each pass, and
what is expected and was measured of it. Files are opened when they are asked for, and JSON is
checked against the types of `dump/layout.py`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from compiled_fsdp.dump import graph_json, layout
from compiled_fsdp.dump.layout import (
    EXECUTORS,
    FORMAT,
    Head,
    Measured,
    MeasuredRun,
    MeasuredStep,
    Memory,
    Profile,
    RankSettings,
    Run,
    Timeline,
)
from compiled_fsdp.ir.printer import printable, show
from compiled_fsdp.wire import ranges

from . import check
from .check import Check, DumpError, load

if TYPE_CHECKING:
    from pathlib import Path

    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan

DOING = "reading the dump"


@dataclass(frozen=True)
class Dumped:
    """A graph after a pass: `00_capture` and so on; `path` is without the ending."""

    path: Path

    @property
    def name(self) -> str:
        """The pass."""
        return layout.name_of(self.path)

    @property
    def where(self) -> str:
        """Rank, graph and pass, as in the folder."""
        return "/".join(self.path.parts[-3:])

    @cached_property
    def _printed(self) -> tuple[str, str]:
        made_by, _, graph = read(self._file(layout.TEXT)).partition("\n")
        return made_by, graph

    def _file(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    @cached_property
    def source(self) -> Dumped:
        """The graph after the last pass that changed it, whose files hold it."""
        same = re.fullmatch(rf"{layout.AS_AFTER}(\d\d_\w+)\n?", self._printed[1])
        if same is None:
            return self
        if same[1] >= self.path.name:
            raise DumpError(f"{self.where}.txt names a pass that is not before it: {same[1]}")
        return Dumped(self.path.with_name(same[1])).source

    @property
    def provenance(self) -> str:
        """The first line of the text: what made the graph, and what holds of it."""
        return self._printed[0]

    @property
    def text(self) -> str:
        """The text as it was printed, with what made it in the first line; of a large graph, of
        which the file has the changes alone, the whole.
        """
        printed = self.source._printed[1]
        if printed.startswith(layout.AS_AFTER):
            printed = f"{show(self.gm.graph)}\n"
        return f"{self.provenance}\n{printed}"

    @property
    def diff(self) -> str:
        """Returns what the pass has changed; "" if nothing."""
        path = self._file(layout.DIFF)
        return read(path) if path.exists() else ""

    @property
    def json_path(self) -> Path:
        """The file that holds the graph for programs."""
        return self.source._file(layout.GRAPH)

    @cached_property
    def _parsed(self) -> tuple[GraphModule, Plan, str]:
        if self.source is not self:
            return self.source._parsed
        path = self.json_path
        try:
            return graph_json.of_text(read(path))
        except graph_json.FormatError as error:
            raise DumpError(
                f"{path} holds no graph that can be read: {printable(str(error))}"
            ) from error

    @property
    def gm(self) -> GraphModule:
        """The graph, for reading."""
        return self._parsed[0]

    @property
    def plan(self) -> Plan:
        """The plan that the passes got."""
        return self._parsed[1]


@dataclass(frozen=True)
class DumpedGraph:
    """A graph on its way through the passes, `001_forward` for example, and once it is finished."""

    rank: int
    path: Path
    passes: tuple[Dumped, ...]

    @property
    def name(self) -> str:
        """Number and kind."""
        return self.path.name

    @property
    def kind(self) -> str:
        """Forward, backward or joint."""
        return layout.name_of(self.path)

    @property
    def is_half(self) -> bool:
        """Whether it is a forward or backward, not a joint graph."""
        return self.kind != layout.JOINT

    @property
    def is_finished(self) -> bool:
        """Whether all passes have run, so that it is known what is expected of it."""
        return (self.path / layout.TIMELINE).exists()

    def after(self, name: str | None) -> Dumped:
        """The graph after this pass; the last, if none is named.

        Raises:
            DumpError: there is no such pass.
        """
        found = [entry for entry in self.passes if name in (None, entry.name, entry.path.name)]
        if not found:
            names = [entry.name for entry in self.passes]
            raise DumpError(f"{self.path} holds no graph after {name!r}; it has {names}")
        return found[-1]

    @cached_property
    def timeline(self) -> Timeline:
        """When its collectives are expected to run."""
        path = self.path / layout.TIMELINE
        found: Timeline = _record(path, Timeline)
        check = Check(path, DOING)
        for executor, run in (("plain", found["plain"]), ("fused", found["fused"])):
            check.same_length(
                f"{executor}.times and collectives", run["times"], found["collectives"]
            )
        if not all(-1 <= index < len(found["collectives"]) for index in found["waits"]):
            check.fail(f"waits names collectives out of 0 to {len(found['collectives']) - 1}")
        return found

    @property
    def expected(self) -> Run:
        """How it is expected to run, by the executor that it was compiled for."""
        found = self.timeline
        return found["fused" if EXECUTORS[found["executor"]] else "plain"]

    @cached_property
    def memory(self) -> Memory:
        """How much memory it is expected to need."""
        path = self.path / layout.MEMORY
        found: Memory = _record(path, Memory)
        check, nodes = Check(path, DOING), found["nodes"]
        for executor, profile in (("plain", found["plain"]), ("fused", found["fused"])):
            for kind, curve in profile["kinds"].items():
                check.same_length(
                    f"{executor}.kinds.{kind}, during and nodes", curve, profile["during"], nodes
                )
            if not 0 <= profile["where"] < len(nodes):
                check.fail(
                    f"{executor}.where is {profile['where']}, should be from 0 to {len(nodes) - 1}"
                )
        return found

    @property
    def expected_memory(self) -> Profile:
        """How much memory it is expected to need, by the executor that it was compiled for."""
        found = self.memory
        return found["fused" if EXECUTORS[found["executor"]] else "plain"]

    @cached_property
    def digest(self) -> str:
        """The name of its runs in a profile; "" if the dump does not say."""
        path = self.path / layout.RECORD
        return ranges.digest(read(path)) if path.exists() else ""

    @property
    def fingerprint(self) -> str:
        """A hash of the timeline, so that a measured run is not shown with another graph."""
        return hashlib.sha256((self.path / layout.TIMELINE).read_bytes()).hexdigest()


@dataclass(frozen=True)
class DumpedRank:
    """All that one rank dumped, in the order of compilation."""

    rank: int
    path: Path
    graphs: tuple[DumpedGraph, ...]

    @property
    def finished(self) -> list[DumpedGraph]:
        """The graphs of which it is known what is expected."""
        return [graph for graph in self.graphs if graph.is_finished]

    @property
    def settings(self) -> RankSettings:
        """Returns what all its graphs were made under."""
        path = self.path / layout.SETTINGS
        found: RankSettings = load(path, DOING)
        Check(path, DOING)(found, RankSettings)
        return found

    @property
    def explanation_path(self) -> Path:
        """The file that holds what `explain` knew after the first step, if there was one."""
        return self.path / layout.EXPLANATION

    @property
    def explanation(self) -> dict[str, Any] | None:
        """Returns what `explain` knew after the first step; None without one."""
        if not self.explanation_path.exists():
            return None
        found: dict[str, Any] = load(self.explanation_path, DOING)
        Check(self.explanation_path, DOING)(found, dict[str, Any])
        return found

    @cached_property
    def _measured(self) -> Measured | None:
        path = self.path / layout.MEASURED
        if not path.exists():
            return None
        found: Measured = load(path, DOING)
        _check_format(found, Check(path, DOING))
        Check(path, DOING)(found, Measured)
        return found

    @property
    def step(self) -> MeasuredStep | None:
        """The profiled step, if there is one."""
        return self._measured["step"] if self._measured else None

    def measured(self, graph: DumpedGraph) -> MeasuredRun | None:
        """The run of one of its graphs in the profile; None if it did not run there.

        Raises:
            DumpError: it is of another graph.
        """
        run = self._measured["graphs"].get(graph.name) if self._measured else None
        if run is None:
            return None
        check = Check(self.path / layout.MEASURED, DOING)
        check.same_length(
            f"graphs.{graph.name} and the collectives", run["times"], graph.timeline["collectives"]
        )
        if run["of"] != graph.fingerprint:
            check.fail(f"{graph.name} was measured before it was dumped again")
        return run


def read_folder(folder: Path) -> list[DumpedRank]:
    """Every rank of a dump, by number.

    Raises:
        DumpError: there is no dump.
    """
    if not folder.is_dir():
        raise DumpError(
            f"{folder} is no folder; give one that dumped_to or COMPILED_FSDP_DUMP wrote"
        )
    ranks = [
        DumpedRank(number, path, _graphs(number, path)) for number, path in layout.ranks_of(folder)
    ]
    if not any(rank.graphs for rank in ranks):
        raise DumpError(
            f"{folder} holds no graph (rank0/001_forward/00_capture.txt): compile a sharded model "
            "inside dumped_to, or with COMPILED_FSDP_DUMP"
        )
    return ranks


def read_finished(folder: Path) -> list[DumpedRank]:
    """Every rank of a dump that has finished graphs, by number.

    Raises:
        DumpError: there is none.
    """
    ranks = [rank for rank in read_folder(folder) if rank.finished]
    if not ranks:
        raise DumpError(
            f"{folder} has no finished graph (rank0/001_forward/timeline.json.gz): it was "
            "interrupted while it compiled; dump again"
        )
    return ranks


def _graphs(rank: int, path: Path) -> tuple[DumpedGraph, ...]:
    found = (
        (graph, tuple(map(Dumped, layout.passes_of(graph)))) for graph in layout.graphs_of(path)
    )
    return tuple(DumpedGraph(rank, graph, passes) for graph, passes in found if passes)


def read(path: Path) -> str:
    """The text in a file of a dump.

    Raises:
        DumpError: it is missing, or no text.
    """
    return check.read(path, DOING)


def _record(path: Path, form: type) -> Any:
    """A record of a finished graph, of this type."""
    found, check = load(path, DOING), Check(path, DOING)
    _check_format(found, check)
    check(found, Head)
    if found["executor"] not in EXECUTORS:
        check.fail(f"executor is {found['executor']!r}, should be one of {list(EXECUTORS)}")
    check(found, form)
    return found


def _check_format(found: Any, check: Check) -> None:
    check(found, dict[str, Any])
    if found.get("format") != FORMAT:
        check.fail(f"format is {found.get('format')}, should be {FORMAT}")
