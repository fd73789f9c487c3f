"""What `wire` and `latency` make of a comparison: the table of step times,
and where each step goes.

A step is split into computing alone, computing while communication is under way (hidden), and
exposed communication:

    exposed  the step less its floor, the local variant with the same kernels: what the wire costs
    hidden   the profiled time of communication while the training thread was not inside it
    compute  the rest
"""

from __future__ import annotations

import statistics
from typing import Any

from moe import name_of
from results import Panel, Table, ratio, spread
from side_by_side import NUM_COMPARED, TOLERANCE, Comparison
from variants import VARIANTS, legend

COLUMNS = (
    "variant",
    "s/step",
    "quartiles",
    "of stock eager",
    "of ours",
    "exposed s",
    "hidden s",
    "waits s",
    "core s",
    "collectives",
    "sent MB",
    "loss gap",
)
_NOTES = (
    "**s/step**: median over the timed steps of the slowest rank, in turns with all other "
    "variants; two ranks, one core and one thread each. **of**: that over the step of another "
    "variant. **exposed**: step less its own floor (the local variant with the same kernels). "
    "**hidden**: time during which communication was under way and the training thread was not "
    "inside it, profiled. **waits**: time that the training thread spent inside communication, "
    "profiled. **core**: processor seconds of a step, all threads of the rank; the kernel's work "
    "on packets comes on top. **sent**: per rank, headers included.",
    f"**loss gap**: largest difference from stock eager's loss over the first {NUM_COMPARED} steps "
    f"of either rank; above {TOLERANCE} the run fails. Same model, initial weights, batches, fp32 "
    "and fused AdamW on all sides.",
)


def notes(comparison: Comparison) -> list[str]:
    """What rows and columns mean."""
    return [legend(comparison.variants), *_NOTES]


def medians(result: dict[str, Any]) -> dict[str, float]:
    """Seconds per step of each variant."""
    return {name: statistics.median(seen["times"]) for name, seen in result["variants"].items()}


def parts(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Compute, hidden and exposed seconds of every variant that trains; their sum is the step."""
    steps, found = medians(result), {}
    for name, seen in result["variants"].items():
        floor = steps.get(VARIANTS[name].floor)
        if floor is not None:
            exposed = max(0.0, steps[name] - floor)
            hidden = min(seen["total_s"] - seen["exposed_s"], steps[name] - exposed)
            compute = steps[name] - hidden - exposed
            found[name] = {"compute": compute, "hidden": hidden, "exposed": exposed}
    return found


def table(title: str, facts: list[str], result: dict[str, Any]) -> Table:
    """A row per variant."""
    steps, split, rows = medians(result), parts(result), []
    for name, seen in result["variants"].items():
        times, sent = seen["times"], seen["sent_bytes"]
        communicates = name in split
        cells = (
            [f"{split[name]['exposed']:.3f}", f"{split[name]['hidden']:.3f}"]
            if communicates
            else ["", ""]
        )
        cells += [f"{seen['exposed_s']:.3f}"] if communicates else [""]
        cells += [f"{seen['core_s']:.3f}", f"{seen['num_collectives']:.0f}" if communicates else ""]
        gap = seen["loss_difference"]
        rows.append(
            [
                name,
                *spread(times),
                ratio(steps[name], steps.get("stock_eager")),
                ratio(steps[name], steps.get("ours")),
                *cells,
                f"{sent / 1e6:.1f}" if sent else "",
                "" if gap is None else f"{gap:.1e}",
            ]
        )
    return Table(title, facts, COLUMNS, rows)


def against_floors(result: dict[str, Any]) -> list[str]:
    """How near ours comes to what cannot be beaten, and the planner's prediction to what was
    measured.
    """
    steps, seen, found = medians(result), result["variants"], []
    if {"local_compile", "raw_collectives"} <= steps.keys():
        floor = max(steps["local_compile"], steps["raw_collectives"])
        core = max(floor, seen["local_compile"]["core_s"] + seen["raw_collectives"]["core_s"])
        found += [
            f"{name} over the larger of computing alone and communicating alone: "
            f"{steps[name] / floor:.2f}; over what a rank's one core needs for both, {core:.3f} s: "
            f"{steps[name] / core:.2f}."
            for name in ("ours", "ours_costs", "ours_overlap")
            if name in steps
        ]
    for name, variant in seen.items():
        if "predicted_s" in variant:
            ratio_ = variant["predicted_s"] / variant["measured_s"]
            found.append(
                f"{name}, forward and backward: {variant['predicted_s']:.3f} s predicted, "
                f"{variant['measured_s']:.3f} s measured, ratio {ratio_:.2f}."
            )
    return found


def panel(title: str, result: dict[str, Any]) -> Panel:
    """The same as bars; the lines are the two floors of ours."""
    steps = medians(result)
    floors = {"compute floor": "local_compile", "wire floor": "raw_collectives"}
    lines = {label: steps[name] for label, name in floors.items() if name in steps}
    return Panel(title, "seconds per step", parts(result), lines)


def describe(comparison: Comparison) -> str:
    """The job in a sentence."""
    config, job = comparison.job.config, comparison.job
    return (
        f"{name_of(config)} of {config.num_layers} layers of width {config.width}, "
        f"fp32, batch {job.batch} x "
        f"{job.length} per rank; {comparison.rounds} rounds of {comparison.steps} timed steps a "
        "variant."
    )
