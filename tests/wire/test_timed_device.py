"""Collectives of a timed world on a device: by a double whose streams are clocks."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.timed import ranks

from compiled_fsdp.wire import timed_device

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = torch.device("meta")  # what plays the device; nothing is delivered there


class Stream:
    """A clock: when what it was given so far is done, in seconds."""

    def __init__(self, device: object = None) -> None:
        self.at = 0.0

    def wait_stream(self, other: Stream) -> None:
        self.at = max(self.at, other.at)

    def wait_event(self, event: Event) -> None:
        self.at = max(self.at, event.at)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.has_time, self.at = enable_timing, 0.0

    def record(self, stream: Stream) -> None:
        self.at = stream.at

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, as torch has it."""
        assert self.has_time
        assert other.has_time
        return 1e3 * (other.at - self.at)


class Device:
    """A module of a device, as `torch.cuda` is one."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.current = Stream()
        self.is_capturing = False

    def current_stream(self, device: object) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: object) -> None: ...

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def compute(self, seconds: float) -> None:
        self.current.at += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    double = Device()
    monkeypatch.setattr(timed_device, "module_of", lambda device: double)
    monkeypatch.setattr(timed_device, "spin", double.compute)
    monkeypatch.setattr(timed_device, "can_spin", lambda device: device == LATE)
    timed_device.stream_of.cache_clear()
    yield double
    timed_device.stream_of.cache_clear()


def test_a_collective_occupies_a_stream(device: Device) -> None:
    """The second begins when the first is through; the stream that awaits them waits for what
    computation does not hide, and the host for nothing.
    """
    with ranks(4, bandwidth=4.0, latency=0.5) as world:
        mine, everyones = torch.empty(2, device=LATE), torch.empty(8, device=LATE)
        begin = time.perf_counter()
        gather = dist.all_gather_into_tensor(everyones, mine, async_op=True)
        scatter = dist.reduce_scatter_tensor(mine, everyones, async_op=True)
        device.compute(9.0)  # each takes 0.5 + 24 / 4
        gather.wait()
        assert device.current.at == pytest.approx(9.0)
        scatter.wait()
        assert device.current.at == pytest.approx(13.0)
        assert time.perf_counter() - begin < 4.0
        assert [c.blocked for c in world.carried] == [0.0, 0.0], "not known yet"
        world.settle()
        assert [c.blocked for c in world.carried] == pytest.approx([0.0, 4.0], abs=1e-4)
        assert [c.seconds for c in world.carried] == [6.5, 6.5]
        world.settle()
        assert world.carried[1].blocked == pytest.approx(4.0), "once"


def test_it_begins_behind_what_it_sends(device: Device) -> None:
    with ranks(4, bandwidth=4.0):
        device.compute(3.0)
        dist.all_reduce(torch.empty(2, device=LATE))
        assert device.current.at == pytest.approx(3.0 + 2 * 6 / 4)


def test_wires_are_apart(device: Device) -> None:
    """What goes over the link does not wait for the network."""
    with ranks(4, per_node=2, bandwidth=1.0):
        inside = dist.new_group([0, 1])
        around = dist.all_reduce(torch.empty(2, device=LATE), async_op=True)
        dist.all_reduce(torch.empty(2, device=LATE), group=inside)
        assert device.current.at == pytest.approx(0.0, abs=1e-4)
        around.wait()
        assert device.current.at == pytest.approx(12.0)


def test_in_a_capture_no_time_is_read(device: Device) -> None:
    with ranks(2, bandwidth=4.0) as world:
        device.is_capturing = True
        dist.all_reduce(torch.empty(2, device=LATE))
        assert device.current.at == pytest.approx(2.0)
        world.settle()
        assert world.carried[0].blocked == 0.0


def test_what_is_delivered(device: Device) -> None:
    """Beside the wire, before it is done."""
    carried: Any = type("Carried", (), {"wire": "network", "seconds": 2.0})()
    x, out = torch.ones(2), torch.zeros(2)
    copied: list[float] = []

    def deliver() -> None:
        out.copy_(x)
        device.compute(5.0)
        copied.append(device.current.at)

    work = timed_device.begin(carried, [x], [out], deliver)
    assert device.current.at == 0.0
    work.wait()
    assert (copied, device.current.at) == ([5.0], 5.0)
    assert torch.equal(out, x)
