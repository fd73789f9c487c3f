"""A run of a graph on a device: when its kernels ran, whoever launched them, and when none computed
because a collective was under way.

The CPU runs ahead: it launches kernels and returns from starts and waits at once. So a collective
is the kernel of NCCL that its start launched, and it is exposed from when the last kernel before
its end was done, if none computes when it ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from compiled_fsdp.inspection.profiles import Event
from compiled_fsdp.inspection.routing import routed

if TYPE_CHECKING:
    from compiled_fsdp.dump.layout import Interval, MeasuredRun, Times
    from compiled_fsdp.inspection.dump_folder import DumpedGraph
    from compiled_fsdp.inspection.profiles import Kernel


AT_ONCE = 1e-7  # seconds around the end of a collective in which what waits for it begins


class Device:
    """The kernels of a profile; false without any."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels
        known = [(k.launch, k) for k in kernels if k.launch is not None]
        self._launched = sorted(known, key=lambda entry: entry[0].begin)
        self._times = [launch.begin for launch, _ in self._launched]
        self._done = list(accumulate((kernel.event.end for _, kernel in self._launched), max))
        computing = [kernel.event for kernel in kernels if kernel.is_computation]
        self._begins = [event.begin for event in computing]
        self._reached = list(accumulate((event.end for event in computing), max))

    def __bool__(self) -> bool:
        return bool(self.kernels)

    def launched(self, begin: float, end: float, thread: object = None) -> list[Kernel]:
        """Kernels that were launched in this time, by this thread if one is named."""
        found = self._launched[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        return [k for launch, k in found if thread is None or launch.thread == thread]

    def communication_in(self, start: Event) -> list[Kernel]:
        """The kernels of NCCL that a start launched;
        on one rank, what it launched in their place.
        """
        found = self.launched(start.begin, start.end, start.thread)
        return [k for k in found if k.is_communication] or found

    def shown(self, event: Event) -> Event:
        """An interval of the CPU as what it launched ran; of no length if it launched nothing."""
        found = [kernel.event for kernel in self.launched(event.begin, event.end)]
        begin = min((e.begin for e in found), default=event.begin)
        return Event(event.name, begin, max((e.end for e in found), default=begin), None)

    def step(self, span: Event) -> Event:
        """A step as the device runs it: of those that overlap there, as when one's last kernels run
        while the next one's begin, each begins where the one before ended.
        """
        found, before = self.shown(span), bisect_left(self._times, span.begin)
        begin = max(found.begin, self._done[before - 1]) if before else found.begin
        return Event(span.name, min(begin, found.end), found.end, None)

    def exposed(self, kernel: Kernel) -> float:
        """Seconds up to the end of a collective in which nothing was computed."""
        end = kernel.event.end
        before = bisect_left(self._begins, end - AT_ONCE)
        reached = self._reached[before - 1] if before else kernel.event.begin
        return max(0.0, end - max(reached, kernel.event.begin))

    def times(
        self, graph: DumpedGraph, begin: float, end: float, thread: object, starts: list[Event]
    ) -> tuple[float, MeasuredRun]:
        """When a run of a graph that the CPU launched from `begin` to `end` began on the device,
        and its times in the form of a predicted run.
        """
        ran = self.launched(begin, end, thread)
        first = min((kernel.event.begin for kernel in ran), default=begin)
        last = max((kernel.event.end for kernel in ran), default=first)
        found: list[Times] = []
        for start in starts[: len(graph.timeline["collectives"])]:
            kernels = self.communication_in(start)
            begins = min((k.event.begin for k in kernels), default=first) - first
            ends = max((k.event.end for k in kernels), default=first) - first
            exposed = max((self.exposed(k) for k in kernels if k.is_communication), default=0.0)
            found.append(
                {
                    "issued": begins,
                    "issuing": 0.0,
                    "begin": begins,
                    "end": ends,
                    "awaited": ends - exposed,
                    "exposed": exposed,
                }
            )
        compute: list[Interval] = [
            (k.event.begin - first, k.event.end - first, k.event.name, "")
            for k in ran
            if k.is_computation
        ]
        return first, {
            "total": last - first,
            "times": found,
            "compute": sorted(compute),
            "has_arrivals": True,
            "routed": routed(starts, graph),
            "of": graph.fingerprint,
        }
