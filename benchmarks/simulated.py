"""Simulated against measured: a step on two hosts joined by a shaped wire, and the same step as one
rank of a timed world (`python -m compiled_fsdp simulate`) whose wire has the same rate. Needs root;
see `hosts.py`.

The simulated rank is given nothing that was measured over the wire: its rate less headers, one
latency, and what a byte costs the core, measured between two processes over the loopback. It has
one core, as each host has, and the same reductions (all-to-all and a sum here).
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
from torch.multiprocessing.spawn import spawn
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
LARGE, EXCHANGES = 1 << 23, 8  # elements, and how often they are exchanged
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
    issue = seconds_of_a_byte()
    found: list[tuple[float, dict[str, Any], dict[str, list[float]]]] = []
    for rate in rates:
        screen.line(f"simulate, {rate_name(rate)}: two hosts")
        measured = measure_at(rate, comparison)
        screen.line(f"simulate, {rate_name(rate)}: one rank")
        found.append((rate, measured, simulate_at(rate, issue, comparison)))
    return report(found, comparison, issue)


def report(
    found: list[tuple[float, dict[str, Any], dict[str, list[float]]]],
    comparison: Comparison,
    issue: float,
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
        f"{PAYLOAD:.3f} of the rate (headers) and a latency of {LATENCY * 1e6:g} us, and "
        f"{issue * 1e9:.2f} ns of the core for each byte that is sent.",
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


def seconds_of_a_byte() -> float:
    """What a byte that gloo sends, while it receives one, costs a core: the median of a few large
    exchanges of two processes on this machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, args=(folder,), nprocs=WORLD_SIZE)
        seconds: list[float] = json.loads((Path(folder) / "seconds.json").read_text())
        return statistics.median(seconds)


def _exchange(rank: int, folder: str) -> None:
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD_SIZE)
    sent = torch.ones(LARGE)
    received = torch.empty(LARGE)
    num_bytes = sent.nbytes * (WORLD_SIZE - 1) / WORLD_SIZE
    seconds = []
    for _ in range(EXCHANGES):
        begin = time.process_time()
        dist.all_to_all_single(received, sent)
        seconds.append((time.process_time() - begin) / num_bytes)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds[1:]))
    dist.destroy_process_group()


def simulate_at(rate: float, issue: float, comparison: Comparison) -> dict[str, list[float]]:
    """The times of each side's steps, in a process of its own on one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise HostsError("one core for the simulated rank: this system cannot say which")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = [sys.executable, str(Path(__file__).resolve()), str(rate), str(issue)]
        command.append(comparison.to_json())
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        subprocess.run([*command, str(output)], env=environment, check=True)
        times: dict[str, list[float]] = json.loads(output.read_text())
        return times


def work(rate: float, issue: float, comparison: Comparison, output: Path) -> None:
    """In that process: build, warm up and time all sides, taking turns as on two hosts."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wire = Wire("network", rate * 1e9 / 8 * PAYLOAD, LATENCY, issue)
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
    rate, issue = map(float, sys.argv[1:3])
    work(rate, issue, Comparison.from_json(sys.argv[3]), Path(sys.argv[4]))
