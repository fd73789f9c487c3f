"""Whose checksums differ, from what all ranks of a group say of them; the same on each rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.checksums import GATHERED
from compiled_fsdp.wire.checks import Fault

from . import replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .replay import Again

    Evidence = dict[str, list[list[Any]]]

UNKNOWN = -1  # for a rank


def unwritten(said: Sequence[Evidence]) -> list[tuple[str, str, str]]:
    """What has changed at rest on all ranks that hold any of it, if several do: programs write on
    all ranks, memory fails on one.
    """
    holders: Counter[tuple[str, str, str]] = Counter()
    changed: Counter[tuple[str, str, str]] = Counter()
    for evidence in said:
        for what, unit, parameter, holds, is_changed, *_ in evidence["rests"]:
            holders[what, unit, parameter] += holds
            changed[what, unit, parameter] += is_changed
    return [key for key, num in holders.items() if num > 1 and changed[key] >= num]


def blame(
    said: Sequence[Evidence],
    written: Sequence[tuple[str, str, str]],
    ranks: Sequence[int],
    tried: Sequence[list[Again]],
) -> list[Fault]:
    """The faults that the ranks of a group, whose global numbers are `ranks`, have found together.

    tried: what came of trying again what travelled, by rank, in the order of what they say of it.
    """
    faults = []
    for rank, evidence in zip(ranks, said, strict=True):
        for what, unit, parameter, _, is_changed, since, latest, is_still in evidence["rests"]:
            if is_changed and (what, unit, parameter) not in written:
                again, told = replay.of_rest(is_still)
                text = (
                    f"rank {rank}: it has changed in memory between {since} and {latest}, and no "
                    "write was counted (one through .data, on this rank alone, would look "
                    f"the same); {told}"
                )
                faults.append(Fault(rank, (rank,), unit, parameter, what, "", text, again))
    travelled = zip(*(evidence["travelled"] for evidence in said), strict=True)
    for entries, found in zip(travelled, zip(*tried, strict=True), strict=True):
        size = len(entries[0][-1])  # smaller than the group where slices were gathered
        for start in range(0, len(ranks), size):
            part = slice(start, start + size)
            faults += _of_travelled(entries[part], ranks[part], found[part])
    return faults


def _of_travelled(
    entries: Sequence[list[Any]], ranks: Sequence[int], found: Sequence[Again]
) -> list[Fault]:
    """One parameter in one collective: `entries[r]` has what rank r has sent to each, and received
    from each; `found[r]`, what it found when that was tried again.
    """
    _, collective, phase, unit, parameter, *_ = entries[0]
    size, faults = len(entries), []
    for sender in range(size):
        sent = entries[sender][-2]
        wrong = [r for r in range(size) if entries[r][-1][sender] != sent[r]]
        others = [r for r in range(size) if r != sender]
        if not wrong:
            continue
        if collective == GATHERED:
            again, told = replay.of_gather(sender, found[0]["at"], sent[0], found, ranks)
        else:
            again, told = replay.of_exchange(sender, found, ranks)
        if sender in wrong or (len(others) > 1 and set(others) <= set(wrong)):
            who = ranks[sender]
            text = f"rank {who} has sent something else than it had summed up just before; {told}"
            faults.append(Fault(who, (who,), unit, parameter, collective, phase, text, again))
            continue
        for receiver in wrong:
            whom, who = ranks[receiver], ranks[sender]
            text = (
                f"rank {whom} has received something else than rank {who} has sent: the memory of "
                f"rank {whom}, or the way between the two; {told}"
            )
            faults.append(Fault(whom, (whom, who), unit, parameter, collective, phase, text, again))
    return faults


def of_replicas(shown: Sequence[list[list[Any]]], ranks: Sequence[int]) -> list[Fault]:
    """What should be the same on these ranks, each of which shows its sums."""
    faults = []
    for entries in zip(*shown, strict=True):
        collective, phase, unit, parameter, *_ = entries[0]
        found = [entry[-2] for entry in entries]
        if phase:
            again, told = replay.of_all_reduce(found)
        else:
            again, told = replay.of_rest(not any(each["still"][each["at"]] for each in found))
        values = Counter(entry[-1] for entry in entries)
        (most, num), *_ = values.most_common(1)
        odd = [rank for rank, entry in zip(ranks, entries, strict=True) if entry[-1] != most]
        what = "its reduced gradient" if phase else "its shard"
        if num <= len(ranks) // 2:
            text = f"ranks {list(ranks)} are replicas, and {what} differs between them; {told}"
            which = UNKNOWN, tuple(ranks)
            faults.append(Fault(*which, unit, parameter, collective, phase, text, again))
            continue
        for rank in odd:
            text = (
                f"rank {rank}: {what} differs from that of the other replicas {list(ranks)}; {told}"
            )
            faults.append(Fault(rank, (rank,), unit, parameter, collective, phase, text, again))
    return faults
