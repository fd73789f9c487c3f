"""The flat local buffer of a unit: which elements of it are whose.

[Note: names of tensors]
original   the parameter as the user made it
shard      one rank's part of it: `torch.chunk(original, N, dim)[rank]`; on dim 0, fewer or no rows
           on the last ranks
padded     the shard filled up with zero rows, so that it has as many on every rank
flat       the padded shards of a unit's parameters of one dtype and one `requires_grad`, back to
           back: the autograd leaf, the graph input, the input of the all-gather; the gradient has
           the same layout
gathered   the flat buffers of all ranks, in rank order: [N, flat_numel]; parameter p is columns
           [offset, offset + shard_numel)
unsharded  the whole parameter again, in the compute dtype
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One parameter's place in the flat buffer; sizes in elements. `rows` are counted on `dim`, the
    one that is cut.
    """

    shape: tuple[int, ...]
    dim: int
    offset: int
    rows: int
    numel: int

    def local_rows(self, rank: int) -> int:
        """Rows that this rank really owns; the rest of its `rows` are padding."""
        return max(0, min(self.rows, self.shape[self.dim] - rank * self.rows))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of each rank's padded shard."""
        return (*self.shape[: self.dim], self.rows, *self.shape[self.dim + 1 :])

    def padded_view(self, flat: Tensor) -> Tensor:
        """This parameter's padded shard in a flat buffer."""
        return flat.narrow(0, self.offset, self.numel).view(self.padded_shape)

    def view(self, flat: Tensor, rank: int) -> Tensor:
        """This parameter's shard, without padding, as a view into a flat buffer."""
        return self.padded_view(flat).narrow(self.dim, 0, self.local_rows(rank))

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """This rank's part of the whole parameter."""
        start = min(rank * self.rows, self.shape[self.dim])
        return full.narrow(self.dim, start, self.local_rows(rank))

    def chunk(self, full: Tensor, rank: int) -> Tensor:
        """The same by `torch.chunk`, as stock cuts: subclasses may know this op and no other."""
        chunks = full.chunk(-(-self.shape[self.dim] // self.rows), self.dim)
        return chunks[rank] if rank < len(chunks) else self.cut(full, rank)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The flat buffer of one unit, dtype and requires_grad class."""

    num_shards: int
    shards: tuple[ShardLayout, ...]
    numel: int


def flat_layout(
    shapes: Sequence[torch.Size], num_shards: int, dims: Sequence[int] | None = None
) -> FlatLayout:
    """Put padded shards of these shapes back to back, in order; each cut on its dim, 0 by default.
    What has no rows is padded to one, so that no other begins where it does.
    """
    shards: list[ShardLayout] = []
    offset = 0
    for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
        rows = max(1, -(-shape[dim] // num_shards))
        numel = rows * prod((*shape[:dim], *shape[dim + 1 :]))
        shards.append(ShardLayout(tuple(shape), dim, offset, rows, numel))
        offset += numel
    return FlatLayout(num_shards, tuple(shards), offset)
