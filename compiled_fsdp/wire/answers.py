"""What a watcher thread does for agreement: it answers ranks that ask, asks itself where this rank
is stuck, and frees a main thread that waits in vain.

[Note: known branches]
Where data decides which of two graphs runs (a batch with images or without), both are known after a
while, and a step in which ranks take different ones asks nobody. Their messages do not meet
(`gloo.py` tells them apart by what they carry), so the ranks wait. A rank that has been at the same
run for STUCK_S says which it is: the first one under the key of that run, and whoever is at another
finds that there and asks.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .absence import why_not
from .comparison import difference, refuse, settle
from .members import Member, members, texts_of
from .own_groups import second_of
from .watcher import Watcher, pause

log = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks of a watcher
STUCK_S = 3.0  # at the same run, after which a watcher asks whether others are at the same
AHEAD = 64  # runs before the last one of which a rank that is stuck asks too
BREAK_TAG = (1 << 31) - 1  # of the message that nobody sends


def watch(beat: int) -> None:
    """Answer those who ask for runs that are over here, show that this rank lives, and free a main
    thread that waits in vain.
    """
    for group in [g for g in list(members.values()) if not g.is_gone]:
        pause(0)
        try:
            _answer(group, beat)
            _ask_if_stuck(group)
        except (RuntimeError, dist.DistError):  # the store is gone: the process group was destroyed
            group.is_gone = True


def _ask_if_stuck(group: Member) -> None:
    """See the note on known branches; most ranks only ever find their own word."""
    number, since = group.seen
    if number != group.number:
        group.seen = group.number, time.monotonic()
        return
    if group.failure or time.monotonic() - since < STUCK_S:
        return
    if group.num_waits:
        others = [rank for rank in range(group.size) if rank != group.rank]
        why = why_not(group, group.watched, others, number)
        if why:
            _fail(group, why)
            return
    if number <= group.settled:
        return
    if group.step_to(number) not in group.agreed:
        return  # the main thread is just comparing
    group.seen = number, time.monotonic()
    # One that gathers ahead may be at later runs than one that waits for the first of them.
    for at in range(max(group.settled, number - AHEAD) + 1, number + 1):
        mine = group.digest_of_run(at)
        first = group.watched.compare_set(f"{at}/stuck", "", mine).decode() if mine else mine
        if first != mine:
            group.watched.set(f"{at}/{group.rank}", mine)
            _compare(group, at, mine)
            return


def _answer(group: Member, beat: int) -> None:
    store = group.watched
    if not store.check(["asked"]):
        return
    number = int(store.get("asked").decode())
    if number <= group.settled:
        return
    store.set(f"alive/{group.rank}", str(beat))
    mine = group.digest_of_run(number)
    if not mine or group.step_to(number) not in group.agreed or group.failure:
        return  # not there yet, or the main thread is just comparing
    if not store.check([f"{number}/{group.rank}"]):
        store.set(f"{number}/{group.rank}", mine)
    others = [r for r in range(group.size) if store.check([f"{number}/{r}"])]
    if all(store.get(f"{number}/{r}").decode() == mine for r in others):
        if len(others) == group.size:
            group.settled = max(group.settled, number)
        return
    _compare(group, number, mine)


def _compare(group: Member, number: int, mine: str) -> None:
    """Let everybody's text of a run be known, and fail if they differ."""
    texts, leavers, attempt = settle(group, number, texts_of.get(mine, ""))
    if texts:
        if leavers:
            refuse(group, number, attempt + 1, "all ranks had run it before, so that it had begun")
        _fail(group, difference(group, number, texts))


def _fail(group: Member, text: str) -> None:
    """Free a main thread that waits in vain."""
    group.failure = text
    log.error("%s", group.failure)
    pause(POLL_S)  # so that the others know why their connections break
    for each in (group.process_group, *second_of(group.process_group)):
        break_connections(each)


def break_connections(process_group: dist.ProcessGroup) -> None:
    """Make everything that waits on the group raise: for gloo, a receive that times out closes all
    connections of the group.
    """
    if dist.get_backend(process_group) != "gloo":
        process_group.abort()
        return
    other = (process_group.rank() + 1) % process_group.size()
    try:
        process_group.recv([torch.empty(1)], other, BREAK_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        log.debug("connections of %s are broken", process_group.group_name)


watcher = Watcher("compiled_fsdp_watcher", watch, POLL_S)
