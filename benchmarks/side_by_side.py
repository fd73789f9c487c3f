"""Run all sides of a comparison in one group of processes, taking turns, and say what each step
cost.

The launcher (`run_local`, or two hosts of `hosts.py`) starts this file on every rank with a
`Comparison` as JSON. The sides take turns in rounds, so that drift of the machine meets all of
them. The timed steps of a round follow each other without a barrier, and a step takes as long as on
the slowest rank. All that train must lose alike; if not, nothing is reported.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import PREDICTIONS
from hosts import gloo_rate, sent_bytes
from job import Job, Step
from matrix_optimizers import SECONDS
from measure import communication, peak_tensor_bytes
from moe import config_of
from screen import Screen, leave
from variants import VARIANTS

NUM_WARMUP = 2
# The losses of the first steps are compared: later ones drift apart, as AdamW divides rounding by
# rounding.
NUM_COMPARED, TOLERANCE = 6, 5e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """The job, its sides, and how often: `steps` timed ones per side in each of `rounds`.

    memory: also measure exact and resident peaks; to be asked of one side at a time.
    """

    job: Job
    variants: tuple[str, ...]
    rounds: int
    steps: int
    memory: bool = False

    def to_json(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Comparison:
        """The inverse."""
        fields = json.loads(text)
        job = fields.pop("job")
        config = config_of(job.pop("config"))
        return Comparison(Job(config, **job), tuple(fields.pop("variants")), **fields)


@dataclass(slots=True)
class Side:
    """One variant under way: its step, and what its steps cost on this rank."""

    name: str
    step: Step
    num_steps: int = 0
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    core: list[float] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        """Take some steps that are not timed."""
        dist.barrier()
        for _ in range(num_steps):
            self._step()

    def time(self, num_steps: int) -> None:
        """Time some steps, one right after the other and after one that is not timed: what a step
        leaves under way for the next is on the wire while that one runs, not in a barrier between
        them that nobody counts.
        """
        self.run(1)
        for _ in range(num_steps):
            sent, core, start = sent_bytes(), time.process_time(), time.perf_counter()
            self._step()
            self.times.append(time.perf_counter() - start)
            self.core.append(time.process_time() - core)
            self.sent.append(sent_bytes() - sent)

    def _step(self) -> None:
        loss = self.step(self.num_steps)
        self.num_steps += 1
        if loss is not None:
            self.losses.append(loss.item())


# --- on each rank ---------------------------------------------------------------------------------


def work(comparison: Comparison, output: Path) -> None:
    """Build, warm up and time all sides on this rank; rank 0 writes what was seen."""
    torch.set_num_threads(1)
    _step_onto_own_core()  # first, so that the threads of gloo come along
    dist.init_process_group("gloo")
    screen = Screen(dist.get_rank())
    result: dict[str, Any] = {"gloo": {num: gloo_rate(num) for num in (1, 2)}}
    sides = []
    num_pieces = len(comparison.variants) * (comparison.rounds + 2)
    with screen.pieces(num_pieces) as done:
        for name in comparison.variants:
            start = time.perf_counter()
            sides.append(Side(name, VARIANTS[name].build(comparison.job)))
            sides[-1].run(NUM_WARMUP)
            done(f"{name} is ready after {time.perf_counter() - start:.0f} s")
        for number in range(comparison.rounds):
            for side in sides:
                side.time(comparison.steps)
                seconds = statistics.median(side.times[-comparison.steps :])
                done(
                    f"round {number + 1} of {comparison.rounds}, {side.name}: {seconds:.3f} s/step"
                )
        differences = compare_losses({side.name: side.losses for side in sides})
        result["variants"] = {}
        for side in sides:
            result["variants"][side.name] = summarize(side, comparison.memory)
            result["variants"][side.name]["loss_difference"] = differences.get(side.name)
            done(f"{side.name} is profiled")
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    leave()


def summarize(side: Side, with_memory: bool) -> dict[str, Any]:
    """Return the results of one side, the same on every rank: the slowest or largest one's."""
    times = torch.tensor(side.times, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found = {"sent_bytes": statistics.median(side.sent), "core_s": statistics.median(side.core)}
    prediction = PREDICTIONS.get(side.name)
    if prediction is not None:
        found["predicted_s"] = prediction.predicted() or math.nan
        found["measured_s"] = statistics.median(prediction.seconds[-len(side.times) :])
    if SECONDS.get(side.name):
        found["optimizers_s"] = statistics.median(SECONDS[side.name][-len(side.times) :])
    if with_memory:
        found |= memory_of(side.step)
    elif VARIANTS[side.name].trains:
        report = communication(lambda: side.step(0), repeats=1)
        found |= asdict(report)
    numbers = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {"times": times.tolist(), **dict(zip(found, numbers.tolist(), strict=True))}


def memory_of(step: Step) -> dict[str, float]:
    """Exact tensor bytes and resident bytes, at rest and at the peak of a step."""
    peak = peak_tensor_bytes(lambda: step(0))
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's mark of the peak starts anew
    at_rest = _status_bytes("VmRSS")
    step(0)
    return {
        "tensor_peak": peak.peak,
        "tensor_at_rest": peak.at_rest,
        "resident_peak": _status_bytes("VmHWM"),
        "resident_at_rest": at_rest,
    }


def compare_losses(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return by how much the losses of each side differ from the first one's that the same
    optimizer trains, on any rank.

    Raises:
        RuntimeError: by more than TOLERANCE, or its own tolerance, within the first NUM_COMPARED
            steps.
    """
    training = {
        name: found[:NUM_COMPARED] for name, found in losses.items() if VARIANTS[name].trains
    }
    if not training:
        return {}
    gaps = {
        name: largest_gap(found, training[_first(name, training)])
        for name, found in training.items()
    }
    worst = torch.tensor(list(gaps.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    gaps = dict(zip(gaps, worst.tolist(), strict=True))
    wrong = {
        name: gap
        for name, gap in gaps.items()
        if not gap <= max(TOLERANCE, VARIANTS[name].tolerance)
    }
    if wrong:
        raise RuntimeError(
            f"comparing losses with {_first(next(iter(wrong)), training)}'s over {NUM_COMPARED} "
            f"steps: {wrong} differ by more than {TOLERANCE}. These sides do not do the same job, "
            "so their times must not be compared"
        )
    return gaps


def _first(name: str, training: Iterable[str]) -> str:
    """The side that another one is compared with: of those that the same optimizer trains, stock's,
    or the first.
    """
    own = VARIANTS[name].optimizer
    alike = [other for other in training if VARIANTS[other].optimizer == own]
    return "stock_eager" if "stock_eager" in alike else alike[0]


def largest_gap(ours: list[float], theirs: list[float]) -> float:
    """Between losses of the same step; infinite if one is no number."""
    gaps = (
        torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    ).abs()
    return gaps.nan_to_num(nan=math.inf).max().item()


def _step_onto_own_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})


def _status_bytes(key: str) -> int:
    """A line of /proc/self/status, which is in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


# --- the launcher ---------------------------------------------------------------------------------


def command_for(comparison: Comparison, output: Path) -> list[str]:
    """What runs a comparison on one rank."""
    return [sys.executable, str(Path(__file__).resolve()), comparison.to_json(), str(output)]


def run_local(comparison: Comparison, world: int = 2) -> dict[str, Any]:
    """Run a comparison on ranks of this machine and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        python, *script = command_for(comparison, output)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        subprocess.run([python, *torchrun, *script], env=environment, check=True)
        seen: dict[str, Any] = json.loads(output.read_text())
        return seen


if __name__ == "__main__":
    work(Comparison.from_json(sys.argv[1]), Path(sys.argv[2]))
