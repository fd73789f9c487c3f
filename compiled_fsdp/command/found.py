"""What a simulation has shown, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiled_fsdp.wire.world import Wire

LATE = 0.02  # share of a step that is said


@dataclass
class Kind:
    """Collectives of a kind over a wire, per step: how many, what this rank sends, how long they
    occupy the wire, and how long somebody waited.
    """

    kind: str
    wire: str
    count: float
    sent_bytes: float
    wire_s: float
    exposed_s: float


@dataclass
class Memory:
    """Bytes of tensors on this rank; None where nobody counted.

    parameters, optimizer, frozen: at rest, shards and the states of optimizers, and shards that no
        optimizer has stepped.
    hosted, hosted_frozen, hosted_states: of parameters, frozen and optimizer, what
        `CPUOffloadPolicy` has on the host.
    peak: of a step above that, gradients included, where the CPU computes.
    device_peak, device_reserved: that an accelerator's allocator had handed out, and had taken from
        the device, at most in the timed steps, with all that is at rest.
    by_kind: the largest peak that is predicted for a graph of ours, by what it consists of.
    """

    parameters: int
    optimizer: int
    frozen: int = 0
    hosted: int = 0
    hosted_frozen: int = 0
    hosted_states: int = 0
    peak: int | None = None
    device_peak: int | None = None
    device_reserved: int | None = None
    by_kind: dict[str, int] = field(default_factory=dict)


@dataclass
class Found:
    """What a simulation has shown of the timed steps: medians in seconds, and means by kind.

    exposed_s: that the script waited for collectives.
    floor_s: what is left if no collective is waited for, or what the busiest wire needs, whichever
        is larger.
    copying_s: of each step, that this process took to deliver what a network would.
    late_s: likewise, that the system woke it too late.
    by_future: collectives of a step whose future somebody took; what they were waited for counts as
        computing.
    flops: of one step of this rank, recomputation included; None where nobody counted.
    peak_flops: operations a second that the device could do, if somebody said so.
    tokens: of one step of all ranks together, if somebody said so.
    notes: on what is not as it should be.
    was_ended: the script would have gone on.
    """

    rank: int
    world: int
    ranks_per_node: int
    wires: list[Wire]
    num_skipped: int
    num_steps: int
    step_s: float
    fastest_s: float
    slowest_s: float
    exposed_s: float
    floor_s: float
    copying_s: float = 0.0
    late_s: float = 0.0
    by_future: float = 0.0
    kinds: list[Kind] = field(default_factory=list)
    memory: Memory | None = None
    flops: float | None = None
    peak_flops: float | None = None
    tokens: float | None = None
    notes: list[str] = field(default_factory=list)
    was_ended: bool = False

    @property
    def used(self) -> float | None:
        """The share of `peak_flops` that a step computes with; more than MFU where it computes
        something again.
        """
        if not self.flops or not self.peak_flops:
            return None
        return self.flops / self.step_s / self.peak_flops

    def __str__(self) -> str:
        lines = [
            head(self.rank, self.world, self.ranks_per_node, self.wires),
            f"{self.num_steps} steps timed, the first {self.num_skipped} left out"
            + ("; then the script was ended (--steps)" if self.was_ended else ""),
            f"step      {self.step_s * 1e3:9.2f} ms  median; {self.fastest_s * 1e3:.2f} to "
            f"{self.slowest_s * 1e3:.2f}",
            f"exposed   {self.exposed_s * 1e3:9.2f} ms  {self.exposed_s / self.step_s:.0%} of "
            "the step",
            f"floor     {self.floor_s * 1e3:9.2f} ms  the larger of computing alone and the "
            "busiest wire",
            f"copying   {self.copying_s * 1e3:9.2f} ms  of the step, to deliver what a "
            "network would",
            *speed(self.tokens, self.step_s, self.flops, self.peak_flops),
            *([] if self.memory is None else in_memory(self.memory)),
            *self._doubts(),
            "",
            f"{'per step':<16}{'wire':<9}{'number':>7}{'MB sent':>10}{'wire ms':>10}"
            f"{'exposed ms':>12}",
        ]
        lines += [
            f"{kind.kind:<16}{kind.wire:<9}{kind.count:>7.1f}{kind.sent_bytes / 1e6:>10.2f}"
            f"{kind.wire_s * 1e3:>10.2f}{kind.exposed_s * 1e3:>12.2f}"
            for kind in self.kinds
        ]
        return "\n".join(lines)

    def _doubts(self) -> list[str]:
        found = [f"note: {note}" for note in self.notes]
        if self.late_s > LATE * self.step_s:
            found.append(
                f"note: {self.late_s * 1e3:.2f} ms of a step this process was woken too late after "
                "a wait: the machine is busy, and steps are that much too long"
            )
        if self.by_future:
            found.append(
                f"note: {self.by_future:g} collectives of a step were awaited by their future, as "
                "DistributedDataParallel does. For how long is not known, and counts as computing"
            )
        return found

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({"predicted": False, **asdict(self), "used": self.used}, indent=1)


def head(rank: int, world: int, ranks_per_node: int, wires: list[Wire]) -> str:
    """Who communicates over what."""
    return f"rank {rank} of {world}, {ranks_per_node} on each node; " + "; ".join(
        f"{w.name} {w.bandwidth / 1e9:g} GB/s, {w.latency * 1e6:g} us"
        + (f", {w.issue * 1e9:g} ns of the processor for each byte" if w.issue else "")
        for w in wires
    )


def speed(
    tokens: float | None, step_s: float, flops: float | None, peak_flops: float | None
) -> list[str]:
    """Lines about tokens and operations per second."""
    lines = []
    if tokens:
        lines.append(f"tokens    {tokens / step_s:9.0f} /s  of all ranks, {tokens:g} in a step")
    if flops:
        share = "" if not peak_flops else f", {flops / step_s / peak_flops:.1%} of the peak"
        lines.append(
            f"flops     {flops / 1e9:9.2f} G   of a step here, recomputation included; "
            f"{flops / step_s / 1e9:.1f} G/s{share}"
        )
    return lines


def in_memory(memory: Memory) -> list[str]:
    """Lines about bytes."""
    rest = f"parameters {_mb(memory.parameters)}, states of optimizers {_mb(memory.optimizer)}"
    if memory.frozen:
        rest += f", parameters that no optimizer has stepped {_mb(memory.frozen)}"
    if hosted := memory.hosted + memory.hosted_frozen + memory.hosted_states:
        rest += f"; {_mb(hosted)} of these on the host"
    peak = "" if memory.peak is None else f"; a step's peak {_mb(memory.peak)} above"
    lines = [f"memory    {rest}{peak}"]
    if memory.device_peak is not None:
        lines.append(
            f"          of the device, all together: {_mb(memory.device_peak)} at the peak, "
            f"{_mb(memory.device_reserved or 0)} reserved by its allocator"
        )
    if memory.by_kind:
        kinds = ", ".join(f"{kind} {_mb(size)}" for kind, size in memory.by_kind.items())
        lines.append(
            "          the largest peak predicted for a graph, "
            f"{_mb(sum(memory.by_kind.values()))}: {kinds}"
        )
    return lines


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
