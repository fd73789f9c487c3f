"""Peak and step time with activations computed again under a memory budget, and without, of a dense
model and a mixture of experts, on two local ranks.

All sides of a model run in the same processes and take turns; bytes above rest are those of a step,
whatever else the processes hold.
"""

from __future__ import annotations

from experts import LARGE, SMALL
from gpt import SIZES
from job import Job
from moe import name_of
from results import Panel, Report, Table, machine, ratio, spread
from screen import Screen
from settings import Settings
from side_by_side import Comparison, run_local
from step_time import medians
from variants import BY_DEFAULT, RECOMPUTED, legend

STOCK = "stock_block_compile"
SIDES = ("ours", *RECOMPUTED, STOCK)
COLUMNS = ("variant", "above rest MB", "of block compile", "s/step", "quartiles", "of ours")
NOTES = (
    "**above rest**: exact bytes of live tensors at the peak of a step that do not live between "
    "steps, on the rank with more; **of block compile**: over stock's, block by block. **s/step**: "
    "median of the slowest rank, in turns with the others; **of ours**: over "
    "that without a budget.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """Both models, one after the other."""
    sides = SIDES if settings.variants == BY_DEFAULT else settings.variants
    configs = (SIZES["tiny"], SMALL) if settings.quick else (SIZES["30m"], LARGE)
    length, steps = (32, 1) if settings.quick else (256, 3)
    tables, panels = [], []
    for config in configs:
        name = name_of(config)
        screen.line(f"activations, {name}")
        job = Job(config, batch=2, length=length)
        seen = run_local(Comparison(job, sides, settings.rounds or 3, steps, memory=True))
        times = medians(seen)
        found = seen["variants"]
        above = {side: found[side]["tensor_peak"] - found[side]["tensor_at_rest"] for side in sides}
        rows = [
            [
                side,
                f"{above[side] / 1e6:.1f}",
                ratio(above[side], above.get(STOCK)),
                *spread(found[side]["times"]),
                ratio(times[side], times.get("ours")),
            ]
            for side in sides
        ]
        facts = [
            machine(),
            f"{name} of {config.num_layers} layers of width {config.width}, fp32, batch 2 x "
            f"{length} per rank, fused AdamW, two local ranks; {settings.rounds or 3} rounds of "
            f"{steps} timed steps a variant.",
        ]
        title = "Mixture of experts" if config in (SMALL, LARGE) else "GPT"
        tables.append(Table(title, facts, COLUMNS, rows))
        bars = {side: {"above rest": num_bytes / 1e6} for side, num_bytes in above.items()}
        panels.append(Panel(title, "MB per rank", bars))
    notes = [legend(sides), *NOTES]
    return Report("activations", "Activations computed again", tables, panels, notes)
