"""Kernels of the `fsdp::` ops that take matrices to their owners and back (`optim`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.ir.matrices import sizes as sizes_of
from compiled_fsdp.torch_private.groups import group_named, register_work

from . import launch
from .kernels import fake, kernel, owner_of

if TYPE_CHECKING:
    pass


@kernel("momentum_")
def _momentum(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    numel: int,
    dtype: torch.dtype,
    found_inf: Tensor | None = None,
) -> Tensor:
    owner = owner_of(flat, "momentum_")
    return owner.momentum(flat_grad, offsets, step, numel, dtype, found_inf)


@fake("momentum_")
def _momentum_fake(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    numel: int,
    dtype: torch.dtype,
    found_inf: Tensor | None = None,
) -> Tensor:
    return flat_grad.new_empty(numel, dtype=dtype)


@kernel("to_owners")
def _to_owners(
    pieces: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    """Pieces [sum of numels], those of an owner next to each other and owners in order. An owner
    gets [group_size, n], rank by rank, at the beginning of what is as large on every rank.
    """
    sizes = sizes_of(numels, owners, group_size)
    out = pieces.new_empty(group_size * max(sizes))
    mine = [sizes[group_named(group).rank()]] * group_size
    received = out[: sum(mine)]
    work = launch.start_exchange(received, pieces, mine, sizes, group, what)
    register_work(out, work)
    return out


@kernel("orthogonalize")
def _orthogonalize(
    received: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    owners: Sequence[int],
    step: str,
    flops: float,
) -> Tensor:
    """Flops: of the owner that has most to do; for prices alone."""
    return owner_of(flat, "orthogonalize").orthogonalize(received, offsets, owners, step)


@fake("orthogonalize")
def _orthogonalize_fake(received: Tensor, *args: object) -> Tensor:
    return torch.empty_like(received)


@kernel("from_owners")
def _from_owners(
    updates: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    """The way back of `to_owners`."""
    sizes = sizes_of(numels, owners, group_size)
    out = updates.new_empty(sum(sizes))
    mine = [sizes[group_named(group).rank()]] * group_size
    work = launch.start_exchange(out, updates[: sum(mine)], sizes, mine, group, what)
    register_work(out, work)
    return out


@fake("to_owners")
def _to_owners_fake(
    pieces: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    return pieces.new_empty(group_size * max(sizes_of(numels, owners, group_size)))


@fake("from_owners")
def _from_owners_fake(
    updates: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    return updates.new_empty(sum(numels))


@kernel("update_matrices_")
def _update_matrices(pieces: Tensor, flat: Tensor, offsets: Sequence[int], step: str) -> None:
    owner_of(flat, "update_matrices_").update_matrices(pieces, offsets, step)
