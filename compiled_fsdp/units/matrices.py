"""Whole matrices of a unit, for optimizers that need them so (Muon):
each at the rank that owns it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .flat import FlatBuffer
    from .param import ShardedParam


class OnMatrices(Protocol):
    """The optimizer of a whole step, for parameters that it needs whole."""

    def momentum(
        self,
        flat: FlatBuffer,
        flat_grad: Tensor,
        params: Sequence[ShardedParam],
        pieces: Tensor,
        found_inf: Tensor | None,
    ) -> None:
        """Take the gradients of these, and write what is to be orthogonalized into `pieces`,
        padded, one behind the other. `found_inf` as for `update_`.
        """

    def orthogonalize(self, param: ShardedParam, matrix: Tensor) -> Tensor:
        """The update of a whole matrix, at its owner; of its shape and dtype."""

    def update_matrices(
        self, flat: FlatBuffer, pieces: Tensor, params: Sequence[ShardedParam]
    ) -> None:
        """Update these; `pieces` as for `momentum`."""


def updates_of(
    mine: Sequence[ShardedParam], received: Tensor, num_shards: int, by: OnMatrices
) -> Tensor:
    """The updates of the matrices that this rank owns, cut for all ranks: like `received`, in which
    the pieces of all ranks are, [num_shards, n] at its beginning, padded.
    """
    updates = torch.zeros_like(received)
    numel = sum(param.layout.numel for param in mine)
    rows, cut = (each[: num_shards * numel].view(num_shards, numel) for each in (received, updates))
    start = 0
    for param in mine:
        place = replace(param.layout, offset=start)
        pieces = [place.view(row, number) for number, row in enumerate(rows)]
        matrix = pieces[0] if len(pieces) == 1 else torch.cat(pieces, place.dim)
        update = by.orthogonalize(param, matrix)
        for number, row in enumerate(cut):
            place.view(row, number).copy_(place.cut(update, number))
        start += place.numel
    return updates
