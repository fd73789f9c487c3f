"""What a run leaves behind: a table, a picture of the losses, and both as JSON."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from loop import Outcome
from options import Options, num_cores
from rich.box import SIMPLE_HEAD
from rich.table import Table
from text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL = 2.2
COLORS = ("#b0413e", "#4f7cac", "#2f7d4f")
PICTURE, RESULTS = "loss.png", "results.json"

# A row of the table: label, key in `summary`, format.
ROWS = (
    ("validation loss, nats/byte", "validation_loss", ".3f"),
    ("steps", "steps", ",d"),
    ("tokens/s, all ranks", "tokens_per_s", ",.0f"),
    ("step time, median ms", "step_ms_median", ",.0f"),
    ("   first decile", "step_ms_p10", ",.0f"),
    ("   last decile", "step_ms_p90", ",.0f"),
    ("compile + first step, s", "compile_s", ".1f"),
    ("peak tensor bytes/rank", "peak_bytes", ",d"),
    ("   of it at rest", "at_rest_bytes", ",d"),
    ("   above rest", "above_rest_bytes", ",d"),
    ("gathered bytes/step/rank", "gathered_bytes", ",d"),
    ("reduced bytes/step/rank", "reduced_bytes", ",d"),
    ("collectives/step", "num_collectives", ",d"),
    ("communication, ms/step", "communication_ms", ",.0f"),
    ("   share exposed", "exposed_share", ".0%"),
)


def summary(outcome: Outcome) -> dict[str, float]:
    """Return the numbers of the table: the worst rank's memory, the mean rank's communication."""
    p10, median, p90 = outcome.step_deciles()
    worst = max(outcome.peaks, key=lambda peak: peak.peak)
    comms = outcome.comms
    return {
        "validation_loss": outcome.validation[-1][1],
        "steps": len(outcome.losses),
        "tokens_per_s": outcome.tokens_per_s,
        "step_ms_median": 1e3 * median,
        "step_ms_p10": 1e3 * p10,
        "step_ms_p90": 1e3 * p90,
        "compile_s": outcome.compile_s,
        "peak_bytes": worst.peak,
        "at_rest_bytes": worst.at_rest,
        "above_rest_bytes": worst.above_rest,
        "gathered_bytes": round(statistics.mean(comm.gathered_bytes for comm in comms)),
        "reduced_bytes": round(statistics.mean(comm.reduced_bytes for comm in comms)),
        "num_collectives": round(statistics.mean(comm.num_collectives for comm in comms)),
        "communication_ms": 1e3 * statistics.mean(comm.total_s for comm in comms),
        "exposed_share": statistics.mean(comm.exposed_share for comm in comms),
    }


def table(outcomes: list[Outcome]) -> Table:
    """Return the table; with several outcomes, the last one also as ratios to each other one."""
    result = Table(box=SIMPLE_HEAD)
    result.add_column("", no_wrap=True)
    for outcome in outcomes:
        result.add_column(outcome.name, justify="right")
    for outcome in outcomes[:-1]:
        result.add_column(f"ratio to\n{outcome.name}", justify="right")
    summaries = [summary(outcome) for outcome in outcomes]
    for label, key, form in ROWS:
        values = [numbers[key] for numbers in summaries]
        ratios = [f"x{values[-1] / value:.2f}" if value else "" for value in values[:-1]]
        result.add_row(label, *(format(value, form) for value in values), *ratios)
    return result


def verdict(outcome: Outcome, horizon: int | None, is_saved: bool) -> str:
    """Return the last line: how far the run got, and whether that is the goal."""
    done, loss = len(outcome.losses), outcome.validation[-1][1]
    line = f"validation loss {loss:.3f} nats/byte after {done} steps: "
    line += f"{'below' if loss < GOAL else 'NOT below'} the goal of {GOAL}"
    if outcome.stopped_by is not None and done != horizon:
        total = f" of {horizon}" if horizon else ""
        line += f"; stopped by {outcome.stopped_by} at step {done}{total}"
        line += ", --resume continues" if is_saved else ""
    elif loss >= GOAL:
        line += "; a longer run goes further, for example --minutes 15"
    return line


def write_results(out: Path, outcomes: list[Outcome], options: Options, text: Text) -> None:
    """Write all numbers, every loss, and what is needed to run the same again."""
    document = {
        "command": "python benchmarks/train.py " + shlex.join(sys.argv[1:]),
        "versions": versions(),
        "machine": {"processor": platform.machine(), "cores": num_cores()},
        "threads_per_rank": torch.get_num_threads(),
        "options": {**asdict(options), "out": str(options.out), "text": str(options.text or "")},
        "text": {
            "digest": text.digest,
            "files": text.num_files,
            "train_bytes": len(text.train),
            "validation_bytes": len(text.validation),
        },
        "runs": [
            {"name": outcome.name, **summary(outcome), **asdict(outcome)} for outcome in outcomes
        ],
    }
    (out / RESULTS).write_text(json.dumps(document, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of Python, of torch, and of this project where it is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        found["compiled_fsdp"] = version("compiled-fsdp")
    except PackageNotFoundError:
        found["compiled_fsdp"] = "not installed"
    return found


def draw(path: Path, outcomes: list[Outcome], title: str) -> None:
    """Draw the losses over steps and, of several outcomes, also over the time that training
    took.
    """
    from matplotlib.figure import Figure

    num_panels = min(2, len(outcomes))
    figure = Figure(figsize=(2.5 + 5.5 * num_panels, 4.5), dpi=150, layout="constrained")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    for axes, draw_over_time in zip(panels, (False, True), strict=False):
        for index, outcome in enumerate(outcomes):
            scale = statistics.median(outcome.step_s or [0.0]) if draw_over_time else 1.0
            # Where curves coincide, the earlier ones show as a wider line beneath.
            width = 1.6 + 2.2 * (len(outcomes) - 1 - index)
            _draw_curve(axes, outcome, scale, COLORS[index - len(outcomes)], width)
        axes.axhline(GOAL, color="gray", linewidth=1, linestyle="--", label=f"goal {GOAL}")
        axes.set_xlabel(
            "seconds at the median step time, compilation left out" if draw_over_time else "step"
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    panels[0].set(ylabel="loss, nats/byte", title=title)
    panels[0].set_ylim(bottom=0.8 * min(min(outcome.losses) for outcome in outcomes))
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _draw_curve(axes: Axes, outcome: Outcome, scale: float, color: str, width: float) -> None:
    """Draw the raw training loss, the smoothed one, and the validation points, `scale` a step."""
    steps = [scale * step for step in range(1, len(outcome.losses) + 1)]
    axes.plot(steps, outcome.losses, color=color, alpha=0.2, linewidth=0.7)
    axes.plot(
        steps,
        smooth(outcome.losses),
        color=color,
        linewidth=width,
        label=f"{outcome.name}, training",
    )
    points = [scale * step for step, _ in outcome.validation]
    losses = [loss for _, loss in outcome.validation]
    label = f"validation, {losses[-1]:.3f} at the end"
    axes.plot(points, losses, "o", color=color, markersize=3.5 + width, label=label)


def smooth(losses: list[float]) -> list[float]:
    """Return the exponential moving average over a twentieth of the run, corrected for its
    start.
    """
    weight = min(0.5, max(0.02, 20 / len(losses)))
    smoothed, total, share = [], 0.0, 0.0
    for loss in losses:
        total += weight * (loss - total)
        share += weight * (1 - share)
        smoothed.append(total / share)
    return smoothed
