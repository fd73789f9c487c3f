"""Steps of a script's optimizer: when they end, what was communicated between two ends, and what
the step before the timed ones computes and allocates.

A step is what lies between two ends of `optimizer.step()`, of the first optimizer that steps.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.eager.held import (
    gradients_that_stay,
    held_gradients,
    num_bytes,
    rest_of_new_units,
)
from compiled_fsdp.inspection import measured
from compiled_fsdp.ir.flops import formulas
from compiled_fsdp.options import now
from compiled_fsdp.torch_private.tracing import is_profiling
from compiled_fsdp.wire.runs import all_runs

from .found import Found, Kind, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from compiled_fsdp.wire.world import Carried, World

log = logging.getLogger(__name__)

PROFILED = 2  # steps: what is freed in the first was allocated before, and its size is not known

ITS_OWN = (
    "the script profiles its first steps itself, so operations and the peak of memory were not "
    "counted; a larger --skip looks at later steps"
)
LAST = "compiled_fsdp::last step left out"
NO_STEP = (
    "the script ended and no torch optimizer has stepped in this process: let it train, as the one "
    "rank that it is. One that starts its ranks itself (mp.spawn) has to be written for torchrun"
)
HELD = "gradients of before"  # of what a peak consists of


class SimulationError(Exception):
    """Nothing can be said of what was run."""


class Probe:
    """Looks at the last steps that are not timed: counting costs time."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.flops: float | None = None
        self.peak: int | None = None
        self.notes: list[str] = (
            []
            if skip > PROFILED
            else [
                f"operations and the peak of memory are counted in the last of the steps that are "
                f"left out, which --skip {skip} has too few of: it needs {PROFILED + 1}"
            ]
        )
        self.profile: Any = None
        self._last: Any = None
        self._patches: list[Any] = []
        self._theirs: list[Any] = []  # that are prepared, or on
        self._is_starting = False
        self._stay: Callable[[], int] = lambda: 0

    def after(self, number: int, params: Iterable[torch.Tensor] = ()) -> None:
        """After so many steps of these parameters."""
        if self.skip <= PROFILED:
            return
        if number == self.skip - PROFILED:
            self._stay = gradients_that_stay(params)
            self._start()
        if number == self.skip - 1 and self.profile is not None:
            self._last = torch.profiler.record_function(LAST)
            self._last.__enter__()
        if number == self.skip:
            self.stop()

    def watch(self) -> None:
        """From now on, give way to profilers of the script: there can be one at a time."""
        cls: Any = torch.profiler.profile
        prepare, stop = cls.prepare_trace, cls.stop_trace

        def prepare_theirs(profile: Any) -> None:
            if not self._is_starting:
                if self.profile is not None and self.flops is None:
                    self.stop()
                    self.profile = self.flops = self.peak = None
                    self.notes.append(ITS_OWN)
                self._theirs.append(profile)
            prepare(profile)

        def stop_theirs(profile: Any) -> None:
            self._theirs = [known for known in self._theirs if known is not profile]
            stop(profile)

        self._patches = [
            mock.patch.object(cls, "prepare_trace", prepare_theirs),
            mock.patch.object(cls, "stop_trace", stop_theirs),
        ]
        for patch in self._patches:
            patch.start()

    def _start(self) -> None:
        if is_profiling() or self._theirs:
            self.notes.append(ITS_OWN)
            return
        self._is_starting = True
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            record_shapes=True,
        )
        self.profile.start()
        self._is_starting = False

    def finish(self) -> None:
        """Stop, and look no more."""
        self.stop()
        for patch in self._patches:
            patch.stop()
        self._patches = []

    def stop(self) -> None:
        """Stop whatever is on."""
        if self._last is not None:
            self._last.__exit__(None, None, None)
            self._last = None
        if self.profile is not None and self.profile.profiler.kineto_results is None:
            self.profile.stop()
            peak = measured.peak(self.profile, "cpu")  # above what there was as it began
            self.peak = None if peak is None else peak + self._stay()
            self.flops, uncounted = flops_in(self.profile)
            if uncounted:
                self.notes.append(f"operations of {', '.join(sorted(uncounted))} were not counted")


def flops_in(profile: Any) -> tuple[float, set[str]]:
    """Operations of matmuls and attentions from the range `LAST` on, by their formulas, and the
    kernels that a profile says too little of: a convolution has the size of its output.

    torch's own counter is a dispatch mode, under which Dynamo gives compiled calls up for good.
    """
    events = profile.events()
    begin = max((e.time_range.start for e in events if e.name == LAST), default=None)
    by_name = {f"aten::{op.__name__}": formula for op, formula in formulas().items()}
    numbers: dict[int, float | None] = {}
    heavy = [
        event
        for event in events
        if event.name in by_name and begin is not None and event.time_range.start >= begin
    ]
    for event in heavy:
        numbers[id(event)] = _number(by_name[event.name], event.input_shapes)
    # a grouped matmul of the CPU calls a matmul for each group
    outermost = [event for event in heavy if not _is_inside(event, numbers)]
    total = sum(numbers[id(event)] or 0.0 for event in outermost)
    return total, {event.name for event in outermost if numbers[id(event)] is None}


def _is_inside(event: Any, numbers: dict[int, float | None]) -> bool:
    """Whether what calls it is counted already."""
    parent = event.cpu_parent
    while parent is not None:
        if numbers.get(id(parent)) is not None:
            return True
        parent = parent.cpu_parent
    return False


def _number(formula: Any, shapes: list[list[int]]) -> float | None:
    """By the formula, from the shapes of arguments, which are empty for numbers; as many of the
    first as it takes.
    """
    tensors = [torch.empty(shape, device="meta") if shape else None for shape in shapes]
    for count in range(len(tensors), 1, -1):
        try:
            return float(formula(*tensors[:count]))
        except Exception:  # noqa: BLE001  # formulas are torch's or anybody's, and assert what they like
            log.debug("no formula for the first %d of %s", count, shapes)
    return None


class EnoughError(BaseException):
    """The script has shown what it does; not for `except Exception` to catch."""


class Steps:
    """Ends of steps, and how many collectives there had been.

    most: how many are timed, after which the script is ended; None for all that it makes.
    """

    def __init__(self, world: World, skip: int, most: int | None = None) -> None:
        self.world, self.skip, self.most, self.began = world, skip, most, now()
        self.ends: list[tuple[float, int]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.probe = Probe(skip)
        self.held: dict[str, int] = {}
        # Steps of other optimizers, and how many of the first there had been.
        self.others: list[tuple[torch.optim.Optimizer, int]] = []
        self._rest = rest_of_new_units()

    def before_graph(self, record: str) -> None:
        """A graph starts to run: note what gradients take, at most, before it. Not in the first
        step, which may begin without those that later ones begin with, nor in one that is timed:
        to look takes a millisecond for some hundred parameters.
        """
        if 0 < len(self.ends) < max(self.skip, 2):
            self.held[record] = max(self.held.get(record, 0), held_gradients(self._params()))

    def record_of(self, text: str) -> GraphRecord:
        """A graph, with those gradients in its peak."""
        record, held = GraphRecord.parse(text), self.held.get(text, 0)
        if not held:
            return record
        kinds = {**record.peak_kinds, HELD: held}
        return replace(record, peak=record.peak + held, peak_kinds=kinds)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """After a step of any optimizer.

        Raises:
            EnoughError: as many as are timed are over.
        """
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        if optimizer is not self.optimizers[0]:
            self.others.append((optimizer, len(self.ends)))
        else:
            self.world.settle()
            self.ends.append((time.perf_counter(), len(self.world.carried)))
            self.probe.after(len(self.ends), self._params())
            if len(self.ends) == self.skip:  # what looking took is in no step
                self.world.settle()
                if self._is_on_device:
                    torch.accelerator.reset_peak_memory_stats()
                self.ends[-1] = (time.perf_counter(), len(self.world.carried))
            if self._is_enough:
                raise EnoughError

    @property
    def _is_enough(self) -> bool:
        return self.most is not None and len(self.ends) >= max(self.skip, 1) + self.most

    @property
    def _is_on_device(self) -> bool:
        """Whether an accelerator computes; parameters may be on the host."""
        return torch.accelerator.is_available() and torch.accelerator.max_memory_allocated() > 0

    def _params(self) -> list[torch.Tensor]:
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"]]

    def memory(self) -> Memory:
        """What the optimizers hold, and what a step needs beside it."""
        states = [v for o in self.optimizers for state in o.state.values() for v in state.values()]
        records = [self.record_of(run.record) for run in all_runs() if run.last > self.began]
        largest = max(records, key=lambda record: record.peak, default=None)
        on_device, rest = self._is_on_device, self._rest(self.optimizers)
        return Memory(
            parameters=num_bytes(self._params()),
            **rest._asdict(),
            optimizer=num_bytes(states),
            peak=None if on_device else self.probe.peak,
            device_peak=torch.accelerator.max_memory_allocated() if on_device else None,
            device_reserved=torch.accelerator.max_memory_reserved() if on_device else None,
            by_kind={} if largest is None else largest.peak_kinds,
        )

    def _of_others(self, begin: int, end: int) -> list[str]:
        """That a step is one of the first optimizer, where others make another number."""
        found = []
        for other in self.optimizers[1:]:
            number = sum(1 for who, at in self.others if who is other and begin <= at < end)
            if number != end - begin:
                found.append(
                    f"a step is one of the first optimizer that stepped, of {end - begin}; another "
                    f"made {number} in the same time. The medians are those of the first's steps, "
                    "and what is per step is a mean"
                )
        return found

    def found(self) -> Found:
        """The summary, without the first steps.

        Raises:
            SimulationError: too few steps.
        """
        if not self.ends:
            raise SimulationError(NO_STEP)
        ends = self.ends[max(self.skip - 1, 0) :]
        if len(ends) < 2:
            raise SimulationError(
                f"the script ended after {len(self.ends)} steps of its optimizer. The first "
                f"{self.skip} are left out, since they compile, and one more is needed at least: "
                "let it run longer, or pass a smaller --skip"
            )
        times = [after - before for (before, _), (after, _) in pairwise(ends)]
        carried = self.world.carried[ends[0][1] : ends[-1][1]]
        kinds = _kinds(carried, len(times))
        busy: dict[str, float] = defaultdict(float)
        for kind in kinds:
            busy[kind.wire] += kind.wire_s
        blocked = [
            sum(c.blocked for c in self.world.carried[begin:end])
            for (_, begin), (_, end) in pairwise(ends)
        ]
        alone = median(t - waited for t, waited in zip(times, blocked, strict=True))
        world = self.world
        return Found(
            rank=world.rank,
            world=world.size,
            ranks_per_node=world.ranks_per_node,
            wires=[world.network] if world.ranks_per_node == 1 else [world.link, world.network],
            num_skipped=len(self.ends) - len(times),
            num_steps=len(times),
            was_ended=self._is_enough,
            step_s=median(times),
            fastest_s=min(times),
            slowest_s=max(times),
            exposed_s=median(blocked),
            floor_s=max([alone, *busy.values()]),
            copying_s=sum(c.copying for c in carried) / len(times),
            late_s=sum(c.late for c in carried) / len(times),
            by_future=sum(c.is_by_future for c in carried) / len(times),
            kinds=kinds,
            memory=self.memory(),
            flops=self.probe.flops,
            notes=[
                *self.probe.notes,
                *self._of_others(len(self.ends) - len(times), len(self.ends)),
            ],
        )


def _kinds(carried: list[Carried], num_steps: int) -> list[Kind]:
    groups = defaultdict(list)
    for each in carried:
        groups[each.kind, each.wire].append(each)
    return [
        Kind(
            *key,
            len(found) / num_steps,
            sum(c.num_bytes for c in found) / num_steps,
            sum(c.seconds for c in found) / num_steps,
            sum(c.blocked for c in found) / num_steps,
        )
        for key, found in sorted(groups.items())
    ]
