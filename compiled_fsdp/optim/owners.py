"""Which rank updates which matrix, and which matrices travel together: decided alike on every rank
from shapes, order and the number of ranks.

Work is balanced by the longest-processing-time rule (Graham, 1969): the matrix with the most work
next, to the rank with the least so far. Equal layers thus alternate between ranks, so that a bucket
of neighbours is about balanced too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from compiled_fsdp.torch_private.groups import common_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.planning.costs import Costs

    from .cut import Cut

BUCKET_BYTES = 4 << 20
EVERYONE = -1  # in the place of an owner

# Of a machine that nobody has measured, for the rule of `is_cheaper_everywhere`.
LATENCY = 2e-4  # seconds of an exchange of few bytes
FLOPS = 5e10  # floating-point operations a second


@dataclass(frozen=True, slots=True)
class Item:
    """Tensors that are to be whole at the same rank.

    cuts: all over one group.
    work: of its update, in floating-point operations.
    num_results: of the tensors, how many come back updated: the first ones.
    """

    name: str
    cuts: tuple[Cut, ...]
    work: float
    num_results: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensors, as they are sent."""
        return sum(cut.dtype.itemsize * prod(cut.shape) for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Items that travel together: their numbers, and the owner of each, a rank of the group or
    EVERYONE.
    """

    group: str
    numbers: tuple[int, ...]
    owners: tuple[int, ...]


def schedule(
    items: Sequence[Item], bucket_bytes: int, costs: Costs | None = None
) -> tuple[Bucket, ...]:
    """All items in buckets, neighbours together, in the order of their first items."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.cuts[0].group, []).append(number)
    found: list[Bucket] = []
    for group, numbers in groups.items():
        works = [items[number].work for number in numbers]
        size = items[numbers[0]].cuts[0].size
        if is_cheaper_everywhere(sum(works), size, group, costs):
            owners = [EVERYONE] * len(works)
        else:
            owners = balance(works, size)
        owner_of = dict(zip(numbers, owners, strict=True))
        for part in _neighbours([(n, items[n].num_bytes) for n in numbers], bucket_bytes):
            found.append(Bucket(group, tuple(part), tuple(owner_of[n] for n in part)))
    return tuple(sorted(found, key=lambda bucket: bucket.numbers[0]))


def is_cheaper_everywhere(work: float, size: int, group: str, costs: Costs | None) -> bool:
    """Whether every rank should do all the work of a group: what the others do in its place takes
    less time than the exchange that brings it back.
    """
    latency, flops = LATENCY, FLOPS
    if costs is not None:
        latency, flops = costs.link(common_name(group)).latency, costs.flops
    return (work - work / size) / flops < latency


def balance(works: Sequence[float], size: int) -> list[int]:
    """An owner among `size` ranks for each; see the module docstring."""
    loads = [0.0] * size
    owners = [0] * len(works)
    for number in sorted(range(len(works)), key=lambda n: (-works[n], n)):
        owner = loads.index(min(loads))
        loads[owner] += works[number]
        owners[number] = owner
    return owners


def _neighbours(sizes: Sequence[tuple[int, int]], bucket_bytes: int) -> list[list[int]]:
    """Consecutive numbers, together of at most so many bytes, or one alone."""
    parts: list[list[int]] = []
    room = 0
    for number, num_bytes in sizes:
        if not parts or num_bytes > room:
            parts.append([])
            room = bucket_bytes
        parts[-1].append(number)
        room -= num_bytes
    return parts
