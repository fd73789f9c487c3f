"""Step time against memory: the same job under five memory budgets, over a wire, beside DDP, which
keeps everything.

Step times of all sides are taken in turns over the wire (`wire.py`), the peak of each in processes
of its own (`memory.py`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import wire
from gpt import SIZES
from hosts import rate_name
from job import Job
from results import Panel, Report, Table, ratio, spread
from screen import Screen
from settings import Settings
from side_by_side import Comparison, run_local
from step_time import medians, parts
from variants import SWEEP, legend, with_floors

DDP, MOST = "ddp_compile", "ours_at_ddp_peak"
GOAL = 1.2
COLUMNS = (
    "variant",
    "s/step",
    "quartiles",
    "of DDP",
    "exposed s",
    "sent MB",
    "peak MB",
    "above rest",
)
NOTES = (
    "**s/step**, **exposed**, **sent**: as in wire.md. **peak**: exact bytes of live tensors at "
    "the peak of a step, on the rank with more; **above rest**: of it, what does not live between "
    "steps.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """Times over the wire, then each side's peak."""
    job = Job(
        SIZES["tiny" if settings.quick else "30m"], batch=2, length=32 if settings.quick else 256
    )
    sides = [*SWEEP, MOST, DDP]
    rate = 1.0 if 1.0 in settings.rates else settings.rates[0]
    comparison = Comparison(
        job, tuple(with_floors(sides)), settings.rounds or 3, steps=1 if settings.quick else 3
    )
    result = wire.measure_at(rate, comparison)
    peaks = {}
    for number, name in enumerate(sides, 1):
        screen.line(f"budget, peak of {name}, {number} of {len(sides)}")
        peaks[name] = run_local(Comparison(job, (name,), rounds=1, steps=1, memory=True))[
            "variants"
        ][name]
    return report(rate, comparison, result, peaks)


def report(
    rate: float | None,
    comparison: Comparison,
    result: dict[str, Any],
    peaks: dict[str, dict[str, float]],
) -> Report:
    """Table and picture, and whether time falls as memory grows."""
    steps, split, rows = medians(result), parts(result), []
    for name, peak in peaks.items():
        seen = result["variants"][name]
        above = peak["tensor_peak"] - peak["tensor_at_rest"]
        rows.append(
            [
                name,
                *spread(seen["times"]),
                ratio(steps[name], steps[DDP]),
                f"{split[name]['exposed']:.3f}",
                f"{seen['sent_bytes'] / 1e6:.1f}",
                f"{peak['tensor_peak'] / 1e6:.1f}",
                f"{above / 1e6:.1f}",
            ]
        )
    ours = [steps[name] for name in SWEEP]
    falls = all(later <= before for before, later in pairwise(ours))
    notes = [legend(peaks), *NOTES]
    notes.append(
        "From the least memory to all kept, the step "
        f"{'falls monotonically' if falls else 'does NOT fall monotonically'}: "
        f"{', '.join(f'{seconds:.3f}' for seconds in ours)} s."
    )
    notes += [
        f"{name}: {peaks[name]['tensor_peak'] / peaks[DDP]['tensor_peak']:.2f} of the peak of DDP, "
        f"and {steps[DDP] / steps[name]:.2f} times as fast"
        + (f" (target: at least {GOAL})." if name == MOST else ".")
        for name in (list(SWEEP)[-1], MOST)
    ]
    table = Table(rate_name(rate), wire.facts(rate, comparison, result), COLUMNS, rows)
    bars = {f"{name}, {peaks[name]['tensor_peak'] / 1e6:.0f} MB": split[name] for name in peaks}
    return Report(
        "budget",
        "Step time against memory",
        [table],
        [Panel(rate_name(rate), "seconds per step", bars)],
        notes,
    )
