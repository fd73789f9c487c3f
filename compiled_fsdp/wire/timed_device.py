"""The collectives of a timed world on an accelerator: each occupies a stream of its wire's.

A wire is a stream on which a kernel spins for as long as the collective takes. It begins behind
what the current stream has computed so far, and behind the collectives before it on that wire. What
it delivers is copied meanwhile, on a stream beside. Whoever awaits it lets his current stream wait,
as with NCCL; the host runs on. How long a stream has waited is known once the device is done: two
events around the wait say it, and `settle` reads them.

Not seen: a CUDA graph carries its collectives once more at each replay, and they are noted when it
is captured alone.

Tests put a double in the place of `module_of` and `spin`, whose streams are clocks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.groups import PythonWork
from compiled_fsdp.torch_private.streams import SPINNING, spin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import Tensor

    from .world import Carried

BESIDE = "deliveries"  # the stream on which results are copied

# Torch keeps the C++ half of a `Work` alone. Events around waits, and what waited for what.
_under_way: set[OnDevice] = set()
_waits: list[tuple[Carried, Any, Any]] = []


class OnDevice(PythonWork):  # type: ignore[misc]
    """A collective under way on a device.

    done: the event behind it.
    results: the tensors that it delivers; holds: all that it reads and writes.
    """

    def __init__(
        self, carried: Carried, done: Any, results: Sequence[Tensor], holds: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.carried, self.done, self.results = carried, done, list(results)
        self.device = self.results[0].device
        self.holds = (*holds, *results)
        _under_way.add(self)

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the device's current stream wait."""
        module = module_of(self.device)
        current = module.current_stream(self.device)
        if is_captured(module):
            current.wait_event(self.done)
        else:
            begin, end = (module.Event(enable_timing=True) for _ in range(2))
            begin.record(current)
            current.wait_event(self.done)
            end.record(current)
            _waits.append((self.carried, begin, end))
        self.holds = ()
        _under_way.discard(self)
        return True

    def is_completed(self) -> bool:
        """Whether the device has carried it."""
        return bool(self.done.query())

    @untraced
    def get_future(self) -> Any:
        """Done at once for the host, and for streams behind the collective."""
        self.carried.is_by_future = True
        for tensor in self.holds:  # nobody may ever call `wait`
            tensor.record_stream(stream_of(self.device, BESIDE))
        self.holds = ()
        _under_way.discard(self)
        future: Any = torch.futures.Future(devices=[self.device])
        module = module_of(self.device)
        stream = module.Stream(self.device)
        stream.wait_event(self.done)
        with module.stream(stream):
            future.set_result(self.results)
        return future


def begin(
    carried: Carried,
    tensors: Sequence[Tensor],
    results: Sequence[Tensor],
    deliver: Callable[[], object],
) -> OnDevice:
    """Start a collective of these tensors, on a device, that occupies its wire for
    `carried.seconds`.
    """
    device = results[0].device
    module = module_of(device)
    current = module.current_stream(device)
    wire, beside = stream_of(device, carried.wire), stream_of(device, BESIDE)
    for stream in (wire, beside):
        stream.wait_stream(current)
    with module.stream(beside):
        deliver()
    with module.stream(wire):
        spin(carried.seconds)
    wire.wait_stream(beside)
    done = module.Event()
    done.record(wire)
    return OnDevice(carried, done, results, tensors)


def can_spin(device: torch.device) -> bool:
    """Whether collectives on such a device can be timed."""
    return device.type in SPINNING


def settle(device: torch.device) -> None:
    """Let the host wait for all that the device still has to do, and add what its streams have
    waited to what they waited for.
    """
    module_of(device).synchronize(device)
    while _waits:
        carried, before, after = _waits.pop()
        carried.blocked += before.elapsed_time(after) / 1e3


def is_captured(module: Any) -> bool:
    """Whether a graph is being captured, of which no time can be read."""
    return bool(module.is_current_stream_capturing())


def module_of(device: torch.device) -> Any:
    """Returns torch's module of such devices."""
    return torch.get_device_module(device)


@cache
def stream_of(device: torch.device, name: str) -> Any:
    """The stream of a wire, by its name."""
    return module_of(device).Stream(device)
