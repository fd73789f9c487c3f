"""Private torch: torch's log, its structured trace and its profiler. Tried on torch 2.13 and
2.15.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._logging._internal
from torch._C._autograd import _enable_record_function, _profiler_enabled
from torch._C._profiler import _ExtraFields_Allocation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def register_log(name: str) -> None:
    """Let `torch._logging.set_logs` and `TORCH_LOGS` know a logger by its name."""
    torch._logging._internal.register_log(name, name)


def is_traced() -> bool:
    """Whether torch's structured trace (`TORCH_TRACE`) is written: its handler takes itself away at
    first use if it is not.
    """
    handlers = torch._logging._internal.trace_log.handlers
    return any(
        isinstance(handler, torch._logging._internal.LazyTraceHandler) for handler in handlers
    )


def trace_artifact(name: str, encoding: str, payload: Callable[[], Any]) -> None:
    """One artifact of torch's structured trace: "string" or "json"; the payload is computed only if
    there is a trace.
    """
    if is_traced():
        torch._logging._internal.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": encoding},
            payload_fn=payload,
            expect_trace_id=False,
        )


def is_profiling() -> bool:
    """Whether a profiler is on; costs nothing, unlike an empty `record_function`."""
    is_on: bool = _profiler_enabled()
    return is_on


@contextmanager
def unprofiled() -> Iterator[None]:
    """Leave no record in a profile of what is started inside: torch ends the record of a message
    over gloo when it arrives, and crashes if the profile is over by then.
    """
    if not is_profiling():
        yield
        return
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


def started(profile: Any) -> float:
    """When a finished profile began, in seconds of the machine's clock."""
    return float(profile.profiler.kineto_results.trace_start_ns()) * 1e-9


def allocations(profile: Any, device: str) -> list[tuple[int, int, int]]:
    """(time, address, bytes) of every allocation in a finished profile, and, with negative bytes,
    release.
    """
    found = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == device:
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return found
