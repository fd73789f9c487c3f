"""Tensors sent from every rank to every rank in one message each,
whatever their shapes and dtypes.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.wire import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cut import Cut

ALIGNED = 16  # bytes; tensors of any dtype can begin at their multiples

Kind = tuple[tuple[int, ...], torch.dtype]  # what is to be known of a tensor before it is there


def kind_of(cut: Cut, rank: int) -> Kind:
    """Shape and dtype of a rank's piece."""
    return cut.piece_shape(rank), cut.dtype


class Exchange:
    """An exchange under way.

    sent: the tensors for each rank of the group; they may be written to as soon as it has started.
    awaited: what comes from each rank.
    """

    def __init__(
        self,
        sent: Sequence[Sequence[Tensor]],
        awaited: Sequence[Sequence[Kind]],
        group: str,
        device: torch.device,
        what: str,
    ) -> None:
        self._awaited, self._given = awaited, sent
        self._received: Tensor | None = None
        self._work: Any = None
        if not group:
            return
        kinds = [[(tuple(t.shape), t.dtype) for t in each] for each in sent]
        packed = torch.empty(sum(map(num_bytes, kinds)), dtype=torch.uint8, device=device)
        for place, tensor in zip(_flat(unpacked(packed, kinds)), _flat(sent), strict=True):
            place.copy_(tensor)
        self._received = packed.new_empty(sum(map(num_bytes, awaited)))
        sizes = [num_bytes(each) for each in awaited], [num_bytes(each) for each in kinds]
        self._given = ()
        self._work = launch.start_exchange(self._received, packed, *sizes, group, what)

    def wait(self) -> Sequence[Sequence[Tensor]]:
        """Returns what has come from each rank."""
        if self._received is None:
            return self._given
        self._work.wait()
        return unpacked(self._received, self._awaited)


def num_bytes(kinds: Sequence[Kind]) -> int:
    """How long a message of such tensors is."""
    return sum(_aligned(kind) for kind in kinds)


def unpacked(buffer: Tensor, messages: Sequence[Sequence[Kind]]) -> list[list[Tensor]]:
    """The tensors of several messages, one after the other in a buffer of bytes, as views of it."""
    found: list[list[Tensor]] = []
    start = 0
    for kinds in messages:
        found.append([])
        for shape, dtype in kinds:
            part = buffer.narrow(0, start, prod(shape) * dtype.itemsize)
            found[-1].append(part.view(dtype).view(shape))
            start += _aligned((shape, dtype))
    return found


def _aligned(kind: Kind) -> int:
    shape, dtype = kind
    return -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED


def _flat(nested: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for each in nested for tensor in each]
