"""Ranks that do not come.

A rank whose call of a model has raised, or whose process an exception has ended, says so in the
store: the others would wait for it until the timeout of the group. One whose process goes on may
have caught the exception, and come back with another call, of the same or of something else; so it
is given RAISED_S, and its word is taken back when it comes. The others look where they wait for its
text, and where they wait for its messages.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .members import Member, members

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SILENCE_S = 60.0  # a rank that showed signs of life and then none for so long is taken for dead
RAISED_S = 20.0  # for a rank whose call of a model has raised to come back

_has_said: set[str] = set()  # groups


def note_raised(error: BaseException) -> None:
    """A call of a model has raised here: others may wait for this rank. See the note above."""
    _say_to_all(f"raised {_named(error)} in a call of a model")


def note_goes_on() -> None:
    """Another call begins: take back what was said."""
    if _has_said:
        _say_to_all("")


def _say_to_all(words: str) -> None:
    for group in [g for g in members.values() if not g.is_gone]:
        with suppress(RuntimeError, dist.DistError):  # its store may be gone
            group.store.set(f"why/{group.rank}", f"{group.number} {words}" if words else "")
            (_has_said.add if words else _has_said.discard)(group.name)


def say_at_exit() -> None:
    """What has ended this process, if an exception has."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception):
        _say_to_all(f"has ended, by {_named(error)}")


def _named(error: BaseException) -> str:
    """An error by its type and what it says, without Dynamo's explanations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name, text = type(error).__name__, " ".join(lines[:3])
    return f"{name}: {text[:500]}" if text else name


@contextmanager
def waiting(process_group: dist.ProcessGroup) -> Iterator[None]:
    """The main thread waits for messages of the group."""
    group = members.get(process_group.group_name)
    if group is None:
        yield
        return
    group.num_waits += 1
    try:
        yield
    finally:
        group.num_waits -= 1


def why_not(group: Member, store: Any, ranks: Sequence[int], number: int) -> str:
    """The error for the first of these ranks that has said that it does not come to this run, and
    has had the time to think better of it; or "".
    """
    now = time.monotonic()
    for rank in ranks:
        key = f"why/{rank}"
        said = store.get(key).decode() if store.check([key]) else ""
        if group.words.get(rank, ("", 0.0))[0] != said:
            group.words[rank] = said, now
        at, _, words = said.partition(" ")
        patience = RAISED_S if words.startswith("raised") else 0.0
        if not said or int(at) > number or now - group.words[rank][1] < patience:
            continue
        since = f", and has called none for {patience:.0f} s since" if patience else ""
        return (
            f"compiled_fsdp: rank {dist.get_process_group_ranks(group.process_group)[rank]} of "
            f"process group {group.name!r} {words}{since}\n"
            f"This rank waits for it at run {number} of that group, which it will not come to. See "
            "its output for where that was. Let all ranks raise, or none: an exception that one "
            "rank catches leaves the others in the middle of the step"
        )
    return ""


def not_there(ranks: list[int], name: str, run: str, after: str) -> str:
    """Returns the error for ranks of a group that have not come to a run."""
    return (
        f"compiled_fsdp: ranks {ranks} of process group {name!r} have not reached {run} of that "
        f"group after {after}. They died, stall before it, or took another way. If they only need "
        "longer, raise the timeout of init_process_group, or call compiled_fsdp.warmup first"
    )


def is_silent(group: Member, rank: int, beats: dict[int, tuple[str, float]]) -> bool:
    """Whether a rank whose watcher was seen alive has stopped to be. One that was never seen may
    not have begun yet.
    """
    now = time.monotonic()
    beat = group.store.get(f"alive/{rank}").decode() if group.store.check([f"alive/{rank}"]) else ""
    if rank not in beats or beats[rank][0] != beat:
        beats[rank] = beat, now
    return bool(beat) and now - beats[rank][1] > SILENCE_S
