"""Copies between host memory, where offloaded units rest and activations go, and the device that
computes.

A copy is started on a stream of its own, one for each direction, and awaited as a collective is:
what is copied to the device, by the device's current stream, so that the host runs on; what is
copied to the host, by the host, which reads it next (the optimizer's step). An activation is read
by the device alone, when it is copied back: so the device's stream awaits it, behind which its
memory there may be used for something else. So it does for an optimizer's state; what goes back to
the host lasts, and `arrived` has the host wait for it at the end of a whole step.

[Note: host memory under way]
A copy out of pinned memory reads it after the host has moved on. So `settle` waits for those before
anything of ours lets the host write to it: an optimizer's step, a state dict, a move.

Tests put a double in the place of `begin`, which needs no device: it copies as late as a wait
allows, and hands out NaN until then.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.collectives import HOST
from compiled_fsdp.torch_private.groups import PythonWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Torch keeps the C++ half of a `Work` alone; and events of copies out of host memory, and into what
# stays there.
_under_way: set[Copy] = set()
_reading: dict[torch.device, Any] = {}
_arriving: dict[torch.device, Any] = {}
_is_planned_apart = False  # by `planned_apart`


class Copy(PythonWork):  # type: ignore[misc]
    """A copy under way.

    event: recorded behind it.
    is_for_host: whether the host is to read it.
    holds: what it reads and writes.
    """

    def __init__(self, event: Any, device: torch.device, is_for_host: bool, *holds: Tensor) -> None:
        super().__init__()
        self.event, self.device, self.is_for_host = event, device, is_for_host
        self.holds: tuple[Tensor, ...] = holds
        _under_way.add(self)

    def wait(self, timeout: object = None) -> bool:
        """Let the host wait for what it is to read, else the device's current stream."""
        if self.is_for_host:
            self.event.synchronize()
        else:
            _module(self.device).current_stream(self.device).wait_event(self.event)
        self.holds = ()
        _under_way.discard(self)
        return True


def is_apart(device: torch.device) -> bool:
    """Whether a device has memory of its own; tests say that the CPU has."""
    return device.type != "cpu"


def is_planned_apart(device: torch.device) -> bool:
    """Whether graphs are planned for a device with memory of its own: such a one, or one that this
    process only plans for (`planned_apart`).
    """
    return _is_planned_apart or is_apart(device)


@contextmanager
def planned_apart() -> Iterator[None]:
    """Inside, graphs are planned for a device beside the host, and not run."""
    global _is_planned_apart
    before, _is_planned_apart = _is_planned_apart, True
    try:
        yield
    finally:
        _is_planned_apart = before


def begin(
    source: Tensor,
    device: str,
    pins: bool,
    *,
    is_for_device: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Start to copy a tensor to a type of device, or to the host, into pinned memory if `pins`; the
    copy, and a `Work` to await it by.

    is_for_device: what goes to the host is not read there before `arrived`.
    into: what is copied to, instead of memory of its own.
    """
    is_to_host = device == HOST
    on = source.device if is_to_host else _current(device)
    module = _module(on)
    stream = _stream(on, is_to_host)
    target = torch.device("cpu") if is_to_host else on
    copied = _empty(source, target, pins) if into is None else into
    stream.wait_stream(module.current_stream(on))  # which writes the one, or has read the other
    with module.stream(stream):
        copied.copy_(source, non_blocking=True)
        event = stream.record_event()
    if is_for_device:
        if into is not None:
            _arriving[on] = event
        return copied, Copy(event, on, False, source, copied)
    if is_to_host:
        source.record_stream(stream)
        return copied, Copy(event, on, True, copied)
    _reading[on] = event
    return copied, Copy(event, on, False, source, copied)


def _empty(like: Tensor, device: torch.device, pins: bool) -> Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=device, pin_memory=pins
    )


def settle() -> None:
    """Let the host wait until nothing reads its memory any more; see [Note: host memory under
    way].
    """
    while _reading:
        _reading.popitem()[1].synchronize()


def arrived() -> None:
    """Let the host wait until all that stays in its memory (an optimizer's state) is there."""
    while _arriving:
        _arriving.popitem()[1].synchronize()


def pinned(tensor: Tensor) -> Tensor:
    """The same values in pinned host memory."""
    return tensor.pin_memory()


def _module(device: torch.device | str) -> Any:
    return torch.get_device_module(device)


def _current(device: str) -> torch.device:
    return torch.device(device, _module(device).current_device())


@cache
def _stream(device: torch.device, is_to_host: bool) -> Any:
    """One for each direction: both can be busy at once."""
    return _module(device).Stream(device)
