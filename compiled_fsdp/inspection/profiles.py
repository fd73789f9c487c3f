"""A finished profile of some steps as ranges in time: those of the training threads, compilations
apart, and where a step begins and ends.

What a compilation runs on fake tensors has the names of what runs, so everything inside one is left
out; the compilation itself is kept, since it is part of the step that it happened in.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from compiled_fsdp.torch_private.tracing import started

from .check import Check, DumpError, load
from .routing import with_counts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .routing import Table

DOING = "reading the profile"


class _Trace(TypedDict):
    traceEvents: list[dict[str, Any]]


class _Range(TypedDict):
    name: str
    ts: float
    dur: float


class _Launch(TypedDict):
    args: dict[str, Any]


# Kinds of ranges in a Chrome trace of torch: what runs on a device, what launches it, and what is
# the profiler's own, a range drawn a second time on the device, a stream that waits for another, or
# a frame of Python (`with_stack=True`), of which there are more than of all else.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime")
IGNORED = (
    "Trace",
    "overhead",
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_event",
    "external_correlation",
    "python_function",
)
# Copies that compute nothing: a batch on its way to the device. As CUDA and as HIP call them.
OF_HOST = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
MICROSECOND = 1e-6
WAIT = "_c10d_functional::wait_tensor"  # what every executor waits by
NAMESPACES = ("fsdp", "_c10d_functional")
KINDS = {
    "all_gather": "gather",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "custom_all_gather": "gather",
    "gather_ahead": "gather",
    "all_to_all": "reduce",
    "all_to_all_single": "exchange",
    "reduce_scatter_tensor": "reduce",
    "reduce_scatter_tensor_out": "reduce",
    "custom_reduce_scatter": "reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
}
# Torch's own ranges: around each optimizer step, around each step of a profiler's schedule, around
# each node that autograd runs, and inside a compilation.
OPTIMIZER, SCHEDULED, AUTOGRAD = "Optimizer.step#", "ProfilerStep#", "autograd::engine::"
COMPILES = "(dynamo_timed)"


EXCHANGE = "_c10d_functional::all_to_all_single"


@dataclass(frozen=True, slots=True)
class Event:
    """A range in a profile, in seconds.

    pieces: of the user's all-to-all, the rows that come from each rank, and those that go to it,
        where the profile has arguments (`record_shapes=True`).
    rows: likewise, all that it sends; 0 where that is not known.
    experts: of one whose counts were told (`routing.py`), tokens by rank and expert: that go there,
        and that come from there.
    """

    name: str
    begin: float
    end: float
    thread: object
    pieces: tuple[tuple[int, ...], ...] = ()
    rows: int = 0
    experts: tuple[Table, Table] | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def kind(self) -> str:
        """ "gather", "reduce", "all_reduce" or "exchange" for what starts a collective, else ""."""
        namespace, _, op = self.name.partition("::")
        return KINDS.get(op, "") if namespace in NAMESPACES else ""

    def is_in(self, other: Event) -> bool:
        """Whether it lies inside another one, of whatever thread."""
        return other.begin <= self.begin and self.end <= other.end


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ran on a device, and the call on a thread of the CPU that launched it; None if that was
    before the profile began.
    """

    event: Event
    launch: Event | None

    @property
    def is_communication(self) -> bool:
        """Whether it is a collective of NCCL (or RCCL, whose kernels are called alike)."""
        return self.event.name.startswith("nccl")

    @property
    def is_computation(self) -> bool:
        """Whether the device computes meanwhile, or moves what it computes with."""
        return not self.is_communication and not self.event.name.startswith(OF_HOST)


@dataclass(frozen=True, slots=True)
class Profile:
    """The ranges of a profile, by time, a range before what it encloses.

    events: of the CPU, without those of compilations.
    compiles: the outermost compilations.
    kernels: of a device, by time; none on the CPU.
    base: what is to be added to times for those of a clock that the ranks of a machine share.
    """

    events: list[Event]
    compiles: list[Event]
    kernels: list[Kernel]
    base: float = 0.0

    @property
    def whole(self) -> Event:
        """From the first event to the end of the last."""
        everything = [*self.events, *self.compiles]
        begin = min((event.begin for event in everything), default=0.0)
        return Event("", begin, max((event.end for event in everything), default=begin), None)


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of a profile, or as much of one as there is.

    notes: what keeps it from being a whole, ordinary step, in words.
    """

    span: Event
    notes: list[str]
    count: int


def of_profile(profile: Any) -> Profile:
    """A finished `torch.profiler.profile`, however often it is read; with kernels of a device, only
    once.

    Raises:
        DumpError: it has kernels of a device, and was exported already.
    """
    found = list(profile.events())
    if any(event.device_type != torch.profiler.DeviceType.CPU for event in found):
        return _exported(profile)
    events = [
        Event(
            event.name,
            event.time_range.start * MICROSECOND,
            event.time_range.end * MICROSECOND,
            event.thread,
            _pieces(event.name, event.concrete_inputs),
            _num_rows(event.name, event.input_shapes),
        )
        for event in found
    ]
    return _profile(events, [], started(profile))


def _exported(profile: Any) -> Profile:
    """Which call launched a kernel stands in the file that torch writes, once, and nowhere else."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        try:
            profile.export_chrome_trace(str(path))
        except RuntimeError as error:
            raise DumpError(
                f"{DOING}: it has kernels of a device, and torch exports a profile only once "
                f"({error}); give the path of the file that it was exported to"
            ) from error
        return read_profile(path)


def read_profile(path: Path) -> Profile:
    """A Chrome trace.

    Raises:
        DumpError: it is none; names the file.
    """
    found = load(path, DOING)
    check = Check(path, DOING)
    check(found, _Trace)
    events, on_device, launches = [], [], {}
    for index, event in enumerate(found["traceEvents"]):
        if event.get("ph") != "X" or event.get("cat") in IGNORED:
            continue
        where = f"traceEvents[{index}]"
        check(event, _Range, where)
        begin = event["ts"] * MICROSECOND
        args = event.get("args", {}) if event["name"] == EXCHANGE else {}
        end = begin + event["dur"] * MICROSECOND
        known = Event(
            event["name"],
            begin,
            end,
            event.get("tid"),
            _pieces(event["name"], args.get("Concrete Inputs")),
            _num_rows(event["name"], args.get("Input Dims")),
        )
        if event.get("cat") not in (*ON_DEVICE, *LAUNCHES):
            events.append(known)
            continue
        check(event, _Launch, where)
        number = event["args"].get("correlation")
        if event["cat"] in ON_DEVICE:
            on_device.append((known, number))
        else:
            launches[number] = known
    kernels = [Kernel(event, launches.get(number)) for event, number in on_device]
    base = found.get("baseTimeNanoseconds", 0)
    return _profile(events, kernels, base * 1e-9 if isinstance(base, int) else 0.0)


def _pieces(name: str, given: Any) -> tuple[tuple[int, ...], ...]:
    """The splits of an all-to-all among its arguments: lists, or in a trace their texts."""
    if name != EXCHANGE or not isinstance(given, list) or len(given) < 3:
        return ()
    try:
        lists = [json.loads(each) if isinstance(each, str) else each for each in given[1:3]]
    except ValueError:  # torch cuts long lists short
        return ()
    is_whole = all(isinstance(n, int) for each in lists for n in each or [None])
    return tuple(map(tuple, lists)) if is_whole else ()


def _num_rows(name: str, shapes: Any) -> int:
    """The rows of what an all-to-all sends, by the shapes of its arguments."""
    first = shapes[0] if name == EXCHANGE and isinstance(shapes, list) and shapes else None
    is_known = isinstance(first, list) and first and isinstance(first[0], int)
    return first[0] if is_known else 0  # type: ignore[index]


def _profile(events: list[Event], kernels: list[Kernel], base: float) -> Profile:
    events.sort(key=lambda event: (event.begin, -event.end))
    kernels.sort(key=lambda kernel: kernel.event.begin)
    compiles = outermost(event for event in events if event.name.endswith(COMPILES))
    return Profile(with_counts(_outside(events, compiles)), compiles, kernels, base)


def outermost(events: Iterable[Event]) -> list[Event]:
    """Without those that lie inside another one of the same thread; they come by time."""
    found: list[Event] = []
    reached: dict[object, float] = {}
    for event in events:
        if event.end > reached.get(event.thread, float("-inf")):
            found.append(event)
            reached[event.thread] = event.end
    return found


def _outside(events: list[Event], compiles: list[Event]) -> list[Event]:
    """Returns what neither is nor lies inside a compilation of its thread."""
    if not compiles:
        return events
    of_thread: dict[object, list[Event]] = {}
    for compilation in compiles:
        of_thread.setdefault(compilation.thread, []).append(compilation)
    return [
        event
        for event in events
        if not any(event.is_in(found) for found in of_thread.get(event.thread, ()))
    ]


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def seconds_in(span: Event, events: Iterable[Event]) -> float:
    """How long any of these events lasted inside a span: never longer than the span."""
    cut = ((max(e.begin, span.begin), min(e.end, span.end)) for e in events)
    return union((begin, end) for begin, end in cut if begin < end)


def choose_step(profile: Profile) -> Step:
    """The last whole step without a compilation; else the last whole one; else all that there is.

    A step ends with the optimizer's, unless whoever profiled has marked steps by
    `profiler.step()`; of optimizers that step one after another, with the last one's.
    """
    spans = _spans(profile)
    whole = [span for span in spans if _has_backward(profile, span)]
    calm = [span for span in whole if not seconds_in(span, profile.compiles)]
    span = [profile.whole, *whole, *calm][-1]
    notes = []
    if not whole:
        missing = "backward" if spans else "optimizer's step"
        notes.append(f"the profile covers part of a step: it has no {missing}")
    compiling = seconds_in(span, profile.compiles)
    if compiling:
        notes.append(
            f"{_ms(compiling)} of the profiled step are compilation, by this rank alone; others "
            "wait for ranks that compile. Profile a later step"
        )
    return Step(span, notes, len(whole))


def _spans(profile: Profile) -> list[Event]:
    """Returns what ends with a step, and has a backward since the one before."""
    marked = [event for event in profile.events if event.name.startswith(SCHEDULED)]
    if marked:
        return marked
    begin, found = profile.whole.begin, []
    steps = [event for event in profile.events if event.name.startswith(OPTIMIZER)]
    for step, following in zip(steps, [*steps[1:], None], strict=False):
        if following is None or _has_backward(profile, Event("", step.end, following.begin, None)):
            found.append(Event("", begin, step.end, None))
            begin = step.end
    return found


def _has_backward(profile: Profile, span: Event) -> bool:
    return any(e.name.startswith(AUTOGRAD) and e.is_in(span) for e in profile.events)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
