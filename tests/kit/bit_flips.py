"""Faults for checksums to find: single bits that flip, in memory that rests, that is about to be
sent, or that has just been received. No version counts them.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from compiled_fsdp.ir.collectives import ALL_REDUCE, WAIT
from compiled_fsdp.torch_private.groups import group_named
from compiled_fsdp.wire import gloo, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of a dense tensor's memory; negative: counted from the end."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    assert local.is_contiguous(), "its memory has gaps"
    bit %= 8 * local.numel() * local.element_size()
    byte = ctypes.c_ubyte.from_address(local.data_ptr() + bit // 8)
    byte.value ^= 1 << (bit % 8)


@contextmanager
def in_exchange(
    collective: str,
    where: str,
    rank: int,
    numels: Sequence[int],
    occurrence: int,
    bit: int,
    *,
    lasts: bool = False,
) -> Iterator[list[str]]:
    """Inside, rank `rank` flips a bit of what it sends to the next rank, or has received from it,
    in the exchange of this number (from 0) among those in which each rank sends so many elements to
    each: one of `numels`; in those after it too, if the fault lasts.

    Yields a list that has an entry each time it did.
    """
    done: list[str] = []
    seen = [0]
    later: dict[int, Callable[[], None]] = {}
    exchange, wait = gloo._exchange, gloo.Exchange.wait

    def faulty(what: str, out: Tensor, sent: Any, received: Any, *more: Any) -> Any:
        group = group_named(more[-1])
        peer = (group.rank() + 1) % group.size()
        is_it = what == collective and sum(p[peer].numel() for p in received) in numels
        seen[0] += is_it
        is_its = seen[0] > occurrence if lasts else seen[0] == occurrence + 1
        is_now = is_it and is_its and dist.get_rank() == rank
        place = -1 if bit < 0 else 0
        if is_now and where == "sent":
            flip(sent[place][peer], bit)
            done.append(what)
        work = exchange(what, out, sent, received, *more)
        if is_now and where == "received":
            later[id(work)] = lambda: flip(received[place][peer], bit)
        return work

    def then_flip(self: Any, *args: Any) -> Any:
        result = wait(self, *args)
        if id(self) in later:
            later.pop(id(self))()
            done.append(self.collective)
        return result

    with (
        mock.patch.object(gloo, "_exchange", faulty),
        mock.patch.object(gloo.Exchange, "wait", then_flip),
    ):
        yield done


@contextmanager
def in_all_reduce(rank: int, numel: int) -> Iterator[list[str]]:
    """Inside, in eager mode, rank `rank` flips a bit of the first result of an all-reduce of so
    many elements; the list has an entry then.
    """
    done: list[str] = []
    found: list[int] = []
    call = launch.call

    def faulty(op: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(op, *args, **kwargs)
        if op is ALL_REDUCE and args[0].numel() == numel and dist.get_rank() == rank:
            found.append(id(result))
        if op is WAIT and id(args[0]) in found and not done:
            flip(result, 5)
            done.append("all_reduce")
        return result

    with mock.patch.object(launch, "call", faulty):
        yield done
