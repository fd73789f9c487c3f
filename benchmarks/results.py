"""What a benchmark leaves behind: tables in Markdown and on the screen, and one picture of stacked
bars.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as ScreenTable

COLORS = ("#4c72b0", "#8ebf94", "#dd8452", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under `columns`, with the conditions they hold under above them, one sentence
    an entry.
    """

    title: str
    facts: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Stacked bars: for each bar its parts by name; `lines` are marks at a value, by label."""

    title: str
    unit: str
    bars: dict[str, dict[str, float]]
    lines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's outcome; `notes` say what the columns mean and what came out."""

    name: str
    title: str
    tables: Sequence[Table]
    panels: Sequence[Panel]
    notes: Sequence[str]


def machine() -> str:
    """Date, versions and cores: the first fact of every table."""
    return (
        f"{date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores."
    )


def spread(values: Sequence[float], form: str = ".3f") -> tuple[str, str]:
    """Median, and the quartiles as a range."""
    values = list(values) * (2 if len(values) == 1 else 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return format(median, form), f"{low:{form}} to {high:{form}}"


def ratio(value: float, to: float | None) -> str:
    """`value` in units of `to`; empty where there is nothing to compare with."""
    return f"{value / to:.2f}" if to else ""


def markdown(report: Report, command: str) -> str:
    """The whole report."""
    lines = [f"# {report.title}", "", f"`{command}`", ""]
    if report.panels:
        lines += [f"![{report.title}]({report.name}.png)", ""]
    for table in report.tables:
        lines += [f"## {table.title}", ""]
        lines += [" ".join(table.facts), ""] if table.facts else []
        lines += [_row(table.columns), "|---" + "|--:" * (len(table.columns) - 1) + "|"]
        lines += [*map(_row, table.rows), ""]
    return "\n".join([*lines, "\n\n".join(report.notes), ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def show(report: Report, console: Console) -> None:
    """Print the tables."""
    for table in report.tables:
        screen = ScreenTable(table.columns[0], title=table.title, title_justify="left")
        for column in table.columns[1:]:
            screen.add_column(column, justify="right")
        for row in table.rows:
            screen.add_row(*row)
        console.print(screen)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)


def write(report: Report, folder: Path, command: str) -> list[Path]:
    """Write Markdown and picture; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / f"{report.name}.md"
    text.write_text(markdown(report, command))
    if not report.panels:
        return [text]
    picture = folder / f"{report.name}.png"
    draw(report, picture)
    return [text, picture]


def draw(report: Report, path: Path) -> None:
    """Draw every panel, one below the other, a bar per row; a part has the same colour in all of
    them.
    """
    from matplotlib.figure import Figure

    parts = list(
        dict.fromkeys(p for panel in report.panels for bar in panel.bars.values() for p in bar)
    )
    heights = [0.9 + 0.28 * len(panel.bars) for panel in report.panels]
    figure = Figure(figsize=(8.5, 0.5 + sum(heights)), dpi=130, layout="constrained")
    grid = figure.subplots(len(report.panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(grid, report.panels, strict=True):
        names = list(reversed(panel.bars))
        left = [0.0] * len(names)
        for index, part in enumerate(parts):
            values = [panel.bars[name].get(part, 0.0) for name in names]
            if not any(values):
                continue
            bars = axes.barh(
                names, values, left=left, color=COLORS[index % len(COLORS)], label=part
            )
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.bar_label(bars, [f" {total:.3g}" for total in left], fontsize=8)
        for style, (label, value) in zip(("--", ":"), panel.lines.items(), strict=False):
            axes.axvline(value, color="black", linestyle=style, linewidth=1, label=label)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.set_xlabel(panel.unit, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
