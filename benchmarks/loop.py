"""The training loop: time budget, progress, validation points, a clean stop, and the outcome."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field

import torch
import torch.distributed as dist
from measure import CommReport, PeakMemory
from options import Options
from screen import Bar, Screen
from trainer import WARMUP, Phase, Trainer

CURVE_BATCHES, FINAL_BATCHES, NUM_POINTS = 8, 32, 6
# What validation and the measured steps after training cost, in training steps.
OTHER_STEPS = 40
# A run whose length the time budget sets is cut short only when it is this much too slow.
PATIENCE = 1.2


@dataclass(slots=True)
class Outcome:
    """What a run has given so far; losses are means over ranks, one per step from step 0 on."""

    name: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    tokens_per_step: int = 0
    stopped_by: str | None = None
    peaks: list[PeakMemory] = field(default_factory=list)
    comms: list[CommReport] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all ranks over the steps of this session, its first left out."""
        return self.tokens_per_step * len(self.step_s) / (sum(self.step_s) or 1.0)

    def step_deciles(self) -> tuple[float, float, float]:
        """Return the first decile, the median and the last decile of the step times."""
        times = self.step_s if len(self.step_s) > 1 else (self.step_s or [0.0]) * 2
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        return deciles[0], statistics.median(times), deciles[-1]


class Budget:
    """When to stop: at a deadline, after a given step, or on a signal; rank 0 decides for all."""

    def __init__(self, options: Options, minutes: float | None) -> None:
        """Start the clock; `minutes` is this run's part of the budget."""
        self.start = time.monotonic()
        self.seconds = minutes * 60 if minutes else None
        self.limit = self.seconds and self.seconds * (PATIENCE if options.steps is None else 1.0)
        if options.compare:
            self.limit = None  # All variants take the same number of steps.
        self.stop_after = options.stop_after
        self.signal: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Make Ctrl-C and SIGTERM stop after the running step instead of killing."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number).name

    def stop_reason(self, num_done: int) -> str | None:
        """Return why to stop now, or None."""
        if self.signal:
            return self.signal
        if self.stop_after is not None and num_done >= self.stop_after:
            return "--stop-after"
        if self.limit is not None and self._elapsed() > self.limit:
            return "the time budget"
        return None

    def num_steps(self, step_s: float) -> int:
        """Return how many further steps of `step_s` fit."""
        assert self.seconds is not None
        return max(1, int((self.seconds - self._elapsed()) / step_s) - OTHER_STEPS)

    def _elapsed(self) -> float:
        return time.monotonic() - self.start


class Loop:
    """Train one variant from step `len(outcome.losses)` on, and fill `outcome`."""

    def __init__(
        self,
        trainer: Trainer,
        screen: Screen,
        budget: Budget,
        outcome: Outcome,
        save: Callable[[], object],
    ) -> None:
        """Take the parts, and what writes a checkpoint; nothing is run."""
        self.trainer, self.screen, self.budget, self.outcome, self.save = (
            trainer,
            screen,
            budget,
            outcome,
            save,
        )
        outcome.tokens_per_step = trainer.tokens_per_step

    def run(self) -> None:
        """Train to the horizon or to a stop; the first step of a session compiles."""
        trainer, outcome = self.trainer, self.outcome
        if (
            outcome.losses and len(outcome.losses) == trainer.horizon
        ):  # restarted after the last step
            return
        with self.budget.listening(), self.screen.progress(trainer.variant.name) as bar:
            start = time.monotonic()
            if not outcome.losses:
                self._validate_first()
            first_s = self._step(bar, self._phase)
            if trainer.variant.is_compiled:
                outcome.compile_s = time.monotonic() - start
            self._after_step(first_s)
            while outcome.stopped_by is None and len(outcome.losses) != trainer.horizon:
                outcome.step_s.append(self._step(bar, nullcontext))
                self._after_step(statistics.median(outcome.step_s))

    def finish(self) -> None:
        """Take the last validation, on more text than the points of the curve."""
        loss = self.trainer.validate(FINAL_BATCHES)
        self.outcome.validation.append((len(self.outcome.losses), loss))

    def measure(self) -> None:
        """Profile further steps; for the end, since they move the weights on."""
        peak, comm = self.trainer.measure()
        self.outcome.peaks = [
            PeakMemory(*map(int, numbers)) for numbers in from_all([*astuple(peak)])
        ]
        self.outcome.comms = [
            CommReport(*map(int, n[:3]), *n[3:]) for n in from_all([*astuple(comm)])
        ]

    def _phase(self, name: str) -> AbstractContextManager[object]:
        is_compiled = self.trainer.variant.is_compiled
        return self.screen.phase(f"compiling {name}") if is_compiled else nullcontext()

    def _validate_first(self) -> None:
        loss = self.trainer.validate(CURVE_BATCHES)
        self.outcome.validation.append((0, loss))
        self.screen.line(f"validation loss before training: {loss:.3f} nats/byte")

    def _step(self, bar: Bar, phase: Phase) -> float:
        """Take a step, agree with the other ranks on loss and stop, and return the seconds."""
        outcome, index = self.outcome, len(self.outcome.losses)
        start = time.monotonic()
        loss = self.trainer.step(index, phase)
        reason = self.budget.stop_reason(index + 1)
        news = torch.tensor([loss, float(dist.get_rank() == 0 and reason is not None)])
        dist.all_reduce(news)
        seconds = time.monotonic() - start
        outcome.losses.append(news[0].item() / dist.get_world_size())
        if news[1]:
            outcome.stopped_by = reason or "rank 0"
        self._show(bar, seconds)
        return seconds

    def _show(self, bar: Bar, seconds: float) -> None:
        outcome, horizon = self.outcome, self.trainer.horizon
        done = len(outcome.losses)
        rate = outcome.tokens_per_step / (statistics.median(outcome.step_s[-50:] or [seconds]))
        eta_s = ((horizon or done) - done) * outcome.tokens_per_step / rate
        recent = statistics.mean(outcome.losses[-10:])
        bar.update(done, horizon, recent, rate, eta_s)

    def _after_step(self, step_s: float) -> None:
        """Set the horizon once the step time is known, validate at the points of the curve, and
        save every so often.
        """
        trainer, outcome = self.trainer, self.outcome
        done = len(outcome.losses)
        if trainer.horizon is None and done >= WARMUP:
            trainer.horizon = agree(done + self.budget.num_steps(step_s))
        if trainer.horizon is None or done == trainer.horizon:
            return
        every = max(1, trainer.horizon // NUM_POINTS)
        if done % every == 0 and done + every / 2 < trainer.horizon:
            outcome.validation.append((done, trainer.validate(CURVE_BATCHES)))
        save_every = trainer.options.save_every
        if save_every is not None and done % save_every == 0:
            self.save()


def agree(number: int) -> int:
    """Return rank 0's number on every rank."""
    tensor = torch.tensor(number)
    dist.broadcast(tensor, 0)
    return int(tensor)


def from_all(numbers: list[float]) -> list[list[float]]:
    """The numbers of every rank, by rank; float64 holds whole numbers below 2**53 exactly."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return [tensor.tolist() for tensor in theirs]
