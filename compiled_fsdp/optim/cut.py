"""How a tensor is cut into pieces, one for each rank of a group, and how it is whole again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from compiled_fsdp.torch_private.groups import group_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of this shape and dtype, cut on `dim` over the ranks of a group as `torch.chunk`
    does: fewer rows on the last ranks, or none.

    group: its process group by name; "" for a tensor that every rank has whole.
    rank, size: this rank in the group, and how many there are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dim: int = 0
    group: str = ""
    rank: int = 0
    size: int = 1

    def rows(self, rank: int) -> tuple[int, int]:
        """The first row of a rank, and how many it has."""
        total = self.shape[self.dim]
        most = -(-total // self.size)
        start = min(rank * most, total)
        return start, min(most, total - start)

    def piece_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of a rank's piece."""
        return (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])

    def piece(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's piece, as a view of the whole."""
        return whole.narrow(self.dim, *self.rows(rank))

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole, from the pieces of all ranks."""
        return pieces[0] if self.size == 1 else torch.cat(list(pieces), self.dim)


def cut_of(tensor: Tensor, name: str, doing: str, dtype: torch.dtype | None = None) -> Cut:
    """How a tensor is cut; `dtype` for another one than its own, in which it is sent.

    Raises:
        NotImplementedError: it is cut over more than one mesh axis, or otherwise than by `Shard`.
    """
    shape, dtype = tuple(tensor.shape), dtype or tensor.dtype
    if not isinstance(tensor, DTensor):
        return Cut(shape, dtype, tensor.device)
    mesh, placements = tensor.device_mesh, tensor.placements
    device = torch.device(mesh.device_type)
    if mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    axes = [
        axis
        for axis, placement in enumerate(placements)
        if type(placement) is not Replicate and mesh.size(axis) > 1
    ]
    if not axes:
        return Cut(shape, dtype, device)
    placement = placements[axes[0]]
    if len(axes) > 1 or type(placement) is not Shard:
        raise NotImplementedError(
            f"{doing}: {name} is placed as {placements} on {mesh}; a matrix should be cut by Shard "
            "over one axis of the mesh, as fully_shard without tensor parallelism does, so that it "
            "can be whole at one of that axis' ranks. Give such parameters to an optimizer that "
            "computes with DTensors: torch.optim.Muon does, by collectives of its own "
            "for each matmul"
        )
    group = group_of(mesh, axes[0])
    return Cut(shape, dtype, device, placement.dim, group.group_name, group.rank(), group.size())
