"""What a run shows while it lasts: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

NUM_LINES = 20


class Screen:
    """The console of rank 0; the other ranks have a silent one."""

    def __init__(self, rank: int) -> None:
        """Write to stdout on rank 0 only."""
        width = None if sys.stdout.isatty() else 120
        self.console = Console(quiet=rank != 0, highlight=False, width=width)

    def line(self, text: str) -> None:
        """Print one line of plain text, never broken at the width of the terminal."""
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """Print a table."""
        self.console.print(renderable)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce something long, and say how long it took."""
        start = time.monotonic()
        self.line(f"{name} ...")
        yield
        self.line(f"{name} took {time.monotonic() - start:.1f} s")

    @contextmanager
    def pieces(self, total: int) -> Iterator[Callable[[str], None]]:
        """Show how many of `total` pieces of work are done; call what it yields after each, with
        what was done.
        """
        if not self.console.is_terminal or self.console.quiet:
            numbers = itertools.count(1)
            yield lambda what: self.line(f"  {next(numbers)}/{total}  {what}")
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=total, status="starting")
            yield lambda what: bar.update(task, advance=1, status=what)

    @contextmanager
    def progress(self, name: str) -> Iterator[Bar]:
        """Show the progress of training until the end of the block."""
        if not self.console.is_terminal or self.console.quiet:
            yield Bar(self)
            return
        columns = (
            SpinnerColumn(),
            TextColumn(name),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            yield TerminalBar(self, progress)


class Bar:
    """Progress as plain lines, about NUM_LINES over the run."""

    def __init__(self, screen: Screen) -> None:
        """Print to `screen`."""
        self.screen = screen

    def update(self, done: int, total: int | None, loss: float, rate: float, eta_s: float) -> None:
        """Report `done` of `total` steps, None while the total is not known."""
        if done in (1, total) or done % math.ceil((total or 2 * NUM_LINES) / NUM_LINES) == 0:
            self.screen.line(f"step {done}/{total or '?'}  {_status(loss, rate, eta_s, total)}")


class TerminalBar(Bar):
    """Progress as a bar that stays on one line."""

    def __init__(self, screen: Screen, progress: Progress) -> None:
        """Add a bar to `progress`."""
        super().__init__(screen)
        self.progress = progress
        self.task = progress.add_task("", total=None, status="starting")

    def update(self, done: int, total: int | None, loss: float, rate: float, eta_s: float) -> None:
        """Move the bar."""
        status = _status(loss, rate, eta_s, total)
        self.progress.update(self.task, completed=done, total=total, status=status)


def _status(loss: float, rate: float, eta_s: float, total: int | None) -> str:
    minutes, seconds = divmod(round(eta_s), 60)
    eta = f"{minutes}:{seconds:02d} left" if total else "measuring the step time"
    return f"loss {loss:.3f}  {rate:,.0f} tokens/s  {eta}"


def leave() -> NoReturn:
    """End this rank: destroy the process groups, and exit without tearing the interpreter down.

    A gloo worker thread that drops its last reference to a tensor while Python is torn down aborts
    the process ("terminate called without an active exception"; seen on torch 2.13, once in 20 runs
    of a loaded machine): a run that succeeded would look failed.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
