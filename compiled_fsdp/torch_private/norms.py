"""Private torch: the order in which `clip_grad_norm_` puts norms together. Tried on torch 2.11,
2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_groups(dtypes: Sequence[torch.dtype], device: torch.device) -> list[int]:
    """The places of gradients of these dtypes in the order in which torch takes their norms: dtype
    by dtype, which first being a matter of torch's own hashes.
    """
    if len(set(dtypes)) == 1:
        return list(range(len(dtypes)))
    with torch._C._DisableTorchDispatch():  # passes run where tensors are fake
        like = [torch.empty(0, dtype=dtype, device=device) for dtype in dtypes]
    groups: Any = _group_tensors_by_device_and_dtype([like], with_indices=True)  # type: ignore[list-item]
    return [place for _, places in groups.values() for place in places]
