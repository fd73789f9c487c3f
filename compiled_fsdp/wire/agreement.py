"""Ranks that share a group agree, before they communicate: through the store, never through the
group itself.

Every graph begins with `fsdp::agree`, which carries the graph's collectives as text, structure and
no symbol names; it is part of the compiled code, so that a warm cache brings it along. The first
run of a text in a process, and the first after another one than before, compares it with the other
ranks of each group; later runs look it up and count, and touch no store. A gather outside a graph
is a run too. It is compared when it is its unit's first, and like a graph if graphs read the unit
too: Dynamo may have given it up on one rank alone. A reduction outside a graph is compared when it
is of other parameters than the unit's last one. So is the list of parameters before the first
step.

Where to read on: how texts are compared (`comparison.py`), where ranks parted before that was
noticed (`parting.py`), what the watcher thread does (`answers.py`), ranks that do not come
(`absence.py`), the errors (`divergence.py`).
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from compiled_fsdp.torch_private.groups import group_named, group_store, group_timeout, is_alone

from . import comparison, leaving
from .absence import not_there, note_goes_on, say_at_exit
from .answers import watcher
from .comparison import difference, refuse, settle
from .divergence import CommunicationError, DivergenceError, describe
from .meeting import meet
from .members import Member, members, others

if TYPE_CHECKING:
    from collections.abc import Sequence

Asks = Literal["if new", "anew", "never"]


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
    found = [group for group in map(member_of, groups) if group is not None]
    have_left = False
    for group in found:
        have_left |= _run(group, text, asks=asks, may_leave=len(found) == 1, why=why)
    return have_left


def _run(group: Member, text: str, *, asks: Asks, may_leave: bool, why: str) -> bool:
    note_goes_on()
    number = group.count(text)
    step = group.step_to(number)
    begun, group.attempt = group.attempt, 0
    group.why = why
    if not begun and asks != "anew" and (asks == "never" or step in group.agreed):
        group.agreed.add(step)
        return False
    texts, leavers, attempt = settle(group, number, text, begun)
    if not texts:
        group.agreed.add(step)
        return attempt > begun
    if leavers:
        stays = "its graph has collectives over several groups, of which one asks first"
        stays = leaving.why_stays(group.process_group) if may_leave else stays
        if not stays:
            group.forget_run()
            group.attempt = attempt + 1
            raise leaving.LeftGraph(others(group, leavers))
        refuse(group, number, attempt + 1, stays)
    raise DivergenceError(difference(group, number, texts))


def agree(process_group: dist.ProcessGroup, text: str) -> list[str] | None:
    """None if all ranks of the group have this text as their next; else the texts by rank, "" for
    those that are silent.
    """
    group = member_of(process_group.group_name)
    if group is None:
        return None
    return comparison.exchange(group, group.count(text), text)


def everyones(name: str, what: str, mine: str) -> list[str]:
    """Returns what each rank of a group says to the same question; waits until all have said it.

    Raises:
        DivergenceError: some rank has come to something else.
    """
    group = member_of(name)
    if group is None:
        return [mine]
    key = f"said/{group.number + 1}"
    group.store.set(f"{key}/{group.rank}", mine)
    texts = agree(group.process_group, what)
    if texts is not None:
        raise DivergenceError(describe(group.process_group, texts))
    return [group.store.get(f"{key}/{rank}").decode() for rank in range(group.size)]


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


def failure(name: str) -> str:
    """Returns what the watcher found out about a group, or ""."""
    group = members.get(name)
    return group.failure if group is not None else ""


def member_of(name: str) -> Member | None:
    """The record of a group; None if there is nobody to agree with."""
    process_group = group_named(name)
    name = process_group.group_name  # graphs may have another for it
    known = members.get(name)
    if known is not None and known.process_group is process_group:
        return known
    if is_alone(process_group):
        return None
    store = group_store(process_group, f"compiled_fsdp/{_meet(name, process_group)}")
    group = Member(
        name, process_group, process_group.rank(), process_group.size(), store, store.clone()
    )
    members[name] = group
    watcher.start()
    atexit.unregister(say_at_exit)
    atexit.register(say_at_exit)
    return group


def _meet(name: str, process_group: dist.ProcessGroup) -> str:
    timeout = group_timeout(process_group).total_seconds()
    store = group_store(process_group, "compiled_fsdp")
    try:
        return meet(store, process_group.rank(), process_group.size(), timeout)
    except TimeoutError as error:
        raise DivergenceError(
            not_there(list(error.args), name, "the first run", f"{timeout:.0f} s")
        ) from None
