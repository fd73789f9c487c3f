"""Checksums of what travels and rests: how they are summed up, and the ledger that keeps them until
ranks compare them.

[Note: checksums]
The bits of a parameter's part are read as 64-bit integers, in chunks of CHUNK of them. Each chunk's
sum is multiplied by an odd number of its own, and the products are added; all of it wraps around,
so it is exact and no order counts. Any change of bits inside one integer changes the sum, for
certain: an odd number is invertible. Chunks or parts that have changed places change it too;
integers that have changed places inside one chunk do not,
nor do changes that cancel out (by chance: 1 in 2**64).

Ranks do not exchange the sums. For each pair of ranks, the sender adds a hash of what it has summed
up, and the receiver subtracts one of what has arrived, to the same integer, and one all-reduce adds
these integers of all ranks: zeros, unless something differs.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK = 512  # integers: 4 KiB
KEPT = 256  # entries of a unit; forwards without a backward are compared with the next one's
ODD = 0x1E3779B97F4A7C15
MIX = (0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


class ChecksumError(RuntimeError):
    """What a rank has received, or what rested in its memory, is not what was sent or left there.

    The step is not applied: gradients are dropped.

    step: of the model's optimizer in this process, counted from 1.
    faults: what differed, one for each place.
    """

    def __init__(self, text: str, step: int, faults: Sequence[Fault]) -> None:
        super().__init__(text)
        self.step, self.faults = step, tuple(faults)


@dataclass(frozen=True, order=True, slots=True)
class Fault:
    """One place where checksums differ.

    rank: the global rank that is to blame, as far as can be told; -1: one of `among`.
    among: the ranks that it may be.
    unit, parameter: what was communicated, or rested.
    collective: "all-gather", "all-to-all", "all-reduce", "shard at rest", "optimizer state at
        rest", or "replicas".
    phase: "forward" or "backward"; "" at rest.
    text: a sentence, and one of what came of trying it again.
    again: "right": communicated (or read) again from the same memory, it was as it should be;
        "wrong": it was wrong again; "": that could not be tried.
    """

    rank: int
    among: tuple[int, ...]
    unit: str
    parameter: str
    collective: str
    phase: str
    text: str
    again: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was summed up around one collective: [N or 1, P] integers of P parameters.

    versions: of the flat buffers that were gathered, when they were.
    """

    collective: str
    phase: str
    names: tuple[str, ...]
    sent: Tensor
    received: Tensor
    versions: tuple[int, ...] = ()


@dataclass(eq=False)
class Ledger:
    """What a unit has summed up since ranks last compared it.

    on_entry: called with each entry.
    keeps_all: while a whole step runs, of any number of micro-batches; else the last KEPT.
    """

    entries: deque[Entry] = field(default_factory=deque)
    on_entry: Callable[[], None] = lambda: None
    keeps_all: bool = False

    def add(self, entry: Entry) -> None:
        """Note the checksums around a collective that is over."""
        self.entries.append(entry)
        if len(self.entries) > KEPT and not self.keeps_all:
            self.entries.popleft()
        self.on_entry()

    def take(self) -> list[Entry]:
        """The entries; they are forgotten."""
        entries = list(self.entries)
        self.entries.clear()
        return entries


_by_number: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()


def remember(number: int, ledger: Ledger) -> None:
    """Let `ledger_of` find a unit's ledger."""
    _by_number[str(number)] = ledger


def ledger_of(name: str) -> Ledger | None:
    """The ledger of the unit of a parameter "unit#number:name"; None if it is gone."""
    return _by_number.get(name.partition(":")[0].rpartition("#")[2])


def parts_of(name: str) -> tuple[str, str]:
    """The unit, for people, and the parameter of "unit#number:name"."""
    unit, _, parameter = name.partition(":")
    return unit.rpartition("#")[0], parameter


def checksums(
    pieces: Sequence[Tensor], rows: int, messages: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """The sums of what each of `rows` ranks holds of each parameter: int64 [rows, len(sizes)].

    pieces: one flat buffer in which a message of n elements begins at `rows` times the elements
        before it, [rows, n]; or one piece for each message.
    messages: their columns.
    sizes: the columns of each parameter; neighbours share a message.
    """
    sums: list[Tensor] = []
    remaining = list(sizes)
    start = 0
    for place, width in enumerate(messages):
        if len(pieces) == 1 and len(messages) > 1:
            flat = pieces[0].reshape(-1)
            block = flat[rows * start : rows * (start + width)].view(rows, width)
            start += width
        else:
            block = pieces[place].reshape(rows, width)
        at = 0
        while remaining and at + remaining[0] <= width and (at < width or not remaining[0]):
            sums.append(checksum(block.narrow(1, at, remaining[0])))
            at += remaining.pop(0)
    return torch.stack(sums, 1)


def checksum(columns: Tensor) -> Tensor:
    """The sum of every row of [rows, n], of any dtype: int64 [rows]."""
    words = _words(columns)
    rows, numel = words.shape
    if numel <= CHUNK:
        return words.sum(1)
    num = numel // CHUNK
    whole = num * CHUNK
    chunks = words.narrow(1, 0, whole).view(rows, num, CHUNK).sum(2)
    total: Tensor = chunks.mul_(_odd_numbers(num, words.device)).sum(1)
    if whole == numel:
        return total
    # The rest is a chunk too: of the number after the last.
    return total.add_(words.narrow(1, whole, numel - whole).sum(1), alpha=_odd_number(num))


@lru_cache(maxsize=256)
def _odd_numbers(num: int, device: torch.device) -> Tensor:
    """What the sums of chunks are multiplied by."""
    with torch.inference_mode(mode=False):
        return torch.arange(1, 2 * num, 2, device=device) * ODD


def _odd_number(place: int) -> int:
    """The one of this place, as 64 bits wrap around."""
    value = (2 * place + 1) * ODD & (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _words(columns: Tensor) -> Tensor:
    """Rows of any dtype as rows of 64-bit integers; a copy, filled up with zeros, only where they
    do not lie so.
    """
    rows, numel = columns.shape
    size = columns.element_size()
    ratio = 8 // size if size < 8 else 1
    stride, step = columns.stride()
    if (
        numel
        and step == 1
        and not (numel % ratio or columns.storage_offset() % ratio)
        and (rows == 1 or not stride % ratio)
        and size <= 8
    ):
        return (columns.view(-1) if rows == 1 else columns).view(torch.int64).view(rows, -1)
    as_bytes = columns.contiguous().view(-1).view(torch.uint8).view(rows, numel * size)
    filled = as_bytes.new_zeros(rows, -(-numel * size // 8) * 8)
    filled[:, : numel * size] = as_bytes
    return filled.view(torch.int64)


def hashed(sums: Tensor, sender: Tensor | int, receiver: Tensor | int, size: int) -> Tensor:
    """Returns a hash of sums [.., P] that one rank has sent to another: both count in it."""
    x = sums + (sender * size + receiver + 1) * ODD
    for shift, factor in zip((32, 29), MIX, strict=True):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 32)


def difference(sent: Tensor, received: Tensor, rank: int) -> Tensor:
    """This rank's integer for each of P sums: those of all ranks add up to 0 if what was sent
    [N, P] by each is what was received [N, P] by each.
    """
    size = received.shape[0]
    others = torch.arange(size, device=sent.device)[:, None]
    return hashed(sent, rank, others, size).sum(0) - hashed(received, others, rank, size).sum(0)
