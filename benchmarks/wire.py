"""Two hosts joined by a slow wire: network namespaces on one machine, shaped to each rate in turn.
Needs root; see `hosts.py`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import step_time
from gpt import SIZES
from hosts import default_burst_kib, rate_name, two_hosts
from job import Job
from results import Report, machine
from screen import Screen
from settings import Settings
from side_by_side import Comparison, command_for


def run(settings: Settings, screen: Screen) -> Report:
    """Every rate, every variant."""
    size = settings.size or ("tiny" if settings.quick else "30m")
    job = Job(SIZES[size], batch=2, length=32 if settings.quick else 256)
    steps = settings.steps or (1 if settings.quick else 3)
    comparison = Comparison(job, settings.sides(), settings.rounds or 3, steps)
    tables, panels = [], []
    for rate in settings.rates:
        screen.line(f"wire, {rate_name(rate)}")
        result = measure_at(rate, comparison)
        lines = [*facts(rate, comparison, result), *step_time.against_floors(result)]
        tables.append(step_time.table(rate_name(rate), lines, result))
        panels.append(step_time.panel(rate_name(rate), result))
    return Report("wire", "Training over a slow wire", tables, panels, step_time.notes(comparison))


def measure_at(rate: float | None, comparison: Comparison) -> dict[str, Any]:
    """Run all variants on two hosts and return what rank 0 wrote. The hosts are gone afterwards,
    whatever happens.
    """
    with tempfile.TemporaryDirectory() as folder, two_hosts(rate) as hosts:
        output = Path(folder) / "result.json"
        hosts.run(command_for(comparison, output))
        seen: dict[str, Any] = json.loads(output.read_text())
        return {"cores": hosts.cores, **seen}


def facts(rate: float | None, comparison: Comparison, result: dict[str, Any]) -> list[str]:
    """Under which conditions a table was measured."""
    burst = "" if rate is None else f", token bucket {default_burst_kib(rate)} KiB"
    gloo = ", ".join(f"{value:.2f} with {num} in flight" for num, value in result["gloo"].items())
    first, second = result["cores"]
    shared = " Both hosts share the SAME core: this machine has one." if first == second else ""
    return [
        machine(),
        f"Wire: {rate_name(rate)} each way{burst}; a raw gloo all-gather gets {gloo} "
        f"(Gbit/s).{shared}",
        step_time.describe(comparison),
    ]
