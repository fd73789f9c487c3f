"""A training script predicted for a machine that is not here.

The script runs as one rank of a timed world, its compiled graphs do not (`compiler/unrun.py`). What
is said of a step is what planning predicts of the graphs that it ran, plus the optimizer by the
bytes that it reads and writes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.compiler.unrun import Tally, unrun
from compiled_fsdp.eager.optimizer_steps import watched
from compiled_fsdp.planning.lifetimes import STATE
from compiled_fsdp.planning.plan import forced
from compiled_fsdp.wire.runs import all_runs, told_of_runs

from .found import head, in_memory, speed
from .simulate import as_rank
from .steps import NO_STEP, EnoughError, SimulationError, Steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from compiled_fsdp.dump.graph_record import GraphRecord
    from compiled_fsdp.wire.world import Carried, World

    from .found import Memory
    from .machines import Machine

LAST = 2  # the step that is predicted: the first makes the optimizer's states
NOT_MODELLED = (
    "kernels that share the device with collectives, links and network at the same time (planning "
    "knows one wire), gaps between kernels, the host, data loading, what is not in "
    "a compiled graph, ranks that are late, what an allocator loses"
)


@dataclass
class Predicted:
    """What is predicted of a step, in seconds and bytes; fields as in `Found`.

    optimizer_s: of that, for the optimizer; forward_s, backward_s: for graphs. 0 in the one graph
        of a whole step.
    floor_s: if nothing were exposed.
    """

    rank: int
    world: int
    ranks_per_node: int
    wires: list[Any]
    machine: Machine
    efficiency: float
    step_s: float
    exposed_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    wire_s: float
    to_host_s: float
    from_host_s: float
    sent_bytes: float
    flops: float
    peak_flops: float
    memory: Memory
    peak: int
    tokens: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def floor_s(self) -> float:
        """The larger of computing alone and the wires alone."""
        return max(self.step_s - self.exposed_s, self.wire_s)

    @property
    def used(self) -> float:
        """The share of the machine's peak."""
        return self.flops / self.step_s / self.peak_flops

    def __str__(self) -> str:
        machine = self.machine
        fits = "fits" if self.peak <= machine.memory_bytes else "DOES NOT FIT"
        lines = [
            f"PREDICTED, nothing was measured: {machine.name}, at {self.efficiency:g} of its "
            "published peaks",
            head(self.rank, self.world, self.ranks_per_node, self.wires),
            f"step      {self.step_s * 1e3:9.2f} ms  {self._parts()}",
            f"exposed   {self.exposed_s * 1e3:9.2f} ms  {self.exposed_s / self.step_s:.0%} of "
            "the step",
            f"floor     {self.floor_s * 1e3:9.2f} ms  the larger of computing alone and all wires",
            f"wires     {self.wire_s * 1e3:9.2f} ms  {self.sent_bytes / 1e6:.2f} MB sent",
            *self._copies(),
            *speed(self.tokens, self.step_s, self.flops, self.peak_flops),
            *in_memory(self.memory),
            f"          {self.peak / 1e9:.3f} GB at the peak, of "
            f"{machine.memory_bytes / 1e9:g} GB: {fits}",
            *(f"note: {note}" for note in self.notes),
            f"numbers from: {machine.source}",
            f"not modelled: {NOT_MODELLED}",
        ]
        return "\n".join(lines)

    def _parts(self) -> str:
        if not self.backward_s:
            return "one graph, the optimizer's updates in it"
        forward, backward = self.forward_s * 1e3, self.backward_s * 1e3
        return (
            f"forward {forward:.2f}, backward {backward:.2f}, "
            f"optimizer {self.optimizer_s * 1e3:.2f}"
        )

    def _copies(self) -> list[str]:
        there, back = self.to_host_s * 1e3, self.from_host_s * 1e3
        beside = f"{there:9.2f} ms  copies to it, {back:.2f} from it, beside what is computed"
        return [f"host      {beside}"] if there or back else []

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(
            {"predicted": True, **asdict(self), "floor_s": self.floor_s, "used": self.used},
            indent=1,
        )


def predicted(
    run: Callable[[], None], world: World, machine: Machine, options: argparse.Namespace
) -> Predicted:
    """Call `run` as that rank, until its second step is over.

    Raises:
        SimulationError: it has made no two steps, or has no compiled graph of ours.
    """
    steps, counts = Steps(world, skip=0), list[dict[str, int]]()
    tallies: list[Tally] = []

    def after(optimizer: torch.optim.Optimizer) -> None:
        before = len(steps.ends)
        steps(optimizer)
        if len(steps.ends) == before:
            return
        counts.append({r.record: r.count for r in all_runs() if r.last > steps.began})
        tallies.append(replace(tally))
        if len(counts) == LAST:
            raise EnoughError

    costs = machine.costs(options.efficiency)
    told = told_of_runs(steps.before_graph)
    with unrun() as tally, forced(costs=costs), as_rank(world), watched(after), told:
        try:
            run()
        except EnoughError:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        return _summed(steps, counts, tallies, world, machine, options)


def _summed(
    steps: Steps,
    counts: list[dict[str, int]],
    tallies: list[Tally],
    world: World,
    machine: Machine,
    options: argparse.Namespace,
) -> Predicted:
    """What the second step takes.

    counts: how often each graph had run at the end of each step.
    tallies: what graphs had done until then.
    """
    ran = _ran(steps, counts)
    whole = [record for record, _ in ran if record.kind == "step"]

    def total(what: str, kind: str = "") -> float:
        found = [(r.predicted, n) for r, n in ran if kind in ("", r.kind)]
        return sum(p[what] * n for p, n in found if p is not None)

    # graphs with nothing of ours, which have no record
    other = {name: value - getattr(tallies[0], name) for name, value in asdict(tallies[1]).items()}
    memory = steps.memory()
    largest = max((record for record, _ in ran), key=lambda r: r.peak)
    memory.by_kind = largest.peak_kinds
    in_graph, on_host = _states(largest)
    params, states = memory.parameters - memory.hosted, memory.optimizer - memory.hosted_states
    # reads parameters, states and gradients, and writes the first two
    moved = 2 * (params + states) + params
    # in the graph of a whole step, it is a part of that
    optimizer_s = 0.0 if whole else moved / (machine.memory_bandwidth * options.efficiency)
    return Predicted(
        rank=world.rank,
        world=world.size,
        ranks_per_node=world.ranks_per_node,
        wires=[world.network] if world.ranks_per_node == 1 else [world.link, world.network],
        machine=machine,
        efficiency=options.efficiency,
        step_s=total("total") + other["total"] + optimizer_s,
        exposed_s=total("exposed") + other["exposed"],
        forward_s=total("total", "forward"),
        backward_s=total("total", "backward"),
        optimizer_s=optimizer_s,
        wire_s=total("wire") + other["wire"],
        to_host_s=total("to_host"),
        from_host_s=total("from_host"),
        sent_bytes=total("sent") + other["sent"],
        flops=tallies[1].flops - tallies[0].flops,
        peak_flops=options.peak_flops or machine.peak_flops,
        memory=memory,
        peak=params
        + memory.frozen
        - memory.hosted_frozen
        + max(states - in_graph, 0)
        + largest.peak,
        tokens=options.tokens,
        notes=[
            *_on_host(on_host),
            *_offloaded(memory),
            *_without_backward(ran),
            *_of_others(other["graphs"], other["total"]),
            *_outside(world.carried[steps.ends[0][1] : steps.ends[1][1]]),
        ],
    )


def _ran(steps: Steps, counts: list[dict[str, int]]) -> list[tuple[GraphRecord, int]]:
    """The graphs that ran in the second step, and how often.

    Raises:
        SimulationError: there was none that trains, or no such step.
    """
    if not counts:
        raise SimulationError(NO_STEP)
    if len(counts) < LAST:
        raise SimulationError(
            f"the script ended after {len(counts)} steps of its optimizer, and the second is the "
            "one that is predicted: let it run longer"
        )
    ran = [
        (steps.record_of(record), count - counts[0].get(record, 0))
        for record, count in counts[1].items()
    ]
    ran = [(record, count) for record, count in ran if count > 0 and record.predicted]
    if not any(record.kind in ("step", "backward") for record, _ in ran):
        raise SimulationError(
            "--machine predicts compiled graphs of ours, and the script trains in none: compile "
            "the sharded model (torch.compile), with --replace if torch's FSDP shards it"
        )
    return ran


def _states(record: GraphRecord) -> tuple[int, int]:
    """Bytes of the optimizer state that a graph's own peak counts (`Plan.optimizer_state`), which
    is on the device or comes there, and of what of it rests on the host.
    """
    choices = [choice for choice in record.choices if choice["what"] == "state"]
    if not choices:  # all stays on the device, if it counts any
        return record.peak_kinds.get(STATE, 0), 0
    on_host = sum(choice["num_bytes"] for choice in choices if not choice["is_kept"])
    return sum(choice["num_bytes"] for choice in choices), on_host


def _on_host(num_bytes: int) -> list[str]:
    if not num_bytes:
        return []
    return [
        f"of the states of optimizers, {num_bytes / 1e6:.2f} MB rest on the host between updates; "
        "the peak counts what is on the device"
    ]


def _offloaded(memory: Memory) -> list[str]:
    """What `CPUOffloadPolicy` does to a step, where a CPU says what it computes."""
    shards = memory.hosted + memory.hosted_frozen
    if not shards:
        return []
    return [
        f"shards of {shards / 1e6:.2f} MB, and {memory.hosted_states / 1e6:.2f} MB of "
        "states of optimizers, rest on the host (CPUOffloadPolicy): the peak leaves them out. "
        "Their copies to the device, those of gradients to the host, and the host's optimizer are "
        "not predicted"
    ]


def _of_others(number: int, seconds: float) -> list[str]:
    """What graphs without sharded parameters add."""
    if not number:
        return []
    return [
        f"{seconds * 1e3:.2f} ms of the step are {number} compiled graphs without sharded "
        "parameters, which count neither as forward nor as backward, and not in the peak"
    ]


def _without_backward(ran: list[tuple[GraphRecord, int]]) -> list[str]:
    """Forwards that no backward has followed, as of an evaluation between two steps."""
    forwards, backwards = (
        sum(n for record, n in ran if record.kind == kind) for kind in ("forward", "backward")
    )
    if forwards <= backwards:
        return []
    return [
        f"{forwards - backwards} of {forwards} forward graphs of the step ran without a backward, "
        "such as those of an evaluation: the step counts them, their wires and operations"
    ]


def _outside(carried: list[Carried]) -> list[str]:
    """What collectives of a step were not in graphs: those in graphs were not run."""
    if not carried:
        return []
    seconds, kinds = sum(each.seconds for each in carried), {each.kind for each in carried}
    return [
        f"{len(carried)} collectives of the step ({', '.join(sorted(kinds))}; "
        f"{seconds * 1e3:.2f} ms on the wire) are outside compiled graphs, and the step does not "
        "count them, nor what is computed there"
    ]
