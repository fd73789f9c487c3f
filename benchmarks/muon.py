"""Muon beside AdamW and beside the usual ways to run it on shards: two local ranks, and two hosts
joined by a wire (needs root).
"""

from __future__ import annotations

from typing import Any

from gpt import SIZES
from hosts import HostsError, rate_name
from job import Job, make_model
from matrix_optimizers import matrices
from results import Panel, Report, Table, machine, ratio, spread
from screen import Screen
from settings import Settings
from side_by_side import Comparison, run_local
from step_time import describe, medians
from variants import BY_DEFAULT, legend
from wire import facts, measure_at

from compiled_fsdp.optim.newton_schulz import flops

SIDES = ("ours", "ours_overlap", "muon", "muon_gathered", "stock_muon")
COLUMNS = (
    "variant",
    "s/step",
    "quartiles",
    "of AdamW",
    "optimizers s",
    "of muon's",
    "sent MB",
    "loss gap",
)
NS_STEPS = 5
GOALS = (
    'Targets: a step with "muon" at most 1.10 of the faster one with AdamW; the optimizers of '
    '"muon_gathered" at least 2 times as long as those of "muon".'
)
_NOTES = (
    "**s/step**: median over the timed steps of the slowest rank, in turns; two ranks, one core "
    "and one thread each. **of AdamW**: that over the fastest side that AdamW trains alone. "
    "**optimizers**: median seconds inside of all optimizers' step(); what overlaps with gathers "
    "of the next forward makes it longer and forward shorter. **sent**: per rank, headers "
    "included. **loss gap**: largest difference from the first side that the same optimizer "
    "trains, over the first steps.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """Local ranks, then each rate; many tokens, since Newton-Schulz takes as long for few."""
    is_default = settings.variants == BY_DEFAULT
    job = Job(
        SIZES["tiny" if settings.quick else "10m"],
        batch=2 if settings.quick else 32,
        length=32 if settings.quick else 256,
    )
    comparison = Comparison(
        job,
        SIDES if is_default else settings.variants,
        settings.rounds or 3,
        steps=1 if settings.quick else 2,
    )
    rates = (None, 1.0) if settings.rates == Settings().rates else settings.rates
    tables, panels, notes = [], [], [legend(comparison.variants), *_NOTES, GOALS]
    for rate in rates:
        title = "Two local ranks" if rate is None else rate_name(rate)
        screen.line(f"muon, {title}")
        try:
            result = run_local(comparison) if rate is None else measure_at(rate, comparison)
        except HostsError as error:
            notes.append(f"{title}: left out: {error}")
            continue
        about = (
            [machine(), describe(comparison)] if rate is None else facts(rate, comparison, result)
        )
        tables.append(_table(title, [*about, _work(job)], result))
        panels.append(_panel(title, result))
    return Report("muon", "Muon on shards", tables, panels, notes)


def _table(title: str, about: list[str], result: dict[str, Any]) -> Table:
    seen, steps = result["variants"], medians(result)
    adamw = min((steps[name] for name in steps if name.startswith("ours")), default=None)
    muon = seen.get("muon", {}).get("optimizers_s")
    rows = [
        [
            name,
            *spread(each["times"]),
            ratio(steps[name], adamw),
            f"{each['optimizers_s']:.3f}" if "optimizers_s" in each else "",
            ratio(each["optimizers_s"], muon) if "optimizers_s" in each else "",
            f"{each['sent_bytes'] / 1e6:.1f}" if each["sent_bytes"] else "",
            f"{each['loss_difference']:.1e}",
        ]
        for name, each in seen.items()
    ]
    return Table(title, about, COLUMNS, rows)


def _panel(title: str, result: dict[str, Any]) -> Panel:
    bars = {}
    for name, seconds in medians(result).items():
        optimizers = result["variants"][name].get("optimizers_s", 0.0)
        bars[name] = {"forward and backward": seconds - optimizers, "optimizers": optimizers}
    return Panel(title, "seconds per step", bars)


def _work(job: Job) -> str:
    """What Newton-Schulz takes beside forward and backward, whatever the number of tokens."""
    model = make_model(job)
    found = matrices(model)
    work = sum(flops(tuple(p.shape), NS_STEPS) for p in found.values())
    tokens = job.batch * job.length
    total = 6.0 * tokens * sum(p.numel() for p in model.parameters())
    return (
        f"Newton-Schulz of {len(found)} matrices: {work / 1e9:.1f} GFLOP a step, divided among the "
        f"ranks; forward and backward of {tokens} tokens: about {total / 1e9:.0f} GFLOP "
        "on each rank."
    )
