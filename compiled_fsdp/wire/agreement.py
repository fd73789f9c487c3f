"""Ranks that share a group agree, before they communicate: through the store, never through the
group itself.

Every graph begins with `fsdp::agree`, which carries the graph's collectives as text, structure and
no symbol names; it is part of the compiled code, so that a warm cache brings it along. The first
run of a text in a process, and the first after another one than before, compares it with the other
ranks of each group; later runs look it up and count, and touch no store. A gather outside a graph
is a run too. It is compared when it is its unit's first, and like a graph if graphs read the unit
too: Dynamo may have given it up on one rank alone. So is the list of parameters before the first
step.

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

[Note: known branches]
Where data decides which of two graphs runs (a batch with images or without), both are known after a
while, and a step in which ranks take different ones asks nobody. Their messages do not meet
(`gloo.py` tells them apart by what they carry), so the ranks wait. A rank that has been at the same
run for STUCK_S says which it is: the first one under the key of that run, and whoever is at another
finds that there and asks.

[Note: ranks that do not come]
A rank whose call of a model has raised, or whose process an exception has ended, says so in the
store: the others would wait for it until the timeout of the group. One whose process goes on may
have caught the exception, and come back with another call, of the same or of something else; so it
is given RAISED_S, and its word is taken back when it comes. The others look where they wait for its
text, and where they wait for its messages.
"""

from __future__ import annotations

import atexit
import difflib
import hashlib
import logging
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from compiled_fsdp.ir.keys import Keys
from compiled_fsdp.ir.sequence import same_where_known
from compiled_fsdp.torch_private.groups import (
    group_named,
    group_store,
    group_timeout,
    is_alone,
)

from . import leaving
from .meeting import meet
from .own_groups import second_of
from .watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

Asks = Literal["if new", "anew", "never"]

POLL_S = 1.0  # between two looks of a watcher
STUCK_S = 3.0  # at the same run, after which a watcher asks whether others are at the same
SILENCE_S = 60.0  # a rank that showed signs of life and then none for so long is taken for dead
RAISED_S = 20.0  # for a rank whose call of a model has raised to come back
TEXTS_S = 10.0  # for the others to publish their texts, once ranks are known to disagree
AHEAD = 64  # runs before the last one of which a rank that is stuck asks too
KEPT = 10_000  # runs that a rank can tell about later
BREAK_TAG = (1 << 31) - 1  # of the message that nobody sends


class DivergenceError(RuntimeError):
    """Ranks that share a process group are about to communicate differently."""


class CommunicationError(RuntimeError):
    """A collective failed because another rank died, raised or stalls.

    said, peer: the backend's words, and the rank in the group that was waited for, if that is
    known.
    """

    def __init__(self, text: str, said: str, peer: int | None) -> None:
        super().__init__(text)
        self.said, self.peer = said, peer


def lost(what: str, name: str, error: RuntimeError, peer: int | None = None) -> RuntimeError:
    """The error for a collective that failed with `error`: what was communicated, and whom it
    waited for.
    """
    process_group = group_named(name)
    found = failure(process_group.group_name)
    if found:
        return DivergenceError(found)
    ranks = dist.get_process_group_ranks(process_group)
    if isinstance(error, CommunicationError):
        peer = error.peer
    whom = (
        f"rank {ranks[peer]}"
        if peer is not None
        else f"ranks {[r for r in ranks if r != dist.get_rank()]}"
    )
    said = (
        error.said
        if isinstance(error, CommunicationError)
        else str(error).splitlines()[0].split("] ", 1)[-1]
    )
    return CommunicationError(
        f"compiled_fsdp: {what} over process group {name!r} failed, waiting for {whom}: {said}\n"
        "That rank died, raised an error, or stalls for longer than "
        f"{group_timeout(process_group).total_seconds():.0f} s, the timeout of init_process_group: "
        "look at its output first",
        said,
        peer,
    )


@dataclass
class _Group:
    """One group, as far as this process knows it.

    number, runs: how many runs there were, and the digests of the last.
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
    runs: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    agreed: set[tuple[str, str]] = field(default_factory=set)
    failure: str = ""
    settled: int = 0
    is_gone: bool = False
    seen: tuple[int, float] = (0, 0.0)
    attempt: int = 0
    why: str = ""
    num_waits: int = 0
    words: dict[int, tuple[str, float]] = field(default_factory=dict)

    def digest_of_run(self, number: int) -> str:
        at = number - (self.number - len(self.runs)) - 1
        return self.runs[at] if 0 <= at < len(self.runs) else ""

    def step_to(self, number: int) -> tuple[str, str]:
        """The digests of the run before and of this one."""
        return self.digest_of_run(number - 1), self.digest_of_run(number)


_groups: dict[str, _Group] = {}
_texts: Keys[str] = Keys(lambda text, _: hashlib.sha256(text.encode()).hexdigest())


def before_run(text: str, groups: Sequence[str], *, asks: Asks = "if new", why: str = "") -> bool:
    """Called by every graph as it starts, and before each gather outside: count it, and the first
    time compare it with the other ranks. Returns whether other ranks have left graphs to do the
    same.

    asks: whether the others are asked: "if new", about a text that was not compared at this place;
        "anew", also about one that was; "never" (they may ask).
    why: of a run outside a graph, why it is outside, for errors.

    Raises:
        DivergenceError: some rank runs other collectives; the text holds the difference.
        LeftGraph: other ranks run outside a graph what this one is about to run as one.
    """
    found = [group for group in map(_group, groups) if group is not None]
    have_left = False
    for group in found:
        have_left |= _run(group, text, asks=asks, may_leave=len(found) == 1, why=why)
    return have_left


def _run(group: _Group, text: str, *, asks: Asks, may_leave: bool, why: str) -> bool:
    note_goes_on()
    group.number += 1
    group.runs.append(_texts.key(text))
    step = group.step_to(group.number)
    begun, group.attempt = group.attempt, 0
    group.why = why
    if not begun and asks != "anew" and (asks == "never" or step in group.agreed):
        group.agreed.add(step)
        return False
    texts, leavers, attempt = _settle(group, group.number, text, begun)
    if not texts:
        group.agreed.add(step)
        return attempt > begun
    if leavers:
        stays = "its graph has collectives over several groups, of which one asks first"
        stays = leaving.why_stays(group.process_group) if may_leave else stays
        if not stays:
            _forget_run(group, attempt + 1)
            raise leaving.LeftGraph(_others(group, leavers))
        _refuse(group, group.number, attempt + 1, stays)
    raise DivergenceError(describe(group.process_group, texts, _reasons(group, group.number)))


def _settle(
    group: _Group, number: int, text: str, attempt: int = 0
) -> tuple[list[str], list[int], int]:
    """Compare, and again while other ranks leave their graphs.

    Returns the texts that were found first, or none if all agree; the ranks that are to leave
    theirs, this one among them, or none; and the last attempt.
    """
    first: list[str] = []
    while True:
        texts = _exchange(group, number, text, attempt)
        if texts is None:
            return [], [], attempt
        first = first or texts
        leavers = leaving.leavers(texts)
        if not leavers or group.rank in leavers:
            return first, leavers, attempt
        attempt += 1


def _forget_run(group: _Group, attempt: int) -> None:
    """The run has not taken place; the next one has its number."""
    group.runs.pop()
    group.number -= 1
    group.attempt = attempt


def _refuse(group: _Group, number: int, attempt: int, why: str) -> None:
    """Whoever waits for this rank to leave its graph is to wait no longer; and why it stays."""
    key = _key(number, attempt)
    group.store.set(f"{number}/reason/{group.rank}", f"cannot leave its graph: {why}")
    group.store.set(f"{key}/text/{group.rank}", leaving.STAYS)
    group.store.set(f"{key}/{group.rank}", _texts.key(leaving.STAYS))


def _reasons(group: _Group, number: int) -> list[str]:
    """What each rank of a group has said of its run, "" for those that have not."""
    keys = [f"{number}/reason/{rank}" for rank in range(group.size)]
    return [group.store.get(key).decode() if group.store.check([key]) else "" for key in keys]


def _others(group: _Group, ranks: Sequence[int]) -> list[int]:
    """The ranks of a group without these, as all processes are numbered."""
    everyone = dist.get_process_group_ranks(group.process_group)
    return [rank for number, rank in enumerate(everyone) if number not in ranks]


def _key(number: int, attempt: int = 0) -> str:
    return f"{number}.{attempt}" if attempt else str(number)


def agree(process_group: dist.ProcessGroup, text: str) -> list[str] | None:
    """None if all ranks of the group have this text as their next; else the texts by rank, "" for
    those that are silent.
    """
    group = _group(process_group.group_name)
    if group is None:
        return None
    group.number += 1
    group.runs.append(_texts.key(text))
    return _exchange(group, group.number, text)


def everyones(name: str, what: str, mine: str) -> list[str]:
    """Returns what each rank of a group says to the same question; waits until all have said it.

    Raises:
        DivergenceError: some rank has come to something else.
    """
    group = _group(name)
    if group is None:
        return [mine]
    key = f"said/{group.number + 1}"
    group.store.set(f"{key}/{group.rank}", mine)
    texts = agree(group.process_group, what)
    if texts is not None:
        raise DivergenceError(describe(group.process_group, texts))
    return [group.store.get(f"{key}/{rank}").decode() for rank in range(group.size)]


def _exchange(group: _Group, number: int, text: str, attempt: int = 0) -> list[str] | None:
    """Publish, and wait for the others; see the note above."""
    key, digest = _key(number, attempt), _texts.key(text)
    group.store.set(f"{key}/{group.rank}", digest)
    found = _digests(group, number, attempt)
    if set(found) == {digest}:
        group.settled = max(group.settled, number)
        return None
    if group.why and leaving.is_outside(text):
        group.store.set(f"{number}/reason/{group.rank}", f"is outside: {group.why}")
    group.store.set(f"{key}/text/{group.rank}", text)
    begin, texts = time.monotonic(), [""] * group.size
    while not all(texts) and time.monotonic() - begin < _patience(group, texts):
        for rank in range(group.size):
            if not texts[rank] and group.store.check([f"{key}/text/{rank}"]):
                texts[rank] = group.store.get(f"{key}/text/{rank}").decode()
        _watcher.pause(0.05)
    if all(texts) and same_where_known(texts):
        group.settled = max(group.settled, number)
        return None
    return texts


def _patience(group: _Group, texts: list[str]) -> float:
    """Seconds for the texts that are missing: those that are there may all mean the same, or have
    ranks leave their graphs.
    """
    is_sure = not (same_where_known([text for text in texts if text]) or leaving.leavers(texts))
    return TEXTS_S if is_sure else group_timeout(group.process_group).total_seconds()


def _digests(group: _Group, number: int, attempt: int) -> list[str]:
    """Returns what each rank published for a run; returns early, with gaps, when two differ."""
    key = _key(number, attempt)
    found = [""] * group.size
    timeout = group_timeout(group.process_group).total_seconds()
    start, pause = time.monotonic(), 0.001
    beats: dict[int, tuple[str, float]] = {}
    while True:
        group.store.set(
            "asked", str(number)
        )  # again and again: a rank that is ahead of this one may ask for another
        for rank in range(group.size):
            if not found[rank] and group.store.check([f"{key}/{rank}"]):
                found[rank] = group.store.get(f"{key}/{rank}").decode()
        if all(found) or len(set(filter(None, found))) > 1:
            return found
        missing = [rank for rank in range(group.size) if not found[rank]]
        why = _why_not(group, group.store, missing, number)
        if why:
            raise DivergenceError(why)
        silent = [rank for rank in missing if _is_silent(group, rank, beats)]
        waited = time.monotonic() - start
        if silent or waited > timeout:
            after = f"{waited:.0f} s" + (
                f", and show no sign of life for {SILENCE_S:.0f} s" if silent else ""
            )
            raise DivergenceError(_not_there(silent or missing, group.name, f"run {key}", after))
        _watcher.pause(pause)
        pause = min(pause * 1.5, 0.25)


# -- ranks that do not come


def note_raised(error: BaseException) -> None:
    """A call of a model has raised here: others may wait for this rank. See the note above."""
    _say_to_all(f"raised {_named(error)} in a call of a model")


def note_goes_on() -> None:
    """Another call begins: take back what was said."""
    if _has_said:
        _say_to_all("")


_has_said: set[str] = set()  # groups


def _say_to_all(words: str) -> None:
    for group in [g for g in _groups.values() if not g.is_gone]:
        with suppress(RuntimeError, dist.DistError):  # its store may be gone
            group.store.set(f"why/{group.rank}", f"{group.number} {words}" if words else "")
            (_has_said.add if words else _has_said.discard)(group.name)


def _say_at_exit() -> None:
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
    group = _groups.get(process_group.group_name)
    if group is None:
        yield
        return
    group.num_waits += 1
    try:
        yield
    finally:
        group.num_waits -= 1


def _why_not(group: _Group, store: Any, ranks: Sequence[int], number: int) -> str:
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
            "its output for where that was. Let all ranks raise, or none: an exception that one rank "
            "catches leaves the others in the middle of the step"
        )
    return ""


def _not_there(ranks: list[int], name: str, run: str, after: str) -> str:
    return (
        f"compiled_fsdp: ranks {ranks} of process group {name!r} have not reached {run} of that "
        f"group after {after}. They died, stall before it, or took another way. If they only need "
        "longer, raise the timeout of init_process_group, or call compiled_fsdp.warmup first"
    )


def _is_silent(group: _Group, rank: int, beats: dict[int, tuple[str, float]]) -> bool:
    """Whether a rank whose watcher was seen alive has stopped to be. One that was never seen may
    not have begun yet.
    """
    now = time.monotonic()
    beat = group.store.get(f"alive/{rank}").decode() if group.store.check([f"alive/{rank}"]) else ""
    if rank not in beats or beats[rank][0] != beat:
        beats[rank] = beat, now
    return bool(beat) and now - beats[rank][1] > SILENCE_S


def describe(
    process_group: dist.ProcessGroup, texts: list[str], reasons: Sequence[str] = ()
) -> str:
    """The error for texts that differ: who has which, and the first difference as a diff; what ranks
    say of why, and what to do.
    """
    ranks = dist.get_process_group_ranks(process_group)
    kinds: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        kinds.setdefault(text, []).append(rank)
    names = [
        f"  ranks {who}: {text.splitlines()[0] if text else 'silent'}"
        for text, who in kinds.items()
    ]
    shown = [(text, who) for text, who in kinds.items() if text]
    lines: list[str] = []
    if len(shown) > 1:
        (one, first), (two, second) = shown[:2]
        names_of_two = f"rank {first[0]}", f"rank {second[0]}"
        lines = list(
            difflib.unified_diff(
                one.splitlines(), two.splitlines(), *names_of_two, lineterm="", n=2
            )
        )[:60]
    said = [f"  rank {rank} {why}" for rank, why in zip(ranks, reasons, strict=False) if why]
    do = (
        "Look for different models, a branch that depends on data or on the rank, or a rank that does "
        "not compile"
    )
    if any(map(leaving.is_outside, texts)) and any(t and not leaving.is_outside(t) for t in texts):
        do = (
            "Some run a unit in a graph and others outside, as where Dynamo breaks the graph on some "
            "ranks only, at `if rank == 0: print(x)` in forward. Return what one rank needs and print "
            "it behind the call, let all ranks do the same, or do not compile that module"
        )
    return "\n".join(
        [
            f"compiled_fsdp: the ranks of process group {process_group.group_name!r} are about to "
            "communicate differently:",
            *names,
            *lines,
            *said,
            "Ranks that share a group must run the same collectives in the same order. "
            f"{do}; none of this was communicated",
        ]
    )


def failure(name: str) -> str:
    """Returns what the watcher found out about a group, or ""."""
    group = _groups.get(name)
    return group.failure if group is not None else ""


# -- the watcher


def _watch(beat: int) -> None:
    """Answer those who ask for runs that are over here, show that this rank lives, and free a main
    thread that waits in vain.
    """
    for group in [g for g in list(_groups.values()) if not g.is_gone]:
        _watcher.pause(0)
        try:
            _answer(group, beat)
            _ask_if_stuck(group)
        except (RuntimeError, dist.DistError):  # the store is gone: the process group was destroyed
            group.is_gone = True


_watcher = Watcher("compiled_fsdp_watcher", _watch, POLL_S)


def _ask_if_stuck(group: _Group) -> None:
    """See the note on known branches; most ranks only ever find their own word."""
    number, since = group.seen
    if number != group.number:
        group.seen = group.number, time.monotonic()
        return
    if group.failure or time.monotonic() - since < STUCK_S:
        return
    if group.num_waits:
        others = [rank for rank in range(group.size) if rank != group.rank]
        why = _why_not(group, group.watched, others, number)
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


def _answer(group: _Group, beat: int) -> None:
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
        group.settled = number if len(others) == group.size else group.settled
        return
    _compare(group, number, mine)


def _compare(group: _Group, number: int, mine: str) -> None:
    """Let everybody's text of a run be known, and fail if they differ."""
    texts, leavers, attempt = _settle(group, number, _texts.get(mine, ""))
    if texts:
        if leavers:
            _refuse(group, number, attempt + 1, "all ranks had run it before, so that it had begun")
        _fail(group, describe(group.process_group, texts, _reasons(group, number)))


def _fail(group: _Group, text: str) -> None:
    """Free a main thread that waits in vain."""
    group.failure = text
    log.error("%s", group.failure)
    _watcher.pause(POLL_S)  # so that the others know why their connections break
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


# -- helpers


def _group(name: str) -> _Group | None:
    """The record of a group; None if there is nobody to agree with."""
    process_group = group_named(name)
    name = process_group.group_name  # graphs may have another for it
    known = _groups.get(name)
    if known is not None and known.process_group is process_group:
        return known
    if is_alone(process_group):
        return None
    store = group_store(process_group, f"compiled_fsdp/{_meet(name, process_group)}")
    group = _Group(
        name, process_group, process_group.rank(), process_group.size(), store, store.clone()
    )
    _groups[name] = group
    _watcher.start()
    atexit.unregister(_say_at_exit)
    atexit.register(_say_at_exit)
    return group


def _meet(name: str, process_group: dist.ProcessGroup) -> str:
    timeout = group_timeout(process_group).total_seconds()
    store = group_store(process_group, "compiled_fsdp")
    try:
        return meet(store, process_group.rank(), process_group.size(), timeout)
    except TimeoutError as error:
        raise DivergenceError(
            _not_there(list(error.args), name, "the first run", f"{timeout:.0f} s")
        ) from None
