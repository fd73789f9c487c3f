"""Simulated against measured: a step on two hosts joined by a shaped wire, and the same step as one
rank of a timed world (`python -m compiled_fsdp simulate`) whose wire has the same rate. Needs root;
see `hosts.py`.

The simulated rank is given what raw exchanges over the wire take while nothing else runs, as one
would measure a cluster's network before: bytes per second, and what a byte costs the core; and one
latency. It has one core, as each host has, and the same reductions (all-to-all and a sum here).
Sides whose collectives gloo does by sending more than is needed (stock's reduce-scatter) are left
out: a timed world sends what a ring sends.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import SIZES
from hosts import WORLD_SIZE, HostsError, in_flight, rate_name, two_hosts
from job import Job
from results import Panel, Report, Table, machine, ratio, spread
from side_by_side import NUM_WARMUP, Comparison, Side
from variants import VARIANTS, legend
from wire import measure_at

from compiled_fsdp.command.simulate import as_rank
from compiled_fsdp.planning.plan import forced
from compiled_fsdp.wire.world import Wire, World

if TYPE_CHECKING:
    from typing import TypeAlias

    from screen import Screen
    from settings import Settings

    # A rate, what raw exchanges take, what was measured, and each side's simulated times.
    Found: TypeAlias = tuple[float, "Raw", dict[str, Any], dict[str, list[float]]]

SIDES = ("ours", "ours_eager", "ddp_compile")
RAW = "raw"
LARGE, IN_FLIGHT = 1 << 20, 4  # elements of an exchange, and exchanges under way
SECONDS = 4.0  # of exchanges, if the wire carries its rate
LATENCY = 1e-4  # seconds until two processes on this machine have exchanged a message by gloo
GOAL = 0.10


def run(settings: Settings, screen: Screen) -> Report:
    """Every rate but an unshaped one, which is no wire of known speed."""
    rates = [rate for rate in settings.rates if rate is not None] or [4.0]
    job = Job(
        SIZES["tiny" if settings.quick else "30m"], batch=2, length=32 if settings.quick else 256
    )
    sides = SIDES[1:2] if settings.quick else SIDES
    comparison = Comparison(job, sides, settings.rounds or 3, steps=1 if settings.quick else 3)
    found: list[Found] = []
    for rate in rates:
        screen.line(f"simulate, {rate_name(rate)}: two hosts")
        raw = raw_at(rate)
        measured = measure_at(rate, comparison)
        screen.line(f"simulate, {rate_name(rate)}: one rank")
        found.append((rate, raw, measured, simulate_at(raw, comparison)))
    return report(found, comparison)


def report(found: list[Found], comparison: Comparison) -> Report:
    """A row for each rate and side."""
    rows, bars, worst = [], {}, 0.0
    for rate, _, measured, simulated in found:
        for side, times in simulated.items():
            real = statistics.median(measured["variants"][side]["times"])
            mine = statistics.median(times)
            worst = max(worst, abs(mine / real - 1))
            rows.append(
                [
                    f"{rate_name(rate)}, {side}",
                    *spread(measured["variants"][side]["times"]),
                    *spread(times),
                    ratio(mine, real),
                ]
            )
            bars[f"{rate_name(rate)}, {side}, measured"] = {"step": real}
            bars[f"{rate_name(rate)}, {side}, simulated"] = {"step": mine}
    columns = ["", "measured, s", "quartiles", "simulated, s", "quartiles", "simulated / measured"]
    facts = [
        machine(),
        "Measured: two hosts of one core each. Simulated: rank 0 of 2 on one core, a latency of "
        f"{LATENCY * 1e6:g} us, and of each wire what raw exchanges showed: "
        + "; ".join(
            f"at {rate_name(rate)} {raw.bandwidth * 8e-9:.3f} Gbit/s of payload, "
            f"{raw.issue * 1e9:.2f} ns of the core for each byte that is sent"
            for rate, raw, *_ in found
        )
        + ".",
    ]
    notes = [
        f"Largest difference: {worst:.0%} (target: at most {GOAL:.0%} at every rate).",
        legend(comparison.variants),
    ]
    return Report(
        "simulate",
        "Simulated and measured steps",
        [Table("Steps", facts, columns, rows)],
        [Panel("Step", "s", bars)],
        notes,
    )


@dataclass(frozen=True)
class Raw:
    """What exchanges between two hosts take while nothing else runs.

    bandwidth: payload, bytes per second that a host sends while it receives as much; with several
        exchanges under way.
    issue: seconds of a host's core for each byte that it sends, of the process and of the kernel.
    """

    bandwidth: float
    issue: float

    def wire(self) -> Wire:
        """The same for a simulated rank."""
        return Wire("network", self.bandwidth, LATENCY, self.issue)


def raw_at(rate: float) -> Raw:
    """Measure exchanges over a wire of this rate, Gbit/s; as rank 0 of two hosts sees them."""
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate) as hosts:
        output = Path(folder) / "raw.json"
        hosts.run([sys.executable, str(Path(__file__).resolve()), RAW, str(rate), str(output)])
        return Raw(**json.loads(output.read_text()))


def exchange(rate: float, output: Path) -> None:
    """On a host: exchange for a few seconds, and write down what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sent, received = torch.ones(LARGE), [torch.empty(LARGE) for _ in range(IN_FLIGHT)]
    num_bytes = sent.nbytes * (WORLD_SIZE - 1) / WORLD_SIZE
    count = max(IN_FLIGHT, round(SECONDS * rate * 1e9 / 8 / num_bytes))

    def begin(place: int) -> Any:
        return dist.all_to_all_single(received[place], sent, async_op=True)

    in_flight(begin, IN_FLIGHT, IN_FLIGHT)  # connected, and warm
    dist.barrier()
    start, core = time.perf_counter(), time.process_time() + kernel_seconds()
    in_flight(begin, IN_FLIGHT, count)
    num_bytes *= count
    core = time.process_time() + kernel_seconds() - core
    found = Raw(num_bytes / (time.perf_counter() - start), core / num_bytes)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


def kernel_seconds() -> float:
    """Seconds that this process's core, if it has one, has spent on interrupts: no process is
    charged for them, and with a virtual wire they are packets.
    """
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            ticks += int(fields[5]) + int(fields[6])
    return ticks / os.sysconf("SC_CLK_TCK")


def simulate_at(raw: Raw, comparison: Comparison) -> dict[str, list[float]]:
    """The times of each side's steps, in a process of its own on one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise HostsError("one core for the simulated rank: this system cannot say which")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(raw))]
        command.append(comparison.to_json())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run([*command, str(output)], env=environment, check=True)
        times: dict[str, list[float]] = json.loads(output.read_text())
        return times


def work(raw: Raw, comparison: Comparison, output: Path) -> None:
    """In that process: build, warm up and time all sides, taking turns as on two hosts."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wire = raw.wire()
    with forced(reductions="all_to_all"), as_rank(World(WORLD_SIZE, 0, wire, wire)):
        dist.init_process_group("gloo")
        sides = []
        for name in comparison.variants:
            start = time.perf_counter()
            sides.append(Side(name, VARIANTS[name].build(comparison.job)))
            sides[-1].run(NUM_WARMUP)
            sys.stdout.write(f"  {name} is ready after {time.perf_counter() - start:.0f} s\n")
        for _ in range(comparison.rounds):
            for side in sides:
                side.time(comparison.steps)
    output.write_text(json.dumps({side.name: side.times for side in sides}))


if __name__ == "__main__":
    if sys.argv[1] == RAW:
        exchange(float(sys.argv[2]), Path(sys.argv[3]))
    else:
        work(Raw(**json.loads(sys.argv[1])), Comparison.from_json(sys.argv[2]), Path(sys.argv[3]))
