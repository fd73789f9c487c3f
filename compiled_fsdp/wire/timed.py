"""A timed world: one process is rank k of N, and its collectives take the time that a wire would.

A collective begins when the wire is free of those before it, and occupies it for `latency + bytes
that this rank sends / bandwidth`; whoever waits for it sleeps until then. What it delivers is what
it would deliver if every rank held what this one holds: gathers repeat the shard, means are the
value itself. So programs run on, with numbers of the right size, but none to be believed. What only
another rank has (a tensor scattered from there, a message) is zeros. Delivering is copying, which
takes this process time that a network does not need; it is counted apart.

torch's own "fake" groups take no time, and leave most of what they deliver as it was. The time of
a ring: S. Rabenseifner, "Optimization of Collective Reduction Operations", 2004; an all-reduce
sends everything twice.

Private torch used here: groups written in Python (`ProcessGroup` as a base class), tried on 2.13
and 2.15. Until 2.12 torch calls their methods by other names, which are there too.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.groups import (
    PythonGroup,
    PythonWork,
    never_record,
    trace_as_group,
)
from compiled_fsdp.torch_private.streams import SPINNING

from . import timed_device
from .world import Carried, Wire, current_world

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from typing import TypeAlias

    Started: TypeAlias = "Transfer | timed_device.OnDevice"

BACKEND = "timed"
SPIN = 2e-4  # seconds before the end at which a wait stops to sleep: the system wakes late


class Transfer(PythonWork):  # type: ignore[misc]
    """A collective under way, and the tensors in which its result is."""

    def __init__(self, carried: Carried, done_at: float, results: Sequence[Tensor]) -> None:
        super().__init__()
        self.carried, self.done_at, self.results = carried, done_at, list(results)

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until the wire has carried it."""
        begin = time.perf_counter()
        if begin >= self.done_at:
            return True
        if self.done_at - begin > SPIN:
            time.sleep(self.done_at - begin - SPIN)
        while (now := time.perf_counter()) < self.done_at:
            pass
        self.carried.blocked += self.done_at - begin
        self.carried.late += now - self.done_at
        return True

    def is_completed(self) -> bool:
        """Whether the wire has carried it."""
        return time.perf_counter() >= self.done_at

    @untraced
    def get_future(self) -> Any:
        """Done when the wire has carried it, with the tensors, as `DistributedDataParallel`
        expects.
        """
        future: Any = torch.futures.Future()
        self.carried.is_by_future = True
        left = self.done_at - time.perf_counter()
        if left <= 0:
            future.set_result(self.results)
        else:
            threading.Timer(left, future.set_result, [self.results]).start()
        return future


class TimedGroup(PythonGroup):  # type: ignore[misc]
    """Some ranks of the current timed world; tensors on the CPU, or on a device whose streams can
    be occupied (`timed_device.py`). Torch's library calls it in the middle of what is compiled
    (DDP's buffers), where Dynamo would look into it.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        world = current_world()
        if world is None:
            raise RuntimeError(
                "a process group of the backend 'timed' was made outside of a timed world: run the "
                "script by `python -m compiled_fsdp simulate`"
            )
        self._world, self._number, self._of = world, rank, size

    # what torch asks of a group that is written in Python

    def size(self) -> int:
        """Ranks in it."""
        return self._of

    def rank(self) -> int:
        """This one's number in it."""
        return self._number

    def getBackendName(self) -> str:
        """As torch registers it."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """What torch calls it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def wire(self) -> Wire:
        """What it communicates over."""
        return self._world.wire_of(dist.get_process_group_ranks(self))

    @property
    def _device_types(self) -> list[torch.device]:
        """For which it carries tensors: torch asks before it broadcasts a state dict."""
        there = (kind for kind in SPINNING if getattr(torch, kind).is_available())
        return [torch.device(kind) for kind in ("cpu", *there)]

    def _get_backend(self, device: torch.device) -> TimedGroup:
        """Itself, on any."""
        return self

    @property
    def pg_name(self) -> str:
        """As `group_name`."""
        return self.group_name

    # collectives: each delivers at once, and is done when the wire says so

    def _carry(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        times: float,
        results: Sequence[Tensor],
        deliver: Callable[[], object],
    ) -> Started:
        """`times` the bytes of `tensors` are sent by this rank; `deliver` fills the `results`."""
        devices = {t.device for t in (*tensors, *results) if t.device.type != "cpu"}
        if any(not timed_device.can_spin(device) for device in devices) or len(devices) > 1:
            raise NotImplementedError(
                f"a timed world carries tensors on the CPU, or on one CUDA device, and {kind} got "
                f"some on {', '.join(sorted(map(str, devices)))}: run the script on the CPU"
            )
        num_bytes = times * sum(t.numel() * t.element_size() for t in tensors)
        wire = self.wire
        carried = Carried(kind, self.group_name, wire.name, num_bytes, wire.seconds(num_bytes))
        self._world.carried.append(carried)
        if devices:
            self._world.devices |= devices
            return timed_device.begin(carried, tensors, results, deliver)
        wire.occupy(carried.seconds)
        done_at = wire.free_at
        _work(wire.issue * num_bytes)
        begin = time.perf_counter()
        deliver()
        carried.copying = time.perf_counter() - begin
        return Transfer(carried, done_at, results)

    @property
    def _others(self) -> float:
        """The part of what all ranks hold together that is not this one's."""
        return (self._of - 1) / self._of

    @untraced
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> Started:
        """`outputs[i]` is `inputs[i]`, `size()` times."""

        def deliver() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                output.view(self._of, -1).copy_(mine.reshape(1, -1).expand(self._of, -1))

        return self._carry("all_gather", outputs, self._others, outputs, deliver)

    @untraced
    def all_gather_single(self, output: Tensor, mine: Tensor, opts: object = None) -> Started:
        """Of one tensor."""
        return self.all_gather_single_coalesced([output], [mine])

    @untraced
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> Started:
        """Into a tensor for each rank."""

        def deliver() -> None:
            for each, mine in zip(outputs, inputs, strict=True):
                for output in each:
                    output.copy_(mine)

        flat = [t for each in outputs for t in each]
        return self._carry("all_gather", flat, self._others, flat, deliver)

    @untraced
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Started:
        """`outputs[i]` is this rank's part of `inputs[i]`, as often as there are ranks."""

        def deliver() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(mine.view(self._of, -1)[self._number])
            self._reduce(outputs, opts)

        return self._carry("reduce_scatter", inputs, self._others, outputs, deliver)

    @untraced
    def reduce_scatter_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Started:
        """Of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    @untraced
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Started:
        """From a tensor for each rank."""

        def deliver() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._number])
            self._reduce(outputs, opts)

        flat = [t for each in inputs for t in each]
        return self._carry("reduce_scatter", flat, self._others, outputs, deliver)

    @untraced
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        """In place."""
        return self._carry(
            "all_reduce", tensors, 2 * self._others, tensors, lambda: self._reduce(tensors, opts)
        )

    allreduce_coalesced = allreduce

    def _reduce(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """What all ranks have together, if all have this; other reductions leave it as it is."""
        if getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._of)

    @untraced
    def all_to_all_single(
        self,
        output: Tensor,
        mine: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: object = None,
    ) -> Started:
        """What is sent to others comes back: rows of the input,
        and zeros where more are awaited.
        """
        return self._carry(
            "all_to_all", [mine], self._others, [output], lambda: _come_back(output, mine)
        )

    @untraced
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> Started:
        """A tensor for each rank."""

        def deliver() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                _come_back(output, mine) if output.shape == mine.shape else output.zero_()

        return self._carry("all_to_all", inputs, self._others, outputs, deliver)

    @untraced
    def broadcast(self, tensors: list[Tensor], opts: object = None) -> Started:
        """All have this one's."""
        return self._carry("broadcast", tensors, 1.0, tensors, _nothing)

    @untraced
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        """As `allreduce`; only one rank needs it."""
        return self._carry("reduce", tensors, 1.0, tensors, lambda: self._reduce(tensors, opts))

    @untraced
    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> Started:
        """On one rank."""

        def deliver() -> None:
            for each, mine in zip(outputs, inputs, strict=False):
                for output in each:
                    output.copy_(mine)

        return self._carry("gather", inputs, 1.0, [t for e in outputs for t in e], deliver)

    @untraced
    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None
    ) -> Started:
        """From one rank; zeros from another."""

        def deliver() -> None:
            for output, each in zip(outputs, inputs or [[]] * len(outputs), strict=True):
                output.copy_(each[self._number]) if each else output.zero_()

        return self._carry("scatter", outputs, 1.0, outputs, deliver)

    @untraced
    def barrier(self, opts: object = None) -> Started:
        """Of no bytes."""
        return self._carry("barrier", [], 0.0, [], _nothing)

    @untraced
    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Started:
        """To one rank."""
        return self._carry("send", tensors, 1.0, tensors, _nothing)

    @untraced
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Started:
        """Zeros, after the latency: when the other rank sends is not known."""
        return self._carry(
            "recv", tensors, 0.0, tensors, lambda: [tensor.zero_() for tensor in tensors]
        )

    # names that torch has, or had
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def known_wire(group: dist.ProcessGroup) -> Wire | None:
    """The wire of a timed group; None for another."""
    return group.wire if isinstance(group, TimedGroup) else None


def _work(seconds: float) -> None:
    """Keep the core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _come_back(output: Tensor, mine: Tensor) -> None:
    rows = min(len(output), len(mine))
    output[:rows].copy_(mine[:rows])
    output[rows:].zero_()


def _nothing() -> None:
    """There is nothing to deliver."""


def _make(store: object, rank: int, size: int, timeout: timedelta) -> TimedGroup:
    trace_as_group(TimedGroup)
    return TimedGroup(rank, size)


never_record(BACKEND)
dist.Backend.register_backend(BACKEND, _make, devices=["cpu", *SPINNING])
