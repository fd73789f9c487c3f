"""Gathers that a forward comes to, as objects: who overlaps the optimizer's step starts them again
for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.wire.kernels import Piece

    from .flat import FlatBuffer


class Gather(Protocol):
    """A gather that forward came to, which may start ahead of the next forward."""

    @property
    def flats(self) -> Sequence[FlatBuffer]:
        """The buffers that it gathers."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of what it gathers to."""
        ...

    def part(self, flat: FlatBuffer) -> tuple[int, int]:
        """Returns what of a buffer it gathers: the first element of this rank's shards, and the
        end.
        """
        ...

    def start(self) -> None:
        """Start it; the next forward finds it, unless a parameter changes before."""
        ...


@dataclass(frozen=True, slots=True)
class PieceGather:
    """One of a graph; see `Gather`."""

    flat: FlatBuffer
    piece: Piece

    @property
    def flats(self) -> Sequence[FlatBuffer]:
        """See `Gather`."""
        return (self.flat,)

    @property
    def num_bytes(self) -> int:
        """See `Gather`."""
        return self.piece.numel * self.piece.group_size * self.piece.dtype.itemsize

    def part(self, flat: FlatBuffer) -> tuple[int, int]:
        """See `Gather`."""
        return self.piece.start, self.piece.start + self.piece.numel

    def start(self) -> None:
        """See `Gather`."""
        self.flat.gather_ahead(self.piece)
