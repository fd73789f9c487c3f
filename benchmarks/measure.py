"""What one call of a function costs on this rank: peak of live tensor bytes, and communication.

Both are read from `torch.profiler`, so the same instrument sees eager FSDP2, functional collectives
and code made by a compiler, and the function under test needs no change. A profiled call is slower
than a plain one: take step times elsewhere. Where `fn` communicates, all ranks must measure it.
"""

from __future__ import annotations

import gc
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import (
    _ExtraFields_Allocation,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _TensorMetadata,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function

from compiled_fsdp.inspection.report.measured import CARRIED
from compiled_fsdp.wire import gloo

WINDOW = "measure::window"
WAIT = "measure::wait"

# Collectives as the dispatcher names them: the sum they enter, and the argument whose bytes count.
COLLECTIVES = {
    "c10d::_allgather_base_": ("gathered", 0),
    "c10d::allgather_into_tensor_coalesced_": ("gathered", 0),
    "c10d::_reduce_scatter_base_": ("reduced", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduced", 1),
    "c10d::alltoall_base_": ("reduced", 1),
    "c10d::allreduce_": ("reduced", 0),
    "c10d::allreduce_coalesced_": ("reduced", 0),
}
# FSDP1 on the CPU gathers into a list of lists, which the profiler does not record: counted by what
# every rank puts in.
LIST_GATHER = "c10d::allgather_"
ISSUE_PREFIXES = ("c10d::", "_c10d_functional::", "fsdp::all_gather", "fsdp::all_to_all")
TRANSPORT_PREFIXES = ("gloo:", "mpi:", "ucc:")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Tensor bytes on one rank: `at_rest` between two calls, and the `peak` during one.

    The peak includes what is at rest.
    """

    peak: int
    at_rest: int

    @property
    def above_rest(self) -> int:
        """Bytes that a call needs on top of what stays."""
        return self.peak - self.at_rest


@dataclass(frozen=True, slots=True)
class CommReport:
    """Communication of one call on one rank.

    `gathered_bytes` sums the outputs of all-gathers. `reduced_bytes` sums the inputs of
    reduce-scatters, of all-reduces and of all-to-alls (a reduction whose sum is done locally).
    `total_s` is the wall time during which at least one collective was on its way, from its issue
    to its completion. `exposed_s` is the part of it that the training thread spent inside a
    collective, issuing it or blocked until it completes. The wait for a slower rank is in both.
    """

    gathered_bytes: int
    reduced_bytes: int
    num_collectives: int
    total_s: float
    exposed_s: float

    @property
    def exposed_share(self) -> float:
        """Share of the communication time that no computation hides, 0 where there is none."""
        return self.exposed_s / self.total_s if self.total_s else 0.0


def peak_tensor_bytes(fn: Callable[[], object], device: str = "cpu") -> PeakMemory:
    """Call `fn` twice and return the exact peak of live tensor bytes during the second call.

    On the CPU, every allocation and release of the two calls is replayed in order of time. The
    first call is there because the profiler does not report the release of what was allocated
    before it started, such as old gradients.
    """
    if device == "cuda":
        fn()
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
        fn()
        return PeakMemory(torch.cuda.max_memory_allocated(), at_rest)
    with _profiled(profile_memory=True) as prof:
        fn()
        at_rest = resident_bytes()
        with record_function(WINDOW):
            fn()
    events = list(_events(prof))
    changes = [
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in events
        if isinstance(event.extra_fields, _ExtraFields_Allocation)
    ]
    return PeakMemory(at_rest + replay(changes, *_window(events)), at_rest)


def replay(changes: Iterable[tuple[int, int, int]], start: int, end: int) -> int:
    """Return the peak of live bytes from `start` to `end`, above what lives at `start`.

    A change is (time, address, bytes), negative for a release. A release of an address whose
    allocation was not seen is left out, since its size is not known reliably.
    """
    live: dict[int, int] = {}
    current = peak = base = 0
    for when, address, size in _with_unseen_releases(changes, start):
        if when > end:
            break
        if size >= 0:
            live[address] = size
            current += size
        else:
            current -= live.pop(address, 0)
        if when < start:
            base = peak = current
        peak = max(peak, current)
    return peak - base


def _with_unseen_releases(
    changes: Iterable[tuple[int, int, int]], start: int
) -> list[tuple[int, int, int]]:
    """Add a release where an address is allocated again and none was seen.

    Gloo's threads are not profiled, and now and then one of them is the last to let go of a buffer.
    What was allocated before `start` has been released by then, the rest when its address is
    wanted.
    """
    completed: list[tuple[int, int, int]] = []
    live: dict[int, int] = {}
    for when, address, size in sorted(changes, key=lambda change: change[0]):
        if size >= 0 and address in live:
            completed.append((start - 1 if live[address] < start else when - 1, address, -1))
        if size >= 0:
            live[address] = when
        else:
            live.pop(address, None)
        completed.append((when, address, size))
    return sorted(completed, key=lambda change: change[0])


def resident_bytes() -> int:
    """Sum the distinct CPU storages of all tensors that Python can reach, gradients included."""
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor):
            for tensor in (item, item.grad if item.is_leaf else None):
                if tensor is not None and _is_plain_cpu(tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def communication(fn: Callable[[], object], repeats: int = 3) -> CommReport:
    """Call `fn` once unseen and then `repeats` times, and return the mean of the latter.

    The process group must be one for CPU tensors: times are those of the host.
    """
    fn()
    with (
        _watched_exchanges() as exchanges,
        _profiled(record_shapes=True) as prof,
        _marked_waits(),
        record_function(WINDOW),
    ):
        for _ in range(repeats):
            fn()
        for entry in exchanges:  # gathers that the optimizer's step started for the next call
            entry.wait()
    events = list(_events(prof))
    issued: list[tuple[int, int]] = []
    carried: list[tuple[int, int]] = [entry.span for entry in exchanges]
    num_bytes = {"gathered": 0, "reduced": 0}
    for entry in exchanges:
        num_bytes[entry.kind] += entry.num_bytes
    num_collectives = len(exchanges)
    for event in events:
        span = (event.start_time_ns, event.end_time_ns)
        if event.name == WAIT or event.name.startswith(ISSUE_PREFIXES):
            issued.append(span)
        elif event.name.startswith(TRANSPORT_PREFIXES):
            carried.append(span)
        if event.name in COLLECTIVES:
            kind, argument = COLLECTIVES[event.name]
            num_bytes[kind] += _argument_bytes(event, argument)
            num_collectives += 1
        elif event.name == LIST_GATHER:
            num_bytes["gathered"] += dist.get_world_size() * _argument_bytes(event, 1)
            num_collectives += 1
    return CommReport(
        gathered_bytes=num_bytes["gathered"] // repeats,
        reduced_bytes=num_bytes["reduced"] // repeats,
        num_collectives=num_collectives // repeats,
        total_s=union_ns(issued + carried) / repeats / 1e9,
        exposed_s=union_ns(issued) / repeats / 1e9,
    )


def record_step(fn: Callable[[], object], path: Path) -> None:
    """Call `fn` once unseen, and once under the profiler, whose Chrome trace goes to `path`.

    Where our runtime communicates by sends and receives, the trace gets a range
    `compiled_fsdp::carried` for each exchange: the time until its messages had really arrived.
    """
    fn()
    with _watched_exchanges() as exchanges, _profiled() as prof:
        fn()
        for entry in exchanges:
            entry.wait()
    prof.export_chrome_trace(str(path))
    document = json.loads(path.read_text())
    base = document.get("baseTimeNanoseconds", 0)
    for entry in exchanges:
        start, end = entry.span
        when = {"ts": (start - base) / 1e3, "dur": (end - start) / 1e3}
        document["traceEvents"].append(
            {"ph": "X", "name": CARRIED, "pid": os.getpid(), "tid": "wire", **when}
        )
    path.write_text(json.dumps(document))


def union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _profiled(*, profile_memory: bool = False, record_shapes: bool = False) -> Iterator[profile]:
    """Profile the CPU side, without the lines that the profiler's library writes to stderr."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(
        activities=[ProfilerActivity.CPU],
        profile_memory=profile_memory,
        record_shapes=record_shapes,
    ) as prof:
        yield prof


@contextmanager
def _marked_waits() -> Iterator[None]:
    """Give `Work.wait()` called from Python a range in the profile, as waits in operators have."""
    wait = dist.Work.wait

    def marked(work: dist.Work, *args: object, **kwargs: object) -> object:
        with record_function(WAIT):
            return wait(work, *args, **kwargs)  # type: ignore[arg-type]

    dist.Work.wait = marked  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


class _Watched:
    """An `Exchange` of ours under way: a thread waits for its messages and notes when the last is
    done.
    """

    def __init__(
        self, collective: str, works: list[dist.Work], buffers: tuple[Tensor, ...]
    ) -> None:
        self.kind = {"all_gather": "gathered", "all_to_all": "reduced"}[collective]
        self.num_bytes = buffers[0].numel() * buffers[0].itemsize
        self.works = works
        self.started = self.done = time.time_ns()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        for work in self.works:
            work.wait()
        self.done = time.time_ns()

    def wait(self) -> None:
        self.thread.join()

    @property
    def span(self) -> tuple[int, int]:
        return self.started, self.done


@contextmanager
def _watched_exchanges() -> Iterator[list[_Watched]]:
    """Collect what our runtime does by sends and receives."""
    watched: list[_Watched] = []
    original = gloo.Exchange.__init__

    def watch(
        self: gloo.Exchange,
        collective: str,
        works: list[tuple[int, dist.Work]],
        buffers: tuple[Tensor, ...],
        what: str,
        group: dist.ProcessGroup,
    ) -> None:
        watched.append(_Watched(collective, [work for _, work in works], buffers))
        original(self, collective, [(dist.get_rank(), watched[-1])], buffers, what, group)

    gloo.Exchange.__init__ = watch  # type: ignore[method-assign]
    try:
        yield watched
    finally:
        gloo.Exchange.__init__ = original  # type: ignore[method-assign]


def _events(prof: profile) -> Iterator[_ProfilerEvent]:
    """Yield all events of a finished profile, a parent before its children."""
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    yield from _flatten(prof.profiler.kineto_results.experimental_event_tree())


def _flatten(events: list[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for event in events:
        yield event
        yield from _flatten(event.children)


def _window(events: list[_ProfilerEvent]) -> tuple[int, int]:
    """Return start and end of the range that encloses the measured call."""
    (window,) = (event for event in events if event.name == WINDOW)
    return window.start_time_ns, window.end_time_ns


def _argument_bytes(event: _ProfilerEvent, position: int) -> int:
    """Return the bytes of a tensor argument, or of a list of tensors, of a profiled operator."""
    assert isinstance(event.extra_fields, _ExtraFields_TorchOp)
    argument = event.extra_fields.inputs[position]
    total = 0
    for meta in argument if isinstance(argument, list) else [argument]:
        assert isinstance(meta, _TensorMetadata), f"{event.name} has no tensor at {position}"
        total += math.prod(meta.sizes) * meta.dtype.itemsize
    return total


def _is_plain_cpu(tensor: Tensor) -> bool:
    """Tell a tensor with a CPU storage of its own from wrappers (a DTensor) and from fakes."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
