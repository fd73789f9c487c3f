"""All-gather and all-to-all over gloo by sends and receives, straight between the buffers: nothing
is packed or unpacked.

Gloo's own all-gather runs on a worker thread, gathers into a buffer of its own and copies that out,
through views that it makes and drops there. On torch 2.13 that thread's heap ends up corrupted:
`malloc(): unaligned tcache chunk detected`, always in its `allgather_coalesced`, about once in ten
thousand gathers of a loaded machine. Sends and receives need neither thread nor copy, and each
piece of a bucket travels from where it is to where it belongs.

Private torch used here (tried on 2.13): `ProcessGroup.send`, `recv`, `_get_backend`.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.torch_private.groups import backend_of, group_named, kept_for, register_work
from compiled_fsdp.torch_private.tracing import unprofiled

from . import ranges
from .absence import waiting
from .agreement import lost

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

FIRST_TAG, TAGS = 1 << 30, 1 << 30  # of messages; users' own are small numbers

# By name, a group and the numbers of its messages: one that was made again under that name begins
# anew, as on every rank, since one may have sent more than others before.
_tags: dict[str, tuple[dist.ProcessGroup, itertools.count[int]]] = {}
# Until awaited: torch keeps no reference to the Python half of a Work, nor gloo to its buffers.
_pending: set[Exchange] = set()


class Exchange(dist._Work):  # type: ignore[name-defined,misc]
    """The sends and receives of a collective as one `Work`; keeps what they read and write
    (`buffers[0]`) until they are done.

    works: each with the rank that it needs.
    what: what is communicated, for errors.
    group: outlives them, even if the process group is destroyed before anybody waits.
    phase: for its range in a profile; "" where somebody else opens one.
    """

    phase = ""

    def __init__(
        self,
        collective: str,
        works: list[tuple[int, Any]],
        buffers: tuple[Tensor, ...],
        what: str,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.collective = collective
        self.works = works
        self.buffers = buffers
        self.what = what
        self.group = group

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them.

        Raises:
            CommunicationError: a rank died, raised or stalls for longer than the group's timeout.
            DivergenceError: the ranks are found to communicate different things.
        """
        _pending.discard(self)
        works, self.works = self.works, []
        what = self.what if self.phase else ""
        with (
            ranges.around(f"wait {self.collective}", self.phase, what),
            waiting(self.group),
        ):
            for peer, work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    words = self.collective.replace("_", "-") + (
                        f" of {self.what}" if self.what else ""
                    )
                    raise lost(words, self.group.group_name, error, peer) from error
        self.buffers = ()
        return True


def start(
    shard: Tensor, sizes: Sequence[int], group_size: int, name: str, what: str = "", phase: str = ""
) -> tuple[Tensor, Exchange]:
    """Start to gather the pieces of `shard` [sum of sizes] from every rank; see `ops.py` for where
    each comes out.

    As with every collective, all ranks of the group must start theirs in the same order.
    """
    shard = shard.contiguous()  # tensor parallelism gathers activations too
    out = shard.new_empty(gathered_shape(shard, group_size))
    received = [
        piece.view(group_size, -1) for piece in out.view(-1).split([group_size * n for n in sizes])
    ]
    sent = [[piece] * group_size for piece in shard.view(-1).split(list(sizes))]
    work = _exchange("all_gather", out, sent, received, what, name)
    work.phase = phase
    return out, work


def all_to_all(
    rows: Sequence[Tensor], group_size: int, name: str, what: str = "", phase: str = ""
) -> Tensor:
    """Start to send row r of every piece [group_size, n_i] to rank r; see `start`, and `ops.py` for
    the result.
    """
    pieces = [piece.contiguous() for piece in rows]
    sizes = [piece.shape[1] for piece in pieces]
    out = pieces[0].new_empty(group_size, sum(sizes))
    received = [list(column.unbind()) for column in out.split(sizes, dim=1)]
    sent = [list(piece.unbind()) for piece in pieces]
    work = _exchange("all_to_all", out, sent, received, what, name)
    work.phase = phase
    register_work(out, work)
    return out


def exchange(received: Sequence[Tensor], sent: Sequence[Tensor], name: str, what: str) -> Exchange:
    """Start to send one tensor to each rank, of any size, and to receive one from each."""
    work = _exchange("all_to_all", received[0], [sent], [received], what, name)
    work.buffers = (*received, *sent)
    work.phase = "step"
    return work


def _exchange(
    collective: str,
    out: Tensor,
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[Tensor]],
    what: str,
    name: str,
) -> Exchange:
    """For each piece: send `sent[piece][rank]` to every rank, and get `received[piece][rank]` from
    it.

    Messages that carry different things never meet, or gloo would end the process of whoever gets
    one of another size; see "known branches" in `agreement.py`.
    """
    group = group_named(name)
    rank, size = group.rank(), group.size()
    others = [(rank + step) % size for step in range(1, size)]
    tags = kept_for(group, group.group_name, _tags, itertools.count)
    works: list[tuple[int, Any]] = []
    parameters = what.partition(" (")[2]  # not the unit: its class may have another name elsewhere
    told_apart = zlib.crc32(f"{collective} {parameters}".encode())
    for outgoing, incoming in zip(sent, received, strict=True):
        tag = FIRST_TAG + (next(tags) ^ told_apart) % TAGS
        with unprofiled():
            works += [
                (peer, group.recv([incoming[peer]], peer, tag))
                for peer in others
                if incoming[peer].numel()
            ]
            works += [
                (peer, group.send([outgoing[peer]], peer, tag))
                for peer in others
                if outgoing[peer].numel()
            ]
    for outgoing, incoming in zip(sent, received, strict=True):
        incoming[rank].copy_(outgoing[rank])
    buffers = (out, *(piece for pieces in sent for piece in pieces))
    work = Exchange(collective, works, buffers, what, group)
    _pending.add(work)
    return work


def gathered_shape(shard: Tensor, group_size: int) -> tuple[int, ...]:
    """Returns the shape of what is gathered: all ranks' shards, one after the other on dim 0."""
    return (group_size * shard.shape[0], *shard.shape[1:])


def is_gloo(name: str, device: torch.device) -> bool:
    """Whether the group communicates tensors of `device` by gloo."""
    if device.type != "cpu":
        return False
    group = group_named(name)
    backend = backend_of(group)
    if backend in ("gloo", "timed", "fake"):  # the second has no backend for a kind of device
        return backend == "gloo"
    return str(group._get_backend(device).name()) == "gloo"
