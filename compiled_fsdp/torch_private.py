"""Private torch APIs that are neither collectives nor compiler hooks, in one place. Tried on torch 2.13."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.utils import _apply_to_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def make_dtensor(
    local: Tensor,
    like: Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
) -> DTensor:
    """A DTensor around `local` with the global shape and stride of `like`, and its mesh unless one is given.

    `DTensor.from_local` is public but records autograd and costs five times as much, which counts for gradients: one per
    parameter and step.
    """
    if mesh is None:
        assert isinstance(like, DTensor)
        spec = like._spec
        if local.dtype != like.dtype:
            meta = TensorMeta(like.shape, like.stride(), local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    else:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside nested containers; everything else is the same object (stock's rule)."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x if not x.is_floating_point() or x.dtype == dtype else x.to(dtype)

    return _apply_to_tensors(cast, values)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Write to `tensor` without autograd taking it for a change of what it saved: the values are the same again."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def is_compiled(module: object) -> bool:
    """Whether this is what `torch.compile(module)` returns, not a module of the user's."""
    return isinstance(module, OptimizedModule)
