"""How many tokens went to which expert: of the user's all-to-alls in a profile, the rows that they
moved, and the counts that ranks told each other before (`Plan(record_routing=True)`).

A profile has counts as numbers without a meaning (`wire/ranges.py:note_counts`). They are taken for
those of an all-to-all behind them if they add up, rank by rank, to the rows that it sent and
received; where torch has cut these lists short, to all that it sent. Each counts once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.wire.ranges import COUNTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compiled_fsdp.dump.layout import Routed

    from .dump_folder import DumpedGraph
    from .profiles import Event

# By rank and, in it, by expert.
Table = tuple[tuple[int, ...], ...]


def with_counts(events: Iterable[Event]) -> list[Event]:
    """The same events, which come by time, where exchanges know the tokens of each expert; without
    those that told them.
    """
    found: list[Event] = []
    told: list[tuple[list[int], list[int]]] = []
    for event in events:
        if event.name.startswith(COUNTS):
            told += _told(event.name)
            continue
        for index, (sent, received) in enumerate(told if event.pieces or event.rows else ()):
            experts = _as_moved(sent, received, event)
            if experts is not None:
                del told[index]
                event = replace(event, experts=experts, pieces=tuple(map(_sums, experts[::-1])))
                break
        found.append(event)
    return found


def _told(name: str) -> list[tuple[list[int], list[int]]]:
    sent, _, received = name.removeprefix(COUNTS).partition("|")
    try:
        return [([*map(int, sent.split())], [*map(int, received.split())])]
    except ValueError:  # garbled: nothing is known
        return []


def _as_moved(sent: list[int], received: list[int], event: Event) -> tuple[Table, Table] | None:
    """Returns what goes to each expert, and what comes for each expert here, by rank, if the
    exchange moved just that.
    """
    if not event.pieces:
        return _at_large(sent, received, event)
    (wanted, to_each), size = event.pieces, len(event.pieces[0])
    to = _rows(sent, size)
    if to is None or _sums(to) != to_each:
        return None
    for of in _possible(to, received, size):
        if _sums(of) == wanted:
            return to, of
    return None


def _at_large(sent: list[int], received: list[int], event: Event) -> tuple[Table, Table] | None:
    """Returns the same where the lists are cut short: over how many ranks is the graph's to say."""
    is_alike = len(sent) == len(received) and sum(sent) == event.rows
    return ((tuple(sent),), (tuple(received),)) if is_alike else None


def _possible(to: Table, received: list[int], size: int) -> list[Table]:
    """Returns what may come from each rank for each expert here: all that was received, or of what
    all ranks send to all experts the part of one that sent what this one did.
    """
    each = len(to[0])
    rows = _rows(received, size)
    if rows is None:
        return []
    if len(rows[0]) == each:
        return [rows]
    mine = tuple(n for row in to for n in row)
    return [
        tuple(row[rank * each : (rank + 1) * each] for row in rows)
        for rank in range(size)
        if rows[rank] == mine
    ]


def _rows(numbers: list[int], size: int) -> Table | None:
    each, rest = divmod(len(numbers), size) if size else (0, 1)
    if rest or not each:
        return None
    return tuple(tuple(numbers[n * each : (n + 1) * each]) for n in range(size))


def _sums(table: Table) -> tuple[int, ...]:
    return tuple(map(sum, table))


def routed(starts: Iterable[Event], graph: DumpedGraph) -> list[Routed]:
    """What the user's all-to-alls among a graph's collectives moved, as far as a profile has it."""
    found: list[Routed] = []
    collectives = graph.timeline["collectives"]
    for index, (start, collective) in enumerate(zip(starts, collectives, strict=False)):
        if not start.pieces:
            continue
        ranks = graph.timeline["groups"].get(collective["group"], [])
        to, of = (_cut(table, len(ranks)) for table in start.experts or ((), ()))
        received, sent = (_sums(of), _sums(to)) if to and of else start.pieces
        away = sum(n for rank, n in zip(ranks, sent, strict=False) if rank != graph.rank)
        found.append(
            {
                "collective": index,
                "received": [*received],
                "sent": [*sent],
                "bytes": away * collective["row"],
                "to": [[*row] for row in to],
                "of": [[*row] for row in of],
            }
        )
    return found


def _cut(table: Table, size: int) -> Table:
    """Returns a table in rows of ranks, where it came as one."""
    if len(table) == size or len(table) != 1:
        return table
    return _rows([*table[0]], size) or ()


def in_words(starts: Iterable[Event]) -> str:
    """What the exchanges of a step whose experts are known say of routing; "" if there is none."""
    known = [event.experts for event in starts if event.experts]
    if not known:
        return ""
    sent = [[n for row in to for n in row] for to, _ in known]
    here = [[*map(sum, zip(*of, strict=True))] for _, of in known]
    skew = max(max(counts) * len(counts) / max(1, sum(counts)) for counts in sent)
    return (
        f"{len(known)} dispatches, {sum(map(sum, sent))} rows from here to {len(sent[0])} experts, "
        f"{sum(map(sum, here))} to experts here; the busiest expert of a dispatch gets "
        f"{skew:.2g} times the mean"
    )
