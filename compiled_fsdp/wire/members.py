"""What this process knows of each group of ranks, for their agreement (`agreement.py`).

[Note: two threads]
The main thread counts runs, and the watcher (`answers.py`) tells others which they were, at any
moment. So what it reads of a run is one entry of a dict, written at once, and never follows from
two fields that are written one after the other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from compiled_fsdp.ir.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = 10_000  # runs that a rank can tell about later


@dataclass
class Member:
    """One group, as far as this process knows it.

    number, runs: how many runs there were, and the digests of the last, by number.
    agreed: pairs of digests, of a run and of the one before it, that all ranks had at the same run.
    settled: a run number up to which nobody has to be answered.
    failure: what the watcher found out while the main thread was busy.
    is_gone: its store does not answer any more.
    seen: the run that the watcher saw last, and when it was new.
    attempt: how often ranks have left graphs to agree on the run that is about to begin.
    why: why the run that is being compared is outside a graph, if it is.
    num_waits: waits for messages of the group that the main thread is in.
    words: what others have said about not coming, by rank, and when it was new.
    """

    name: str
    process_group: dist.ProcessGroup
    rank: int
    size: int
    store: Any
    watched: Any
    number: int = 0
    runs: dict[int, str] = field(default_factory=dict)
    agreed: set[tuple[str, str]] = field(default_factory=set)
    failure: str = ""
    settled: int = 0
    is_gone: bool = False
    seen: tuple[int, float] = (0, 0.0)
    attempt: int = 0
    why: str = ""
    num_waits: int = 0
    words: dict[int, tuple[str, float]] = field(default_factory=dict)

    def count(self, text: str) -> int:
        """A run of this text begins. Returns its number."""
        number = self.number + 1
        self.runs[number] = texts_of.key(text)
        self.number = number
        self.runs.pop(number - KEPT, None)
        return number

    def forget_run(self) -> None:
        """The last run has not taken place; the next one has its number."""
        self.number -= 1
        del self.runs[self.number + 1]

    def digest_of_run(self, number: int) -> str:
        """Returns the digest of a run's text; "" for one that is too long ago, or to come."""
        return self.runs.get(number, "")

    def step_to(self, number: int) -> tuple[str, str]:
        """The digests of the run before and of this one."""
        return self.digest_of_run(number - 1), self.digest_of_run(number)


members: dict[str, Member] = {}
texts_of: Keys[str] = Keys(lambda text, _: hashlib.sha256(text.encode()).hexdigest())


def others(group: Member, ranks: Sequence[int]) -> list[int]:
    """The ranks of a group without these, as all processes are numbered."""
    everyone = dist.get_process_group_ranks(group.process_group)
    return [rank for number, rank in enumerate(everyone) if number not in ranks]


def key_of(number: int, attempt: int = 0) -> str:
    """Returns the prefix of what the store has of an attempt at a run."""
    return f"{number}.{attempt}" if attempt else str(number)
