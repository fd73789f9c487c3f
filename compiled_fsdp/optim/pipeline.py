"""Whole matrices at their owners, one bucket after another: while one is updated, the next ones
travel to their owners, and the last one's results travel back.

    send     0 1 2   3   4
    update         0   1   2   3   4
    results          0   1   2   3   4      a result is awaited when the next bucket is updated
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.wire import agreement

from .exchange import Exchange, kind_of
from .owners import BUCKET_BYTES, EVERYONE, Bucket, Item, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from compiled_fsdp.planning.costs import Costs

    from .cut import Cut

AHEAD = 2  # buckets on their way to their owners while one is updated


class Pipeline:
    """The same items in every step.

    doing: who updates, for errors and profiles.
    buckets: see `owners.schedule`.
    """

    def __init__(
        self,
        items: Sequence[Item],
        doing: str,
        bucket_bytes: int = BUCKET_BYTES,
        costs: Costs | None = None,
    ) -> None:
        self._items = tuple(items)
        self._doing = doing
        self.buckets = schedule(self._items, bucket_bytes, costs)
        self._texts = {
            bucket.group: self._text(bucket.group) for bucket in self.buckets if bucket.group
        }

    def run(
        self,
        prepare: Callable[[int], Sequence[Tensor]],
        update: Callable[..., Sequence[Tensor]],
    ) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Update all items, each at its owner, and yield the number of each with this rank's pieces
        of its results, bucket by bucket.

        Args:
            prepare: called with an item's number on every rank, shortly before it is sent; returns
                this rank's pieces.
            update: called with an item's number and its whole tensors, at its owner; returns the
                results whole, of the shapes and dtypes of the first of them.

        Raises:
            DivergenceError: the ranks of a group are about to exchange different things.
        """
        for group, text in self._texts.items():
            agreement.before_run(text, (group,))
        sent: deque[tuple[Bucket, Exchange]] = deque()
        back: deque[tuple[Bucket, Exchange]] = deque()
        following = iter(self.buckets)
        for bucket in following:
            sent.append((bucket, self._send(bucket, prepare)))
            if len(sent) > AHEAD:
                break
        while sent:
            bucket, exchange = sent.popleft()
            results = self._update(bucket, exchange, update)
            back.append((bucket, self._send_back(bucket, results)))
            if (later := next(following, None)) is not None:
                sent.append((later, self._send(later, prepare)))
            while len(back) > (1 if sent else 0):
                yield from self._results(*back.popleft())

    def _send(self, bucket: Bucket, prepare: Callable[[int], Sequence[Tensor]]) -> Exchange:
        """Start to send this rank's pieces to the owners."""
        cut = self._first(bucket)
        sent: list[list[Tensor]] = [[] for _ in range(cut.size)]
        for number, owner in zip(bucket.numbers, bucket.owners, strict=True):
            pieces = prepare(number)
            for rank in range(cut.size) if owner == EVERYONE else [owner]:
                sent[rank].extend(pieces)
        mine = self._owned(bucket, cut.rank)
        awaited = [
            [kind_of(each, rank) for number in mine for each in self._items[number].cuts]
            for rank in range(cut.size)
        ]
        return Exchange(sent, awaited, bucket.group, cut.device, self._named(bucket, "to owners"))

    def _update(
        self, bucket: Bucket, exchange: Exchange, update: Callable[..., Sequence[Tensor]]
    ) -> dict[int, Sequence[Tensor]]:
        """The results of the items that this rank owns, by number."""
        pieces = [iter(each) for each in exchange.wait()]
        results = {}
        for number in self._owned(bucket, self._first(bucket).rank):
            item = self._items[number]
            wholes = [cut.join([next(each) for each in pieces]) for cut in item.cuts]
            results[number] = update(number, *wholes)
            self._check(item, results[number])
        return results

    def _send_back(self, bucket: Bucket, results: dict[int, Sequence[Tensor]]) -> Exchange:
        """Start to send each rank its pieces of the results; of those that it has itself, none."""
        cut = self._first(bucket)
        sent = [self._pieces(results, rank) for rank in range(cut.size)]
        if EVERYONE in bucket.owners:
            return Exchange([sent[cut.rank]], [], "", cut.device, "")
        awaited = [
            [
                kind_of(each, cut.rank)
                for number in self._owned(bucket, rank)
                for each in self._items[number].cuts[: self._items[number].num_results]
            ]
            for rank in range(cut.size)
        ]
        return Exchange(sent, awaited, bucket.group, cut.device, self._named(bucket, "back"))

    def _results(
        self, bucket: Bucket, exchange: Exchange
    ) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Each item with this rank's pieces of its results."""
        received = [iter(each) for each in exchange.wait()]
        for number, owner in zip(bucket.numbers, bucket.owners, strict=True):
            pieces = received[0 if owner == EVERYONE else owner]
            yield number, [next(pieces) for _ in range(self._items[number].num_results)]

    def _pieces(self, results: dict[int, Sequence[Tensor]], rank: int) -> list[Tensor]:
        return [
            cut.piece(result, rank)
            for number, each in results.items()
            for cut, result in zip(self._items[number].cuts, each, strict=False)
        ]

    def _check(self, item: Item, results: Sequence[Tensor]) -> None:
        expected = [(cut.shape, cut.dtype) for cut in item.cuts[: item.num_results]]
        found = [(tuple(each.shape), each.dtype) for each in results]
        if found != expected:
            raise TypeError(
                f"{self._doing}: the update of {item.name} returned {_kinds(found)}; should be "
                f"{_kinds(expected)}, as the first {item.num_results} of what it was called with, "
                "since every rank has made room for that. Cast or reshape the result, or change "
                "num_results"
            )

    def _owned(self, bucket: Bucket, rank: int) -> list[int]:
        return [
            number
            for number, owner in zip(bucket.numbers, bucket.owners, strict=True)
            if owner in (rank, EVERYONE)
        ]

    def _first(self, bucket: Bucket) -> Cut:
        """What is the same for all of a bucket: group, rank, size and device."""
        return self._items[bucket.numbers[0]].cuts[0]

    def _named(self, bucket: Bucket, way: str) -> str:
        names = ", ".join(self._items[number].name for number in bucket.numbers)
        return f"{self._doing} {way} ({names})"

    def _text(self, group: str) -> str:
        """What the ranks of a group are to agree on."""
        lines = [
            f"{self._items[number].name} of "
            f"{_kinds([(c.shape, c.dtype) for c in self._items[number].cuts])} cut on "
            f"{[c.dim for c in self._items[number].cuts]}, {self._items[number].num_results} back, "
            f"at {owner}, in bucket {place}"
            for place, bucket in enumerate(b for b in self.buckets if b.group == group)
            for number, owner in zip(bucket.numbers, bucket.owners, strict=True)
        ]
        return "\n".join([f"{self._doing} of {len(lines)} matrices", *lines])


def _kinds(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for shape, dtype in kinds)
