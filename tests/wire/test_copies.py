"""Copies between host and device: in which order streams are asked, on a device that is not there.

What they compute is tested beside a double (`kit.offload`), and on a GPU where there is one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from compiled_fsdp.wire import copies

if TYPE_CHECKING:
    from collections.abc import Iterator


class Device:
    """What is asked of `torch.cuda`, and a log of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, "main")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "aside")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.now = stream.name
        yield
        self.now = "main"


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name} waits for an event")

    def record_event(self) -> Event:
        self.device.log.append(f"event on {self.name}")
        return Event(self.device)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def synchronize(self) -> None:
        self.device.log.append("the host waits for an event")


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()

    def copy(_: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        made.log.append(f"{'late ' * non_blocking}copy on {made.now}")

    def keep(_: Tensor, stream: Stream) -> None:
        made.log.append(f"kept for {stream.name}")

    copies._stream.cache_clear()
    with (
        FakeTensorMode(),
        mock.patch.object(copies, "_module", return_value=made),
        mock.patch.object(Tensor, "copy_", copy),
        mock.patch.object(Tensor, "record_stream", keep),
    ):
        yield made
    copies._stream.cache_clear()
    copies._reading.clear()
    copies._arriving.clear()


def test_the_device_is_asked_what_torch_has() -> None:
    asked = [name for name in vars(Device) if not name.startswith("_")]
    assert [name for name in asked if not hasattr(torch.cuda, name)] == []
    for ours, theirs in ((Stream, torch.cuda.Stream), (Event, torch.cuda.Event)):
        assert [n for n in vars(ours) if not (n.startswith("_") or hasattr(theirs, n))] == []


def test_to_the_device(device: Device) -> None:
    """Its stream waits, not the host; which waits before it lets anybody write to the source."""
    copied, work = copies.begin(torch.empty(4), "cuda", False)
    assert copied.device == torch.device("cuda", 0)
    assert device.log == ["aside waits for main", "late copy on aside", "event on aside"]
    work.wait()
    assert device.log[3:] == ["main waits for an event"]
    copies.settle()
    copies.settle()
    assert device.log[4:] == ["the host waits for an event"]
    assert not copies._under_way


def test_to_the_host(device: Device) -> None:
    """The host waits; the source may be freed before, and its memory is kept until it is copied."""
    copied, work = copies.begin(torch.empty(4, device="cuda"), copies.HOST, False)
    assert copied.device.type == "cpu"
    assert device.log == [
        "aside waits for main",
        "late copy on aside",
        "event on aside",
        "kept for aside",
    ]
    work.wait()
    copies.settle()
    assert device.log[4:] == ["the host waits for an event"]


def test_an_activation_to_the_host(device: Device) -> None:
    """The device's stream waits, not the host; until then the source is held, not kept for another
    stream, so that its memory is free behind the wait. What comes back has the same strides.
    """
    source = torch.empty(4, 2, device="cuda").t()
    copied, work = copies.begin(source, copies.HOST, False, is_for_device=True)
    assert (copied.device.type, copied.stride()) == ("cpu", (1, 2))
    assert device.log == ["aside waits for main", "late copy on aside", "event on aside"]
    assert any(held is source for held in work.holds)
    work.wait()
    assert device.log[3:] == ["main waits for an event"]
    assert not work.holds
    copies.settle()
    assert device.log[4:] == [], "nothing reads the host's memory"
    back, _ = copies.begin(copied, "cuda", False)
    assert back.stride() == (1, 2)


def test_what_stays_on_the_host(device: Device) -> None:
    """An optimizer's state: the device's stream waits for its memory, the host at the end."""
    rests = torch.empty(4)
    copied, work = copies.begin(
        torch.empty(4, device="cuda"), copies.HOST, True, is_for_device=True, into=rests
    )
    assert copied is rests
    work.wait()
    assert device.log[3:] == ["main waits for an event"]
    copies.arrived()
    copies.arrived()
    assert device.log[4:] == ["the host waits for an event"]


def test_one_stream_for_each_direction(device: Device) -> None:
    one: Any = torch.device("cuda", 0)
    assert copies._stream(one, True) is copies._stream(one, True)
    assert copies._stream(one, True) is not copies._stream(one, False)
