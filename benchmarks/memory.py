"""Peak memory of a training step: exact tensor bytes, and what the operating system sees.

Every variant runs in processes of its own, since resident memory belongs to a process.
"""

from __future__ import annotations

from gpt import SIZES
from job import Job
from moe import name_of
from results import Panel, Report, Table, machine, ratio
from screen import Screen
from settings import Settings
from side_by_side import Comparison, run_local
from variants import legend

GOAL = 0.8
COLUMNS = (
    "variant",
    "peak MB",
    "at rest",
    "above rest",
    "of block compile",
    "of ours",
    "resident peak MB",
    "resident above rest",
)
NOTES = (
    "**peak**: exact bytes of live tensors, from every allocation and release of a step, on the "
    "rank with more. **at rest**: of it, what lives between two steps (shards and AdamW's state). "
    "**of**: the bytes above rest over another variant's. **resident**: the kernel's high-water "
    "mark during a step (VmHWM), code and compiler included; at rest after `malloc_trim`.",
)


def run(settings: Settings, screen: Screen) -> Report:
    """One after another; a step or two suffices, since bytes do not vary."""
    size = "tiny" if settings.quick else "30m"
    job = Job(SIZES[size], batch=2, length=32 if settings.quick else 256)
    return measured(job, list(settings.sides()), screen)


def measured(job: Job, names: list[str], screen: Screen) -> Report:
    """The peaks of these variants."""
    names = [name for name in names if name != "raw_collectives"]
    seen = {}
    for number, name in enumerate(names, 1):
        screen.line(f"memory, {name}, {number} of {len(names)}")
        comparison = Comparison(job, (name,), rounds=1, steps=1, memory=True)
        seen[name] = run_local(comparison)["variants"][name]
    return report(job, seen)


def report(job: Job, seen: dict[str, dict[str, float]]) -> Report:
    """Table and picture of what was seen."""
    above = {name: s["tensor_peak"] - s["tensor_at_rest"] for name, s in seen.items()}
    stock, ours = above.get("stock_block_compile"), above.get("ours")
    rows = [
        [
            name,
            *(f"{b / 1e6:.1f}" for b in (s["tensor_peak"], s["tensor_at_rest"], above[name])),
            ratio(above[name], stock),
            ratio(above[name], ours),
            f"{s['resident_peak'] / 1e6:.0f}",
            f"{(s['resident_peak'] - s['resident_at_rest']) / 1e6:.0f}",
        ]
        for name, s in seen.items()
    ]
    facts = [
        machine(),
        f"{name_of(job.config)} of {job.config.num_layers} layers of width {job.config.width}, "
        f"fp32, batch {job.batch} x {job.length} per rank, fused AdamW, two local ranks.",
    ]
    bars = {
        name: {"at rest": s["tensor_at_rest"] / 1e6, "above rest": above[name] / 1e6}
        for name, s in seen.items()
    }
    notes = [legend(seen), *NOTES]
    if stock and ours:
        notes.append(
            f"Ours over stock, block by block: {ours / stock:.2f} (target: at most {GOAL})."
        )
    panels = [Panel("Peak tensor bytes of a step", "MB per rank", bars)]
    return Report(
        "memory", "Peak memory", [Table("Two local ranks", facts, COLUMNS, rows)], panels, notes
    )
