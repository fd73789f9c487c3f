"""All-gather over gloo by sends and receives: every rank sends its shard to every other, straight between the buffers.

Gloo's own all-gather runs on a worker thread, gathers into a buffer of its own and copies that out, through views that it makes
and drops there. On torch 2.13 that thread's heap ends up corrupted: `malloc(): unaligned tcache chunk detected`, always in its
`allgather_coalesced`, about once in ten thousand gathers of a loaded machine. Sends and receives need neither thread nor copy.

Private torch used here (tried on 2.13): `ProcessGroup.send`, `recv`, `_get_backend`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_private import group_named, register_work

if TYPE_CHECKING:
    from datetime import timedelta

FIRST_TAG, TAGS = 1 << 30, 1 << 30  # of messages; users' own are small numbers

_tags: dict[str, itertools.count[int]] = {}
_pending: set[Exchange] = set()  # torch keeps no reference to the Python half of a Work


class Exchange(dist._Work):  # type: ignore[name-defined,misc]
    """Several sends and receives as one `Work`; keeps what they read and write until they are done."""

    def __init__(self, works: list[Any], buffers: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.works = works
        self.buffers = buffers

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them."""
        _pending.discard(self)
        works, self.works = self.works, []
        for work in works:
            work.wait()
        self.buffers = ()
        return True


def all_gather(shard: Tensor, group_size: int, name: str) -> Tensor:
    """Start to gather `shard` [n] from every rank to [group_size * n]; `_c10d_functional.wait_tensor` awaits it.

    As with every collective, all ranks of the group must start their gathers in the same order.
    """
    group = group_named(name)
    rank = group.rank()
    out = shard.new_empty(group_size * shard.numel())
    rows = out.view(group_size, -1)
    tag = FIRST_TAG + next(_tags.setdefault(name, itertools.count())) % TAGS
    others = [(rank + step) % group_size for step in range(1, group_size)]
    works = [group.recv([rows[peer]], peer, tag) for peer in others]
    works += [group.send([shard], peer, tag) for peer in others]
    rows[rank].copy_(shard)
    work = Exchange(works, (shard, rows))
    _pending.add(work)
    register_work(out, work)
    return out


def is_gloo(name: str, device: torch.device) -> bool:
    """Whether the group communicates tensors of `device` by gloo."""
    if device.type != "cpu":
        return False
    return str(group_named(name)._get_backend(device).name()) == "gloo"
