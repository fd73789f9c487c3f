"""Private torch: what a fake tensor looks like, and another one that looks the same. Tried on torch
2.13 and 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

# shape, stride, offset, dtype, device
Look = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]


def mode_of(value: object) -> FakeTensorMode | None:
    """The mode that a fake tensor belongs to; None of everything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def look(value: object) -> Look | None:
    """What decides how an op's result looks; None of what is more than a plain fake tensor of known
    sizes.
    """
    if type(value) is not FakeTensor or value._has_symbolic_sizes_strides:
        return None
    if value.requires_grad or value.layout is not torch.strided or value.constant is not None:
        return None
    if value.is_conj() or value.is_neg():
        return None
    return (
        tuple(value.shape),
        value.stride(),
        int(value.storage_offset()),
        value.dtype,
        value.fake_device,
    )


def storage_of(value: Tensor) -> tuple[int, int]:
    """Which storage a tensor has, and its bytes."""
    storage = value.untyped_storage()
    return storage._cdata, storage.nbytes()


def alike(mode: FakeTensorMode, look: Look, base: Any = None) -> FakeTensor:
    """A fake tensor that looks like this: in the storage of `base`, or in one of its own. It is made
    as torch's own cache of fake results makes it.
    """
    shape, stride, offset, dtype, device = look
    with in_kernel_invocation_manager(mode):
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            plain.set_(base.untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, plain, device)
