"""Ranks compare the texts of a run, through the store.

[Note: run numbers]
Ranks in step run the same sequence of graphs over a group, so the n-th run is the same graph
everywhere. A rank whose n-th run is new to it publishes its text under n and asks. A rank that has
published under n too answers by that; one that ran something known as its n-th run is told by its
watcher thread, which polls once a second, to publish what that was. So a rank that compiles for
minutes is waited for (its watcher shows that it lives), and one that took another branch is found
at once.

A rank that finds out while it already waits inside a collective is freed by its watcher, which
breaks the group's connections: nothing that was under way can be right any more.

Ranks of which some have left a graph, or never had one, need not fail: the others leave theirs, if
they can, and ask again under the same number (`attempt`; see `leaving.py`).
"""

from __future__ import annotations

import time

from compiled_fsdp.ir.sequence import same_where_known
from compiled_fsdp.torch_private.groups import group_timeout

from . import absence, leaving, parting
from .divergence import DivergenceError, describe
from .members import Member, key_of, texts_of
from .watcher import pause

TEXTS_S = 10.0  # for the others to publish their texts, once ranks are known to disagree


def settle(
    group: Member, number: int, text: str, attempt: int = 0
) -> tuple[list[str], list[int], int]:
    """Compare, and again while other ranks leave their graphs.

    Returns the texts that were found first, or none if all agree; the ranks that are to leave
    theirs, this one among them, or none; and the last attempt.
    """
    first: list[str] = []
    while True:
        texts = exchange(group, number, text, attempt)
        if texts is None:
            return [], [], attempt
        first = first or texts
        leavers = leaving.leavers(texts)
        if not leavers or group.rank in leavers:
            return first, leavers, attempt
        attempt += 1


def exchange(group: Member, number: int, text: str, attempt: int = 0) -> list[str] | None:
    """Publish, and wait for the others; see the note above."""
    key, digest = key_of(number, attempt), texts_of.key(text)
    group.store.set(f"{key}/{group.rank}", digest)
    found = _digests(group, number, attempt)
    if set(found) == {digest}:
        group.settled = max(group.settled, number)
        return None
    if group.why and leaving.is_outside(text):
        group.store.set(f"{number}/reason/{group.rank}", f"is outside: {group.why}")
    parting.publish(group, number)
    group.store.set(f"{key}/text/{group.rank}", text)
    begin, texts = time.monotonic(), [""] * group.size
    while not all(texts) and time.monotonic() - begin < _patience(group, texts):
        for rank in range(group.size):
            if not texts[rank] and group.store.check([f"{key}/text/{rank}"]):
                texts[rank] = group.store.get(f"{key}/text/{rank}").decode()
        pause(0.05)
    if all(texts) and same_where_known(texts):
        group.settled = max(group.settled, number)
        return None
    return texts


def _patience(group: Member, texts: list[str]) -> float:
    """Seconds for the texts that are missing: those that are there may all mean the same, or have
    ranks leave their graphs.
    """
    is_sure = not (same_where_known([text for text in texts if text]) or leaving.leavers(texts))
    return TEXTS_S if is_sure else group_timeout(group.process_group).total_seconds()


def _digests(group: Member, number: int, attempt: int) -> list[str]:
    """Returns what each rank published for a run; returns early, with gaps, when two differ."""
    key = key_of(number, attempt)
    found = [""] * group.size
    timeout = group_timeout(group.process_group).total_seconds()
    start, delay = time.monotonic(), 0.001
    beats: dict[int, tuple[str, float]] = {}
    while True:
        # Again and again: a rank that is ahead of this one may ask for another.
        group.store.set("asked", str(number))
        for rank in range(group.size):
            if not found[rank] and group.store.check([f"{key}/{rank}"]):
                found[rank] = group.store.get(f"{key}/{rank}").decode()
        if all(found) or len(set(filter(None, found))) > 1:
            return found
        missing = [rank for rank in range(group.size) if not found[rank]]
        why = absence.why_not(group, group.store, missing, number)
        if why:
            raise DivergenceError(why)
        silent = [rank for rank in missing if absence.is_silent(group, rank, beats)]
        waited = time.monotonic() - start
        if silent or waited > timeout:
            after = f"{waited:.0f} s" + (
                f", and show no sign of life for {absence.SILENCE_S:.0f} s" if silent else ""
            )
            raise DivergenceError(
                absence.not_there(silent or missing, group.name, f"run {key}", after)
            )
        pause(delay)
        delay = min(delay * 1.5, 0.25)


def refuse(group: Member, number: int, attempt: int, why: str) -> None:
    """Whoever waits for this rank to leave its graph is to wait no longer; and why it stays."""
    key = key_of(number, attempt)
    group.store.set(f"{number}/reason/{group.rank}", f"cannot leave its graph: {why}")
    group.store.set(f"{key}/text/{group.rank}", leaving.STAYS)
    group.store.set(f"{key}/{group.rank}", texts_of.key(leaving.STAYS))


def difference(group: Member, number: int, texts: list[str]) -> str:
    """The error for ranks whose texts of a run differ."""
    return describe(
        group.process_group,
        texts,
        _reasons(group, number),
        parting.parting(group, number, texts),
    )


def _reasons(group: Member, number: int) -> list[str]:
    """What each rank of a group has said of its run, "" for those that have not."""
    keys = [f"{number}/reason/{rank}" for rank in range(group.size)]
    return [group.store.get(key).decode() if group.store.check([key]) else "" for key in keys]
