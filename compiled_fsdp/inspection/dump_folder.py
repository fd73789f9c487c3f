"""A folder of dumps, read back: its ranks, their graphs, and each graph after each pass."""

from __future__ import annotations

import difflib
import gzip
import json
import re
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_fsdp.dump import graph_json
from compiled_fsdp.dump.writer import AS_AFTER, Counts
from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import find, starts, value
from compiled_fsdp.ir.meta import get_tag, set_captured
from compiled_fsdp.ir.printer import collectives, printable, show
from compiled_fsdp.ir.sequence import sequence_over
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


class DumpFolderError(ValueError):
    """A folder is no dump, a file of it is missing or damaged, or something is asked for that it
    does not hold.
    """


@dataclass(frozen=True)
class Dumped:
    """A graph after a pass: `00_capture` and so on; `path` is without the ending."""

    path: Path

    @property
    def name(self) -> str:
        """Of the pass."""
        return self.path.name.split("_", 1)[1]

    @property
    def where(self) -> str:
        """Rank, graph and pass, as in the folder."""
        return "/".join(self.path.parts[-3:])

    @cached_property
    def _printed(self) -> tuple[str, str]:
        made_by, _, graph = read(self.path.with_name(f"{self.path.name}.txt")).partition("\n")
        return made_by, graph

    @cached_property
    def source(self) -> Dumped:
        """After the last pass that changed the graph, whose files hold it."""
        same = re.fullmatch(rf"{AS_AFTER}(\d\d_\w+)\n?", self._printed[1])
        if same is None:
            return self
        if same[1] >= self.path.name:
            raise DumpFolderError(f"{self.where}.txt names a pass that is not before it: {same[1]}")
        return Dumped(self.path.with_name(same[1])).source

    @property
    def text(self) -> str:
        """As it was printed, with what made it in the first line."""
        return f"{self._printed[0]}\n{self.source._printed[1]}"

    @property
    def json_path(self) -> Path:
        """The file that holds the graph for programs."""
        return self.path.with_name(f"{self.source.path.name}.json.gz")

    @cached_property
    def _parsed(self) -> tuple[GraphModule, Plan, str]:
        if self.source is not self:
            return self.source._parsed
        path = self.json_path
        try:
            return graph_json.of_text(read(path))
        except graph_json.FormatError as error:
            raise DumpFolderError(
                f"{path} holds no graph that can be read: {printable(str(error))}"
            ) from error

    @property
    def gm(self) -> GraphModule:
        """The graph, for reading."""
        return self._parsed[0]

    @property
    def plan(self) -> Plan:
        """What the passes got."""
        return self._parsed[1]


@dataclass(frozen=True)
class DumpedGraph:
    """A graph on its way through the passes: `001_forward`, say."""

    rank: int
    path: Path
    passes: tuple[Dumped, ...]

    @property
    def name(self) -> str:
        """Number and kind."""
        return self.path.name

    @property
    def is_half(self) -> bool:
        """Whether it is a forward or backward, not a joint graph."""
        return not self.name.endswith("_joint")

    def after(self, name: str | None) -> Dumped:
        """The graph after this pass; the last, if none is named.

        Raises:
            DumpFolderError: there is no such pass.
        """
        found = [entry for entry in self.passes if name in (None, entry.name, entry.path.name)]
        if not found:
            names = [entry.name for entry in self.passes]
            raise DumpFolderError(f"{self.path} holds no graph after {name!r}; it has {names}")
        return found[-1]


@dataclass(frozen=True)
class DumpedRank:
    """What one rank dumped, in the order of compilation."""

    rank: int
    path: Path
    graphs: tuple[DumpedGraph, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """`settings.json`."""
        return read_json(self.path / "settings.json")


def read_folder(folder: Path) -> list[DumpedRank]:
    """Every rank of a dump, by number.

    Raises:
        DumpFolderError: there is no dump.
    """
    if not folder.is_dir():
        raise DumpFolderError(
            f"{folder} is no folder; give one that dumped_to or COMPILED_FSDP_DUMP wrote"
        )
    numbers = {
        path: int(found[1])
        for path in folder.iterdir()
        if (found := re.fullmatch(r"rank(\d+)", path.name))
    }
    ranks = [
        _rank(number, path) for path, number in sorted(numbers.items(), key=lambda entry: entry[1])
    ]
    if not any(rank.graphs for rank in ranks):
        raise DumpFolderError(
            f"{folder} holds no graph (rank0/001_forward/00_capture.txt): compile a sharded model "
            "inside dumped_to, or with COMPILED_FSDP_DUMP"
        )
    return ranks


def _rank(number: int, path: Path) -> DumpedRank:
    graphs = []
    for folder in sorted(p for p in path.iterdir() if re.fullmatch(r"\d+_[a-z]+", p.name)):
        stems = sorted(p.with_suffix("") for p in folder.glob("[0-9][0-9]_*.txt"))
        if stems:
            graphs.append(DumpedGraph(number, folder, tuple(map(Dumped, stems))))
    return DumpedRank(number, path, tuple(graphs))


def read(path: Path) -> str:
    """The text in a file of a dump.

    Raises:
        DumpFolderError: it is missing, or no text.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DumpFolderError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a dump.

    Raises:
        DumpFolderError: it is missing, or something else.
    """
    try:
        found = json.loads(read(path))
    except json.JSONDecodeError as error:
        raise DumpFolderError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise DumpFolderError(
            f"{path} is damaged: it should hold a JSON object, not a {type(found).__name__}"
        )
    return found


# -- comparing


def difference(before: Dumped, after: Dumped) -> str:
    """What communicates, casts and frees in two graphs, and their peaks; "" if that is all the
    same.
    """
    lines = [
        f"  {name}: {old} -> {new}"
        for (name, old), (_, new) in zip(totals(before.gm), totals(after.gm), strict=True)
        if old != new
    ]
    one, two = collectives(before.gm.graph), collectives(after.gm.graph)
    lines += difflib.unified_diff(one, two, before.where, after.where, lineterm="", n=2)
    return "\n".join([f"{before.where} -> {after.where}", *lines]) if lines else ""


def totals(gm: GraphModule) -> list[tuple[str, str]]:
    """How much a graph communicates, and its peak."""
    counts = Counts.of(gm.graph)
    sent = sum(
        value(n).nbytes
        for start in starts(gm.graph)
        for n in start.all_input_nodes
        if "val" in n.meta
    )
    casts = sum(get_tag(node) is not None for node in find(gm.graph, CONVERT))
    return [
        ("all-gathers", str(counts.gathers)),
        ("reductions", str(counts.reductions)),
        ("bytes put into collectives", str(sent)),
        ("casts of parameters and gradients", str(casts)),
        ("frees", str(counts.frees)),
        ("peak above rest", f"{profile(gm.graph).peak} bytes"),
    ]


# -- checking


def violations(ranks: list[DumpedRank]) -> Iterator[str]:
    """What is wrong with the graphs of a dump, each as a text of its own: every invariant after
    every pass, the texts beside the graphs, and that ranks which share a group communicate alike
    over it.
    """
    for rank in ranks:
        for graph in rank.graphs:
            yield from _check_graph(graph)
    yield from _check_agreement(ranks)


def _check_graph(graph: DumpedGraph) -> Iterator[str]:
    from compiled_fsdp.passes.verify import check

    captured = Captured(graph.passes[0].gm.graph) if graph.is_half else None
    is_lowered = False
    for entry in graph.passes:
        if show(entry.gm.graph) != entry.text.partition("\n")[2].rstrip("\n"):
            yield f"{entry.where}: the text is not that of the graph in the .json.gz beside it; one of them was changed"
        is_lowered = is_lowered or entry.name == "lower"
        if captured is None or not is_lowered:
            continue
        set_captured(entry.gm, captured)
        try:
            check(entry.gm, entry.plan, f"{entry.name} in {graph.path}")
        except GraphInvariantError as error:
            yield f"{entry.where}: {error}"
            return


def _check_agreement(ranks: list[DumpedRank]) -> Iterator[str]:
    """Each group's ranks have the same collectives over it, in the same order."""
    seen: dict[tuple[int, ...], tuple[int, list[str]]] = {}
    for rank in ranks:
        for name, members in rank.settings.get("groups", {}).items():
            lines = [
                line
                for g in rank.graphs
                if g.is_half
                for line in sequence_over(g.after(None).gm.graph, name)
            ]
            number, known = seen.setdefault(tuple(members), (rank.rank, lines))
            if known != lines:
                changes = list(
                    difflib.unified_diff(
                        known, lines, f"rank {number}", f"rank {rank.rank}", lineterm="", n=2
                    )
                )
                shown = "\n".join(changes[:40])
                yield f"ranks {number} and {rank.rank} communicate differently over group {printable(repr(name))}:\n{shown}"
