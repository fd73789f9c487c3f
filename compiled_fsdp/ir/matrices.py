"""How matrices that an optimizer needs whole travel in the graph of a whole step: their pieces lie
behind each other, those of an owner together and owners in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Matrix(NamedTuple):
    """A parameter that is updated whole, at its owner.

    unit, fqn: as in its `ParamSpec`.
    owner: a rank of the group that it is cut over.
    dtype: in which it travels, and is computed with.
    flops: what its owner computes.
    """

    unit: str
    fqn: str
    owner: int
    dtype: torch.dtype
    flops: float


def sizes(numels: Sequence[int], owners: Sequence[int], group_size: int) -> list[int]:
    """Elements that a rank sends to each owner."""
    found = [0] * group_size
    for numel, owner in zip(numels, owners, strict=True):
        found[owner] += numel
    return found
