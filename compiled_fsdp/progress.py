"""What a long compilation does and how far it is: a line after ten seconds, and more, ever more
rarely, while it lasts; on a terminal, one line that changes. Shorter ones say nothing.

Whoever compiles says how far it is (`seen`, `at`); a thread that lives as long as the compilation
looks at that, and at what of torch the compiling thread is in. Rank 0 speaks for all.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.log import is_terminal, is_wanted, say_progress
from compiled_fsdp.torch_private.compiling import at_end, doing
from compiled_fsdp.torch_private.dynamo import trace_number

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST = 10.0  # seconds of silence; after the first line, each comes at twice the last one's time
PERIOD = 1.0
clock = time.monotonic


@dataclass(eq=False)
class Progress:
    """One compilation, from its first read of a sharded parameter to its end.

    where: in words, what the compiling thread is in now.
    say: takes a line, and whether it is the last.
    is_live: whether lines take each other's place, so that there may be many.
    units: whose parameters have been read.
    ours: which graph is worked on, and how far.
    spent: seconds, by what they went into.
    """

    where: Callable[[], str]
    say: Callable[[str, bool], None] = say_progress
    is_live: bool = field(default_factory=is_terminal)
    clock: Callable[[], float] = field(default_factory=lambda: clock)
    units: set[str] = field(default_factory=set)
    ours: str = ""
    spent: dict[str, float] = field(default_factory=dict)
    due: float = FIRST

    def __post_init__(self) -> None:
        self.start = self.last = self.clock()

    def tick(self) -> None:
        """Say how far it is, if it is time to."""
        now, what = self.clock(), self.where()
        self.spent[what] = self.spent.get(what, 0.0) + now - self.last
        self.last, lasted = now, now - self.start
        if lasted < self.due:
            return
        self.due = lasted + PERIOD if self.is_live else 2 * self.due
        self.say(f"compiled_fsdp: compiling for {lasted:.0f} s: {self._how_far(what)}", False)

    def end(self) -> None:
        """Sum up a compilation of which something was said."""
        if self.due == FIRST:
            return
        parts = sorted(self.spent.items(), key=lambda part: -part[1])
        longest = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in parts[:3])
        lasted = self.clock() - self.start
        self.say(f"compiled_fsdp: compiled in {lasted:.0f} s; longest: {longest}", True)

    def _how_far(self, what: str) -> str:
        count = f"{len(self.units)} unit{'s' * (len(self.units) != 1)} seen"
        return ", ".join(filter(None, [what, self.ours or count]))


_now: Progress | None = None


def seen(unit: str) -> None:
    """A trace has come to a unit's parameters."""
    if progress := _current():
        progress.units.add(unit)


def at(text: str) -> None:
    """Which graph is being worked on, and how far."""
    if progress := _current():
        progress.ours = text


def _current() -> Progress | None:
    """The compilation under way, watched from now on; None outside of one, on other ranks, and
    where nobody would hear of it.
    """
    global _now
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if _now is None and is_first and trace_number() is not None and is_wanted():
        _now = _watched()
    return _now


def _watched() -> Progress:
    """Start to look at a compilation in this thread, until it ends."""
    me, over = threading.get_ident(), threading.Event()
    progress = Progress(lambda: doing(sys._current_frames().get(me)))

    def watch() -> None:
        while not over.wait(PERIOD):
            progress.tick()

    def end() -> None:
        global _now
        _now = None
        over.set()
        thread.join()
        progress.end()

    thread = threading.Thread(target=watch, name="compiled_fsdp progress", daemon=True)
    at_end(end)
    thread.start()
    return progress
