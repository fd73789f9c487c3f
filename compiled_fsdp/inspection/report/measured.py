"""A profiled step laid over the predicted one: which ranges of a profile are which collectives of
which dumped graph, and what else the step consists of.

A graph of ours begins with `fsdp::agree`, in which a profile has the digest of the graph's record
(`ranges.mark`), as the dump has; from there on, its collectives start, and are awaited, in the
order of the graph, so that the n-th start in it is the graph's n-th. Of several runs of a graph the
last one of the step counts. A profile without digests, of an older version, is matched by the kinds
of collectives, and by which backward follows which forward.

A profile of the CPU does not say when a message arrives. Events named `compiled_fsdp::carried` do,
if whoever profiled added them: one for each exchange of ours over gloo, in the order of their
starts. Without, a collective counts as under way until its wait is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_fsdp.dump import writer
from compiled_fsdp.dump.layout import FORMAT
from compiled_fsdp.inspection.check import DumpError
from compiled_fsdp.inspection.dump_folder import DumpedGraph, DumpedRank, read_finished
from compiled_fsdp.inspection.profiles import (
    AUTOGRAD,
    OPTIMIZER,
    WAIT,
    Event,
    Profile,
    choose_step,
    of_profile,
    outermost,
    read_profile,
    seconds_in,
)
from compiled_fsdp.inspection.routing import routed
from compiled_fsdp.wire.ranges import GRAPH

from .device import Device
from .kernels import computing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.profiler import profile

    from compiled_fsdp.dump.layout import Collective, Measured, MeasuredRun, Times

AGREE, CARRIED = "fsdp::agree", "compiled_fsdp::carried"
EXCHANGES = ("fsdp::all_gather", "fsdp::all_to_all")
# Torch's ranges that enclose a run of a compiled graph.
AROUND = ("## Call CompiledFxGraph", "CompiledFunction", "Torch-Compiled Region", AUTOGRAD)
PARTS = {
    OPTIMIZER: "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(DataLoader)#": "data",
}
NORMS = ("aten::_foreach_norm", "aten::linalg_vector_norm")
KINDS = {
    "gather": "all-gather",
    "reduce": "reduction",
    "all_reduce": "all-reduce",
    "exchange": "all-to-all",
}
ELSEWHERE = "a collective outside the graphs"
ON_CPU = "cpu"  # a part of the step whose kernels are to be looked up, on a device


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a graph: what starts collectives and what waits for them, in order, and the end of
    the range that encloses it.

    digest: of the graph's record; "" if the profile does not say.
    ops: outermost ops of its thread that are no communication.
    """

    begin: float
    end: float | None
    starts: list[Event]
    waits: list[Event]
    carried: list[Event]
    digest: str
    thread: object
    ops: list[Event]

    @property
    def until(self) -> float:
        """When the thread is done with it, as far as the profile says."""
        return max([self.end or self.begin, *(e.end for e in (*self.starts, *self.waits))])

    def is_of(self, graph: DumpedGraph) -> bool:
        """Whether it is called like the graph, as far as both say, and starts as many collectives,
        or more, and those of the graph first.
        """
        kinds = [c["kind"] for c in graph.timeline["collectives"]]
        is_known = bool(self.digest and graph.digest)
        if is_known and self.digest != graph.digest:
            return False
        enough = len(self.waits) >= len(graph.timeline["waits"])
        alike = [e.kind for e in self.starts[: len(kinds)]] == kinds
        return (is_known or bool(kinds)) and enough and alike


@dataclass(frozen=True, slots=True)
class Laid:
    """A run, the graph that it is of, its times in the form of a predicted run, and when that
    begins: on a device, with its first kernel.
    """

    run: Run
    graph: DumpedGraph
    times: MeasuredRun
    begin: float

    @property
    def span(self) -> Event:
        """From its beginning to its end."""
        return Event(self.graph.name, self.begin, self.begin + self.times["total"], None)


def add_profile(dump_dir: Path, profile: profile | Path, rank: int = 0) -> Path:
    """Lay a profile over the graphs that `rank` dumped: what `write_report` and `write_trace` show
    as measured.

    profile: a finished `torch.profiler.profile`, or a Chrome trace that it exported (.json or
        .json.gz), of at least one step.

    Returns:
        The file that was written, `measured.json` in the rank's folder.

    Raises:
        DumpError: the profile is garbled, or no dumped graph runs in it.
    """
    ranks = {found.rank: found for found in read_finished(Path(dump_dir))}
    if rank not in ranks:
        raise DumpError(
            f"add_profile: rank is {rank}; {dump_dir} has dumps of ranks {list(ranks)}: give one "
            "of them"
        )
    if isinstance(profile, str | Path):
        source, found = Path(profile).name, read_profile(Path(profile))
    else:
        source, found = "a profile of this process", of_profile(profile)
    measured = measure(ranks[rank], found, source)
    if not measured["graphs"]:
        raise DumpError(
            f"add_profile: {source} has {sum(e.name == AGREE for e in found.events)} runs of "
            f"graphs ({AGREE}), none of those that were dumped: "
            f"{', '.join(g.name for g in ranks[rank].finished)}. Profile a step of the run that "
            f"wrote the dump, on rank {rank}"
        )
    return writer.write_measured(ranks[rank].path, measured)


def measure(rank: DumpedRank, profile: Profile, source: str) -> Measured:
    """Measured times of every graph that runs in the profile, by its folder's name, and the step
    that they are of; `source` names the profile.
    """
    device = Device(profile.kernels)
    laid = match(rank.finished, find_runs(profile.events), device)
    step = choose_step(profile)
    inside = [e for e in laid if step.span.begin <= e.run.begin < step.span.end]
    span = device.step(step.span) if device else step.span
    graphs = {entry.graph.name: entry.times for entry in (*laid, *inside)}
    found = _exposed(device, span, inside) if device else _waits(profile, span, inside)
    waits = sorted(found, key=lambda wait: wait.begin)
    starts = [e for e in outermost(e for e in profile.events if e.kind) if e.is_in(step.span)]
    parts = [(e, kind) for e, kind in _parts(profile, step.span, inside)]
    if device:  # who starts collectives is the CPU, ahead of the device
        starts = []
        parts = [(device.shown(e) if e.thread else e, kind) for e, kind in parts]
    largest = max(waits, key=lambda wait: wait.seconds, default=None)
    return {
        "format": FORMAT,
        "source": source,
        "graphs": graphs,
        "step": {
            "began": profile.base + span.begin,
            "total": span.seconds,
            "waiting": seconds_in(span, waits),
            "starting": seconds_in(span, starts),
            "compiling": seconds_in(step.span, profile.compiles),
            "largest": None if largest is None else (largest.name, largest.seconds),
            "parts": [(*_inside(e, span), kind, e.name) for e, kind in parts if e.seconds],
            "waits": [(*_inside(e, span), e.name) for e in waits],
            "starts": [(*_inside(e, span), e.name) for e in starts],
            "notes": list(dict.fromkeys([*step.notes, *_halves(inside)])),
        },
    }


def _inside(event: Event, span: Event) -> tuple[float, float]:
    begin, end = max(event.begin, span.begin), min(event.end, span.end)
    return begin - span.begin, end - span.begin


def _halves(inside: list[Laid]) -> list[str]:
    """Says of backwards in the step whose forward is not that the profile began too late."""
    names = {entry.graph.name for entry in inside}
    return [
        f"the profile covers part of a step: it has {entry.graph.name}, and not the forward before "
        "it"
        for entry in inside
        if entry.graph.memory["after"] not in (None, *names)
    ]


def _parts(profile: Profile, span: Event, inside: list[Laid]) -> Iterator[tuple[Event, str]]:
    """Yields what a step consists of, and of what kind it is; what comes later lies on top."""
    backward = [e for e in profile.events if e.name.startswith(AUTOGRAD) and e.is_in(span)]
    for event in _joined(outermost(backward)):
        yield Event("backward, autograd", event.begin, event.end, ON_CPU), "autograd"
    steps = [e for e in profile.events if e.name.startswith(OPTIMIZER) and e.is_in(span)]
    if backward and steps:
        between = Event("", max(e.end for e in backward), steps[0].begin, None)
        has_norms = any(e.name in NORMS and e.is_in(between) for e in profile.events)
        name = "clipping: norms of gradients" if has_norms else "between backward and step"
        yield Event(name, between.begin, between.end, ON_CPU), "clip" if has_norms else "other"
    for entry in inside:
        yield entry.span, entry.graph.timeline["kind"]
    for event in profile.events:
        kind = next((k for prefix, k in PARTS.items() if event.name.startswith(prefix)), None)
        if kind is not None and event.is_in(span):
            yield Event(event.name.partition("#")[2], event.begin, event.end, ON_CPU), kind
    for event in profile.compiles:
        if seconds_in(span, [event]):
            yield Event("compilation", event.begin, event.end, ON_CPU), "compile"


def _joined(events: list[Event], gap: float = 1e-3) -> list[Event]:
    """Neighbours with no more than a millisecond between them as one."""
    found: list[Event] = []
    for event in events:
        if found and event.begin - found[-1].end <= gap:
            last = found.pop()
            event = Event(last.name, last.begin, max(last.end, event.end), None)
        found.append(event)
    return found


def _waits(profile: Profile, span: Event, inside: list[Laid]) -> Iterator[Event]:
    """Yields what the training thread stands still for in a step, by the name of the collective."""
    known: set[Event] = set()
    for entry in inside:
        collectives = entry.graph.timeline["collectives"]
        known.update(entry.run.waits[: len(entry.graph.timeline["waits"])])
        for collective, when in zip(collectives, entry.times["times"], strict=True):
            if when["exposed"] and when["awaited"] is not None:
                begin = entry.run.begin + when["awaited"]
                yield Event(_name(collective), begin, begin + when["exposed"], None)
    around = [e for e in profile.events if e.name.startswith("compiled_fsdp::wait ")]
    for wait in outermost(e for e in profile.events if e.name == WAIT):
        if wait not in known and wait.is_in(span):
            named = next((e.name for e in around if wait.is_in(e)), None)
            name = ELSEWHERE if named is None else named.removeprefix("compiled_fsdp::wait ")
            yield Event(name, wait.begin, wait.end, None)


def _name(collective: Collective) -> str:
    owner = ", ".join(collective["units"]) or collective["module"] or "the model's own"
    return f"{KINDS.get(collective['kind'], collective['kind'])} of {owner}"


def _exposed(device: Device, span: Event, inside: list[Laid]) -> Iterator[Event]:
    """Yields when a device computes nothing because a collective is under way, by its name."""
    known = {
        kernel: _name(collective)
        for entry in inside
        for collective, start in zip(
            entry.graph.timeline["collectives"], entry.run.starts, strict=False
        )
        for kernel in device.communication_in(start)
    }
    for kernel in device.kernels:
        exposed = device.exposed(kernel)
        if kernel.is_communication and exposed and kernel.event.is_in(span):
            name = known.get(kernel, ELSEWHERE)
            yield Event(name, kernel.event.end - exposed, kernel.event.end, None)


def match(graphs: list[DumpedGraph], runs: list[Run], device: Device | None = None) -> list[Laid]:
    """The runs that are of a dumped graph, in order.

    Several graphs may be alike, as when a forward was compiled again for another backward: then a
    forward is that whose backward follows, and a backward that of the forward before it.
    """
    possible = [[graph for graph in graphs if run.is_of(graph)] for run in runs]
    found: list[Laid] = []
    before = ""
    for run, mine, following in zip(runs, possible, [*possible[1:], []], strict=True):
        if not mine:
            continue
        forwards = {graph.memory["after"] for graph in following}
        own = {g.memory["after"] for g in graphs}
        ranked = sorted(
            mine,
            key=lambda g: (
                g.memory["after"] == before if before else False,
                g.name in forwards,
                g.name not in own,
            ),
        )
        graph = ranked[-1]
        before = graph.name
        if device:
            begin, measured = device.times(graph, run.begin, run.until, run.thread, run.starts)
        else:
            begin, measured = run.begin, times(graph, run)
        found.append(Laid(run, graph, measured, begin))
    return found


def find_runs(events: list[Event]) -> list[Run]:
    """Runs of graphs, in order."""
    carried = iter([e for e in events if e.name == CARRIED])
    arrivals = {
        id(e): c
        for e, c in zip(outermost(e for e in events if e.name in EXCHANGES), carried, strict=False)
    }
    marks = [e for e in events if e.name == AGREE]
    ends = [e for e in events if e.name.startswith(AROUND)]
    digests = [e for e in events if e.name.startswith(GRAPH)]
    comm = outermost(e for e in events if e.kind or e.name == WAIT)
    ops = outermost(e for e in events if e.name.startswith("aten::"))
    runs = []
    for mark in marks:
        later = [m.begin for m in marks if m.thread == mark.thread and m.begin > mark.begin]
        until = min(later, default=float("inf"))
        inside = [e for e in comm if e.thread == mark.thread and mark.end <= e.begin < until]
        starts = [e for e in inside if e.kind]
        around = [
            e.end
            for e in ends
            if e.thread == mark.thread and e.begin <= mark.begin and mark.end < e.end <= until
        ]
        name = next((e.name for e in digests if e.is_in(mark)), GRAPH)
        runs.append(
            Run(
                mark.begin,
                max(around, default=None),
                starts,
                [e for e in inside if not e.kind],
                [arrivals.get(id(e), e) for e in starts],
                name.removeprefix(GRAPH),
                mark.thread,
                [e for e in ops if e.thread == mark.thread and mark.end <= e.begin < until],
            )
        )
    return runs


def times(graph: DumpedGraph, run: Run) -> MeasuredRun:
    """A run of a graph in the form of a predicted one: seconds from its beginning; what is not
    awaited in it has no wait.

    issuing: how long the thread was busy with starting a collective.
    exposed: how long it stood in the wait, if the message was not there before; a wait for one that
        was there hides it.
    """
    awaited = list(zip(graph.timeline["waits"], run.waits, strict=False))
    # A user may await his own again.
    waits = {index: wait for index, wait in reversed(awaited) if index >= 0}
    number = len(graph.timeline["collectives"])
    is_ours = [c["is_ours"] for c in graph.timeline["collectives"]]
    carried = [c.name == CARRIED for c in run.carried[:number]]
    has_arrivals = all(c for c, ours in zip(carried, is_ours, strict=True) if ours)
    found: list[Times] = []
    busy: list[Event] = []
    for index, start in enumerate(run.starts[:number]):
        wait, arrival = waits.get(index), run.carried[index]
        is_known = has_arrivals and carried[index]
        end = arrival.end if is_known else wait.end if wait else start.end
        is_exposed = wait is not None and end > wait.begin
        busy += [start, wait] if wait is not None and is_exposed else [start]
        found.append(
            {
                "issued": start.begin - run.begin,
                "issuing": start.end - start.begin,
                "begin": start.begin - run.begin,
                "end": max(end, start.end) - run.begin,
                "awaited": None if wait is None else wait.begin - run.begin,
                "exposed": wait.end - wait.begin if wait and is_exposed else 0.0,
            }
        )
    last = max((event.end for event in (*busy, *run.waits[: len(awaited)])), default=run.begin)
    total = max(last, run.end or last) - run.begin
    return {
        "total": total,
        "times": found,
        "compute": computing(_between(busy, run.begin, total), run.ops, run.begin, graph),
        "has_arrivals": has_arrivals,
        "routed": routed(run.starts, graph),
        "of": graph.fingerprint,
    }


def _between(busy: list[Event], begin: float, total: float) -> list[tuple[float, float]]:
    """Returns when the training thread neither starts a collective nor waits for one."""
    found, reached = [], 0.0
    for event in sorted(busy, key=lambda event: event.begin):
        if event.begin - begin > reached:
            found.append((reached, event.begin - begin))
        reached = max(reached, event.end - begin)
    return [*found, (reached, total)] if total > reached else found
