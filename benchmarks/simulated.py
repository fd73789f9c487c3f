"""Simulated against measured: a step on two hosts joined by a shaped wire, and the same step as one
rank of a timed world (`python -m compiled_fsdp simulate`) whose wire has the same rate. Needs root;
see `hosts.py`.

The simulated rank is given nothing that was measured: the wire's rate less headers, and one
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from gpt import SIZES
from hosts import WORLD_SIZE, HostsError, rate_name
from results import Panel, Report, Table, machine, ratio, spread
from side_by_side import NUM_WARMUP, Comparison, Side
from variants import VARIANTS, Job, legend
from wire import measure_at

from compiled_fsdp.command.simulate import as_rank
from compiled_fsdp.planning.plan import forced
from compiled_fsdp.wire.timed import Wire, World

if TYPE_CHECKING:
    from screen import Screen
    from settings import Settings

SIDES = ("ours", "ours_eager", "ddp_compile")
# Of a frame of 1514 bytes, as the token bucket counts it: Ethernet, IP and TCP with time stamps.
PAYLOAD = 1448 / 1514
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
    found: list[tuple[float, dict[str, Any], dict[str, list[float]]]] = []
    for rate in rates:
        screen.line(f"simulate, {rate_name(rate)}: two hosts")
        measured = measure_at(rate, comparison)
        screen.line(f"simulate, {rate_name(rate)}: one rank")
        found.append((rate, measured, simulate_at(rate, comparison)))
    return report(found, comparison)


def report(
    found: list[tuple[float, dict[str, Any], dict[str, list[float]]]], comparison: Comparison
) -> Report:
    """A row for each rate and side."""
    rows, bars, worst = [], {}, 0.0
    for rate, measured, simulated in found:
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
        f"Measured: two hosts of one core each. Simulated: rank 0 of 2 on one core, a wire of "
        f"{PAYLOAD:.3f} of the rate (headers) and a latency of {LATENCY * 1e6:g} us.",
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


def simulate_at(rate: float, comparison: Comparison) -> dict[str, list[float]]:
    """The times of each side's steps, in a process of its own on one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise HostsError("one core for the simulated rank: this system cannot say which")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, str(Path(__file__).resolve()), str(rate), comparison.to_json()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run([*command, str(output)], env=environment, check=True)
        times: dict[str, list[float]] = json.loads(output.read_text())
        return times


def work(rate: float, comparison: Comparison, output: Path) -> None:
    """In that process: build, warm up and time all sides, taking turns as on two hosts."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wire = Wire("network", rate * 1e9 / 8 * PAYLOAD, LATENCY)
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
    work(float(sys.argv[1]), Comparison.from_json(sys.argv[2]), Path(sys.argv[3]))
