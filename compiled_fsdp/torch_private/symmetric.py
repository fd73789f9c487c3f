"""Private torch: symmetric memory, where a rank's kernels and NCCL's reach what the others hold.

Read in torch 2.13 and 2.15, and in 2.11, which has it but whose `FSDPModule` does not use it.
Tried on no device yet: tests see that it is called as torch's own `set_symm_mem_for_comm` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

DEVICES = ("cuda",)  # the types of devices that have such memory


def use_backend(name: str) -> None:
    """Allocate by this library from now on, in the whole process.

    Raises:
        RuntimeError: this torch was built without it, or something was allocated by another one.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(name)  # type: ignore[arg-type]


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the pool that torch keeps for a device: what was freed serves again, so that ranks
    meet over each block once. All ranks are to allocate alike.
    """
    from torch.distributed import _symmetric_memory

    pool: Any = _symmetric_memory.get_mem_pool(device)  # from 2.15 on, XPU's may be one too
    with torch.cuda.use_mem_pool(pool):
        return torch.empty(numel, dtype=dtype, device=device)


def meet(tensor: Tensor, group_name: str) -> None:
    """Let the ranks of a group know of each other's memory behind `tensor`, if they do not."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(tensor, group=group_name)  # type: ignore[arg-type]
