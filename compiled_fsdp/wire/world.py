"""A timed world: all ranks, of which this process is one, the wires between them, and what these
have carried; the groups of `timed.py` have some of its ranks.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import timed_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


@dataclass
class Wire:
    """What connects a rank to others.

    bandwidth: bytes per second that one rank can send, while it receives as much.
    latency: seconds of each collective besides.
    issue: seconds of this process for each byte that it sends, while the wire is busy with it: gloo
        copies on the core that computes; 0 where something else sends.
    free_at: when the last collective so far has passed, on the clock of `time.perf_counter`.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    issue: float = 0.0
    free_at: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0 and self.issue >= 0):  # nor NaN
            raise ValueError(
                f"the wire {self.name!r} has a bandwidth of {self.bandwidth} bytes/s and a latency "
                f"of {self.latency} s, and issuing takes {self.issue} s for each byte: the "
                "bandwidth must be above 0 and the others not below"
            )

    def seconds(self, num_bytes: float) -> float:
        """For how long a collective that sends so many bytes occupies it."""
        return self.latency + num_bytes / self.bandwidth

    def occupy(self, seconds: float) -> None:
        """Occupy it, from now or when it is free."""
        self.free_at = max(time.perf_counter(), self.free_at) + seconds


@dataclass(slots=True)
class Carried:
    """A collective.

    num_bytes: that this rank sends.
    seconds: that it occupies the wire.
    blocked: that somebody waited for it, until it was through.
    late: that the system woke him too late, which is no time of any wire.
    copying: that this process took to deliver it.
    is_by_future: somebody asked for its future, and nobody knows how long he waits for that.
    """

    kind: str
    group: str
    wire: str
    num_bytes: float
    seconds: float
    blocked: float = 0.0
    late: float = 0.0
    copying: float = 0.0
    is_by_future: bool = False


@dataclass
class World:
    """All ranks, of which this process is one.

    ranks_per_node: as many, from rank 0 on, reach each other over `link`; all others over
        `network`.
    carried: every collective so far.
    devices: other than the CPU, on which there were collectives.

    Raises:
        ValueError: the rank is not among them, or nodes are not full.
    """

    size: int
    rank: int
    network: Wire
    link: Wire
    ranks_per_node: int = 1
    carried: list[Carried] = field(default_factory=list)
    devices: set[torch.device] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"a timed world of {self.size} ranks has no rank {self.rank}")
        each = self.ranks_per_node
        if each < 1 or (self.size > each and self.size % each):
            raise ValueError(
                f"a timed world of {self.size} ranks cannot have {each} on each node: nodes must "
                "be full"
            )

    def settle(self) -> None:
        """Let the host wait for devices, so that what was blocked on them is known."""
        for device in self.devices:
            timed_device.settle(device)

    def wire_of(self, ranks: Sequence[int]) -> Wire:
        """What a group of these ranks communicates over: the slowest that it needs."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.link if len(nodes) == 1 else self.network


_world: World | None = None


@contextmanager
def timed_world(world: World) -> Iterator[World]:
    """Be that rank: inside, `init_process_group("timed", ...)` and all groups made of it are timed.

    Raises:
        RuntimeError: this process is in a timed world already.
    """
    global _world
    if _world is not None:
        raise RuntimeError("this process is in a timed world already: leave that one first")
    _world = world
    try:
        yield world
    finally:
        _world = None


def current_world() -> World | None:
    """The one that this process is in."""
    return _world
