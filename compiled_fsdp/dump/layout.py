"""The layout of a dump: the names of its folders and files, and the fields of those that are JSON,
each said once.

    rank0/
      settings.json, explain.json, measured.json    `RankSettings`, `explain`'s, `Measured`
      003_backward/
        02_bucket_all_gather.txt, .diff, .json.gz   after each pass: `passes_of`
        timeline.json.gz, memory.json.gz            of the finished graph: `Timeline`, `Memory`
        record.json                                 what `explain` and profiles know of it
        timeline.txt, memory.txt                    both for people
        units.txt                                   graphs of units that are traced once
        regions.txt                                 what is compiled once, and the graph that
                                                    calls it

`writer.py` writes them, `inspection/dump_folder.py` reads them and checks their fields by these
types; nothing else opens a file of a dump. `graph_json.py` has the form of the `.json.gz`,
`graph_record.py` that of `record.json`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 3  # of all JSON here; the graphs' own is `graph_json.FORMAT`

SETTINGS, EXPLANATION, MEASURED = "settings.json", "explain.json", "measured.json"
TIMELINE, MEMORY, RECORD = "timeline.json.gz", "memory.json.gz", "record.json"
TIMELINE_TEXT, MEMORY_TEXT = "timeline.txt", "memory.txt"
REGIONS_TEXT, UNITS_TEXT = "regions.txt", "units.txt"
TEXT, DIFF, GRAPH = ".txt", ".diff", ".json.gz"
AS_AFTER = "# as after "  # in the place of a graph that a pass has not changed: its files' name
BUT_FOR = ", but for:\n"  # of a large graph, what a pass has changed since then, as a diff
JOINT = "joint"  # the kind of a graph that is not split yet

EXECUTORS = {"plain": False, "fused": True}  # and whether it fuses kernels


def rank_folder(root: Path, rank: int) -> Path:
    """The folder of a rank."""
    return root / f"rank{rank}"


def graph_name(number: int, kind: str) -> str:
    """The name of a graph's folder; numbers count up in the order of compilation."""
    return f"{number:03d}_{kind}"


def pass_stem(number: int, name: str) -> str:
    """The name of a pass' files, without the ending."""
    return f"{number:02d}_{name}"


def ranks_of(root: Path) -> list[tuple[int, Path]]:
    """Numbers and folders of all ranks, in order."""
    found = ((re.fullmatch(r"rank(\d+)", path.name), path) for path in root.iterdir())
    return sorted((int(name[1]), path) for name, path in found if name)


def graphs_of(rank: Path) -> list[Path]:
    """The folders of a rank's graphs, in order."""
    return sorted(path for path in rank.iterdir() if re.fullmatch(r"\d+_[a-z]+", path.name))


def passes_of(graph: Path) -> list[Path]:
    """The files of a graph's passes, in order, each without its ending."""
    return sorted(path.with_suffix("") for path in graph.glob(f"[0-9][0-9]_*{TEXT}"))


def name_of(path: Path) -> str:
    """The name of a pass, or the kind of a graph: what follows the number."""
    return path.name.partition("_")[2]


# -- settings


class Versions(TypedDict):
    """The versions of what compiled the graphs."""

    torch: str
    compiled_fsdp: str
    python: str


class Settings(TypedDict):
    """The conditions that graphs were made under; the costs of the plan are in each timeline."""

    versions: Versions
    rank: int
    world_size: int
    backend: str
    plan: dict[str, Any]


class RankSettings(Settings):
    """The same for all graphs of a rank, with the groups that they communicate over: names, and
    ranks.
    """

    groups: dict[str, list[int]]


class GraphSettings(Settings):
    """The same when one graph was made, with the environment variables that matter."""

    environment: dict[str, str]


# -- the finished graph: what it is expected to take


class Head(TypedDict):
    """The head of a record. kind: "forward", "backward" or "step";
    executor: which of `EXECUTORS` runs.
    """

    format: int
    kind: str
    executor: str


class Parameter(TypedDict):
    """A parameter that a collective carries, whole."""

    name: str
    unit: str
    shape: list[int]
    bytes: int


class Collective(TypedDict):
    """One that a graph starts. bytes: of the full tensors; sent: what this rank sends of them;
    both of what is expected, where only the data decides; row: of a row of what it sends; 0 where
    only the data decides. kind: "gather", "reduce", "all_reduce",
    or "exchange" for an all-to-all of the user's.
    """

    node: str
    op: str
    kind: str
    is_ours: bool
    units: list[str]
    parameters: list[Parameter]
    bytes: int
    sent: int
    row: int
    dtype: str
    group: str
    module: str


class Times(TypedDict):
    """The life of a collective, in seconds from the graph's beginning; issuing: what starting it
    costs the training thread.
    """

    issued: float
    issuing: float
    begin: float
    end: float
    awaited: float | None
    exposed: float


# Begin, end, node, module.
Interval = tuple[float, float, str, str]


class Run(TypedDict):
    """A simulated run: `times[i]` is of the i-th collective, `compute` the intervals in which the
    training thread computes, and `nodes[i]` when the i-th node of the graph begins.
    """

    total: float
    times: list[Times]
    compute: list[Interval]
    nodes: list[float]


class Costs(TypedDict):
    """The costs that the graph was planned with, as `planning.costs.Costs`; is_assumed: nobody has
    measured them.
    """

    flops: float
    bandwidth: float
    overhead: float
    links: dict[str, dict[str, float]]
    is_fused: bool
    kernels: list[tuple[str, float]]
    is_assumed: bool


class Timeline(Head):
    """The collectives of a graph, and when each is expected to start, travel and be awaited.

    groups: the ranks of each.
    waits: for each wait in the graph, the number of its collective; -1 for one of the user's that
        is not in the list.
    """

    costs: Costs
    settings: GraphSettings
    groups: dict[str, list[int]]
    collectives: list[Collective]
    waits: list[int]
    plain: Run
    fused: Run


# Kind, owner, bytes, first and last node, and (start, wait) of the collectives on it.
Stored = tuple[str, str, int, int, int, list[tuple[int, int]]]


class Profile(TypedDict):
    """The memory of a graph above rest, node by node; `kinds` add up to `during`."""

    peak: int
    where: int
    at_rest: int
    during: list[int]
    kinds: dict[str, list[int]]
    storages: list[Stored]


class Memory(Head):
    """The memory of a graph. after: the folder of the forward that a backward goes on from."""

    after: str | None
    nodes: list[str]
    plain: Profile
    fused: Profile


# -- what a profile has shown


class Routed(TypedDict):
    """The rows that one of a graph's collectives, by its number, brought from each rank of its
    group, and took there: tokens, where it is for experts.

    bytes: of the rows that left this rank.
    to, of: of a dispatch whose counts were told (`Plan(record_routing=True)`), tokens by rank and,
        in it, by expert: for the experts there, and from there for the experts here; else empty.
    """

    collective: int
    received: list[int]
    sent: list[int]
    bytes: int
    to: list[list[int]]
    of: list[list[int]]


class MeasuredRun(TypedDict):
    """A run of a graph in a profile, in the form of a simulated one.

    routed: empty for a profile without arguments of ops (`record_shapes=True`).
    of: a fingerprint of the timeline that it was laid over.
    """

    total: float
    times: list[Times]
    compute: list[Interval]
    has_arrivals: bool
    routed: list[Routed]
    of: str


class MeasuredStep(TypedDict):
    """A training step in a profile, in seconds; `largest` is the longest wait, and its name."""

    began: float
    total: float
    waiting: float
    starting: float
    compiling: float
    largest: tuple[str, float] | None
    parts: list[Interval]
    waits: list[tuple[float, float, str]]
    starts: list[tuple[float, float, str]]
    notes: list[str]


class Measured(TypedDict):
    """A profile that `add_profile` has laid over a rank's graphs, by the names of their folders."""

    format: int
    source: str
    graphs: dict[str, MeasuredRun]
    step: MeasuredStep
