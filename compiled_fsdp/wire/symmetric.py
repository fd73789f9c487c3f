"""Collectives between buffers in symmetric memory (`FSDPModule.set_symm_mem_for_comm`): NCCL copies
by engines of its own, or with kernels that need fewer of the device's processors.

They are to ops what a user's own are (`set_custom_all_gather`). Stock calls them on a stream for
communication and lets that wait; ours run behind a `Work`, which whoever reads the result awaits.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from compiled_fsdp.torch_private import symmetric

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


# torch's names since 2.13, before which it has others.
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _Symmetric:
    """Allocates in symmetric memory."""

    asked_by = "set_symm_mem_for_comm"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer of so many elements."""
        return symmetric.allocate(prod(size), dtype, device)


class SymmetricAllGather(_Symmetric):
    """An all-gather into symmetric memory, of which the input is a part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Returns the `Work`, or None if it has waited."""
        symmetric.meet(output_tensor, group.group_name)
        return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class SymmetricReduceScatter(_Symmetric):
    """A reduce-scatter from symmetric memory to symmetric memory."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = True,
    ) -> Any:
        """Returns the `Work`, or None if it has waited."""
        symmetric.meet(input_tensor, group.group_name)
        symmetric.meet(output_tensor, group.group_name)
        return _reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# One of each, so that a graph does not depend on how often they were asked for.
ALL_GATHER, REDUCE_SCATTER = SymmetricAllGather(), SymmetricReduceScatter()


def is_on(device_type: str) -> bool:
    """Whether devices of a type have symmetric memory."""
    return device_type in symmetric.DEVICES


def begin(backend: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Allocate by `backend` from now on; collective over each of the groups, whose communicators
    must be there before ranks can meet.

    Raises:
        RuntimeError: torch has no such backend for its allocations.
    """
    try:
        symmetric.use_backend(backend)
    except RuntimeError as error:
        raise RuntimeError(
            f"set_symm_mem_for_comm({backend!r}): torch cannot allocate symmetric memory by it "
            f"({error}); nothing was changed. Leave it out: the numbers are the same"
        ) from error
    for group in groups:
        dist.barrier(group=group)
