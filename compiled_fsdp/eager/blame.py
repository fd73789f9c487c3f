"""Whose checksums differ, from what all ranks of a group say of them; the same on each rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from compiled_fsdp.wire.checks import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    said: Sequence[Evidence], written: Sequence[tuple[str, str, str]], ranks: Sequence[int]
) -> list[Fault]:
    """The faults that the ranks of a group, whose global numbers are `ranks`, have found together."""
    faults = []
    for rank, evidence in zip(ranks, said, strict=True):
        for what, unit, parameter, _, is_changed, since, latest in evidence["rests"]:
            if is_changed and (what, unit, parameter) not in written:
                text = (
                    f"rank {rank}: it has changed in memory between {since} and {latest}, and no "
                    "write was counted (one through .data, on this rank alone, would look the same)"
                )
                faults.append(Fault(rank, (rank,), unit, parameter, what, "", text))
    for entries in zip(*(evidence["travelled"] for evidence in said), strict=True):
        faults += _of_travelled(entries, ranks)
    return faults


def _of_travelled(entries: Sequence[list[Any]], ranks: Sequence[int]) -> list[Fault]:
    """One parameter in one collective: `entries[r]` has what rank r has sent to each, and received
    from each.
    """
    _, collective, phase, unit, parameter, *_ = entries[0]
    size, faults = len(entries), []
    for sender in range(size):
        sent = entries[sender][-2]
        wrong = [r for r in range(size) if entries[r][-1][sender] != sent[r]]
        others = [r for r in range(size) if r != sender]
        if not wrong:
            continue
        if sender in wrong or (len(others) > 1 and set(others) <= set(wrong)):
            text = f"rank {ranks[sender]} has sent something else than it had summed up just before"
            who = ranks[sender]
            faults.append(Fault(who, (who,), unit, parameter, collective, phase, text))
            continue
        for receiver in wrong:
            whom, who = ranks[receiver], ranks[sender]
            text = (
                f"rank {whom} has received something else than rank {who} has sent: the memory of "
                f"rank {whom}, or the way between the two"
            )
            faults.append(Fault(whom, (whom, who), unit, parameter, collective, phase, text))
    return faults


def of_replicas(shown: Sequence[list[list[Any]]], ranks: Sequence[int]) -> list[Fault]:
    """What should be the same on these ranks, each of which shows its sums."""
    faults = []
    for entries in zip(*shown, strict=True):
        collective, phase, unit, parameter, _ = entries[0]
        values = Counter(entry[-1] for entry in entries)
        (most, num), *_ = values.most_common(1)
        odd = [rank for rank, entry in zip(ranks, entries, strict=True) if entry[-1] != most]
        what = "its reduced gradient" if phase else "its shard"
        if num <= len(ranks) // 2:
            text = f"ranks {list(ranks)} are replicas, and {what} differs between them"
            faults.append(Fault(UNKNOWN, tuple(ranks), unit, parameter, collective, phase, text))
            continue
        for rank in odd:
            text = f"rank {rank}: {what} differs from that of the other replicas {list(ranks)}"
            faults.append(Fault(rank, (rank,), unit, parameter, collective, phase, text))
    return faults
