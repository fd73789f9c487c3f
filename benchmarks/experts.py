"""A mixture of experts on two hosts joined by a slow wire, which tokens and parameters share."""

from __future__ import annotations

import memory
import step_time
from hosts import rate_name
from job import Job
from moe import MoEConfig, MoEGPT, num_active
from results import Report
from screen import Screen
from settings import Settings
from side_by_side import Comparison
from variants import BY_DEFAULT, with_floors
from wire import facts, measure_at

SIDES = (
    "ours",
    "ours_whole_step",
    "ours_exchanges_shared",
    "ours_exchanges_in_place",
    "ours_chunks",
    "stock_eager",
    "stock_block_compile",
    "raw_collectives",
)
SMALL = MoEConfig(num_layers=2, width=64, num_heads=2, hidden=64, expert_hidden=32)
LARGE = MoEConfig(num_layers=6, width=384, num_heads=6, hidden=512, expert_hidden=384)


def run(settings: Settings, screen: Screen) -> Report:
    """Every rate; the variants that such a model is trained by, unless others are asked for."""
    sides = SIDES if settings.variants == BY_DEFAULT else settings.variants
    config = SMALL if settings.quick else LARGE
    comparison = Comparison(
        Job(config, batch=2, length=32 if settings.quick else 256),
        tuple(with_floors(list(sides))),
        settings.rounds or 3,
        steps=1 if settings.quick else 3,
    )
    tables, panels = [], []
    for rate in settings.rates:
        screen.line(f"experts, {rate_name(rate)}")
        result = measure_at(rate, comparison)
        lines = [*facts(rate, comparison, result), _size(config), *step_time.against_floors(result)]
        tables.append(step_time.table(rate_name(rate), lines, result))
        panels.append(step_time.panel(rate_name(rate), result))
    peaks = memory.measured(comparison.job, list(sides), screen)
    return Report(
        "experts",
        "Mixtures of experts over a slow wire",
        [*tables, *peaks.tables],
        [*panels, *peaks.panels],
        [*step_time.notes(comparison), *peaks.notes],
    )


def _size(config: MoEConfig) -> str:
    model = MoEGPT(config)
    total = sum(p.numel() for p in model.parameters())
    return f"{total / 1e6:.1f} M parameters in all, {num_active(model) / 1e6:.1f} M for each byte."
