"""Many tiny parameters on two local ranks: what a step costs where neither bytes nor arithmetic
count.
"""

from __future__ import annotations

import step_time
from gpt import GPTConfig
from job import Job
from results import Report, machine
from screen import Screen
from settings import Settings
from side_by_side import Comparison, run_local

GOAL = 0.5


def run(settings: Settings, screen: Screen) -> Report:
    """24 layers of width 64: 171 parameters of at most 48 KiB."""
    config = GPTConfig(num_layers=2 if settings.quick else 24, width=64, num_heads=2, hidden=192)
    steps = 2 if settings.quick else 10
    comparison = Comparison(
        Job(config, batch=2, length=64), settings.sides(), settings.rounds or 5, steps
    )
    result = run_local(comparison)
    facts = [
        machine(),
        "Two ranks on one machine, nothing between them.",
        step_time.describe(comparison),
    ]
    table = step_time.table("Two local ranks", facts, result)
    steps_of = step_time.medians(result)
    notes = step_time.notes(comparison)
    if {"ours", "stock_eager"} <= steps_of.keys():
        reached = steps_of["ours"] / steps_of["stock_eager"]
        notes.append(f"Ours over stock eager: {reached:.2f} (target: at most {GOAL}).")
    panels = [
        step_time.panel(
            f"Two local ranks, {config.num_layers} layers of width {config.width}", result
        )
    ]
    return Report("latency", "Many tiny parameters", [table], panels, notes)
