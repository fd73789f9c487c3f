"""Parameters that are DTensors before they are cut: tensor parallel, or on the full mesh that
`dp_mesh_dims` names; or plain tensors with types, which say as much (`typed.py`).

[Note: parameters that are DTensors]
What is cut, gathered and reduced is the local tensor, by the same ops as a plain parameter: the IR
and the passes see nothing of tensor parallelism. Around that stand two things. The cut parameter is
a DTensor on a mesh with both kinds of axes (`place`). And computation reads a DTensor again
(`Full`): the gathered local tensor, placed as the user had placed it. The gradient that comes back
is brought to the same placements before it is reduced, by collectives of DTensor's own. Where they
add up (`Partial`), they do so as the installed torch: since 2.15 in the dtype in which gradients
are reduced. In a graph autograd rounds the terms of such a sum to the dtype of the full parameter,
and then the sum; `cast_grad` stands at both places for a pass to leave that out
(`keep_grad_dtype`).

Private torch used here (tried on 2.13): `torch.distributed.tensor._dtensor_spec`, for annotations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from compiled_fsdp.ir.keys import Keys
from compiled_fsdp.ir.schema import CAST_GRAD
from compiled_fsdp.torch_private.dtensors import (
    concatenate,
    cut_inside,
    cuts,
    local_tensor,
    placed_otherwise,
    spec_of,
    with_spec,
)
from compiled_fsdp.torch_private.dynamo import traced_as_it_is
from compiled_fsdp.torch_private.groups import groups_of, name_axes
from compiled_fsdp.torch_private.modules import widens_sums

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from compiled_fsdp.ir.spec import ParamSpec

    from .mesh import MeshInfo, SpmdMesh
    from .param import ShardedParam
    from .typed import Typed


@dataclass(frozen=True, slots=True)
class Full:
    """How a gathered local tensor becomes the DTensor that computation reads.

    spec: mesh, placements and global shape, as the user had them.
    dp_axes: axes of that mesh which reducing the gradient sees to; whatever its placements there
        are, they are left.
    typed: computation reads the gathered local tensor itself (`typed.py`); else None.
    sum_dtype: in which gradients are added up over the other axes; None: as they come.
    """

    spec: DTensorSpec
    dp_axes: tuple[int, ...] = ()
    typed: Typed | None = None
    sum_dtype: torch.dtype | None = None

    def wrap(self, local: Tensor) -> Tensor:
        """The DTensor around a gathered local tensor."""
        return local if self.typed else with_spec(local, self.spec)

    @property
    def is_plain(self) -> bool:
        """Whether computation reads a plain tensor, whose gradient is placed as it is."""
        return self.typed is not None and self._wanted(self.typed.grads) == self.typed.grads

    def _wanted(self, given: Sequence[Placement]) -> tuple[Placement, ...]:
        """How a gradient of these placements is to be placed before it is reduced."""
        return tuple(
            theirs if axis in self.dp_axes else own
            for axis, (theirs, own) in enumerate(zip(given, self.spec.placements, strict=True))
        )

    def reduced_as(self, spec: ParamSpec) -> Full:
        """The same where gradients are reduced like this: with the `sum_dtype` of the installed
        torch.
        """
        may_sum = widens_sums() and spec.is_widened and any(self._may_sum())
        return replace(self, sum_dtype=spec.sum_dtype if may_sum else None)

    def _may_sum(self) -> Iterator[bool]:
        """Whether gradients may come as summands, for each axis that is not data-parallel; of a
        replicated parameter that is known only when they are there.
        """
        for axis, placement in enumerate(self.typed.grads if self.typed else self.spec.placements):
            if axis not in self.dp_axes:
                yield placement.is_partial() if self.typed else placement.is_replicate()

    def local_grad(self, grad: Tensor) -> Tensor:
        """The local tensor of a gradient, placed as the parameter is; in `sum_dtype`, where that is
        a sum.

        Raises:
            AssertionError: the gradient is no DTensor.
        """
        if self.is_plain:
            return grad
        if self.typed is not None:
            grad = with_spec(grad, placed_otherwise(self.spec, self.typed.grads))
        if not isinstance(grad, DTensor):
            raise AssertionError(
                f"the gradient of a parameter that is a DTensor placed as {self.spec.placements} "
                f"is a {type(grad).__name__}; should be a DTensor. An autograd function in the "
                "model returned it so: let it return DTensor.from_local(...)"
            )
        wanted = self._wanted(grad.placements)
        if wanted == grad.placements:
            return local_tensor(grad)
        pairs = zip(grad.placements, wanted, strict=True)
        if self.sum_dtype and any(own.is_partial() for own, other in pairs if own != other):
            if grad.dtype != self.sum_dtype:
                wide = CAST_GRAD(local_tensor(grad), self.sum_dtype)
                grad = with_spec(wide, spec_of(grad))
        return local_tensor(grad.redistribute(placements=wanted))


def full_of(original: Tensor, info: MeshInfo, typed: Typed | None = None) -> Full | None:
    """How this parameter is read once it is gathered; None if it is a plain tensor."""
    if not isinstance(original, DTensor):
        return None
    name_axes(original.device_mesh)
    spmd = info.spmd
    dp_axes = spmd.axes((*spmd.shard, *spmd.replicate)) if spmd else ()
    return Full(spec_of(original), dp_axes, typed)


def groups_beside(params: Iterable[ShardedParam]) -> Iterator[dist.ProcessGroup]:
    """The groups of all axes of the meshes that these parameters were DTensors on, if they are
    asked for.
    """
    meshes = dict.fromkeys(param.full.spec.mesh for param in params if param.full is not None)
    for mesh in meshes:
        yield from groups_of(mesh)


_fulls: Keys[Full] = Keys("full")


def key_of(full: Full | None) -> str:
    """Returns what a traced read names it by; "" for a plain tensor."""
    return "" if full is None or full.is_plain else _fulls.key(full)


@traced_as_it_is
def as_dtensor(local: Tensor, key: str) -> Tensor:
    """A gathered local tensor as what computation reads (`Full.wrap`), inside a graph: Dynamo takes
    the call as it is, AOTAutograd traces through it.
    """
    function: Any = _AsDTensor
    result: Tensor = function.apply(local, _fulls[key])
    return result


class _AsDTensor(torch.autograd.Function):
    """`DTensor.from_local`, except that a gradient is left as it is on the axes that its reduction
    sees to.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, full: Full) -> Tensor:
        ctx.full = full
        return full.wrap(local.view_as(local))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local = ctx.full.local_grad(grad)
        return (local if local.dtype == grad.dtype else CAST_GRAD(local, grad.dtype)), None


def place(
    original: Tensor, name: str, dim: int, info: MeshInfo
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of a parameter once it is cut on `dim`."""
    if info.spmd is not None:
        return _on_full_mesh(original, name, dim, info, info.spmd)
    if isinstance(original, DTensor):
        return _on_both_meshes(original, name, dim, info)
    return info.mesh, info.placements(dim)


def _on_both_meshes(
    original: DTensor, name: str, dim: int, info: MeshInfo
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    inner, placements = original.device_mesh, original.placements
    if len(placements) > 2:
        raise NotImplementedError(
            f"fully_shard: parameter {name} is a DTensor on {len(placements)} mesh axes, "
            f"{placements}; FSDP only supports one or two axes (TP, EP, or both) besides its own"
        )
    if info.mesh.mesh_dim_names is None or inner.mesh_dim_names is None:
        raise TypeError(
            f"fully_shard: parameter {name} is a DTensor, so that its mesh {inner} and the "
            f"data-parallel {info.mesh} are joined; both need mesh_dim_names. Take both from one "
            "mesh: init_device_mesh(..., mesh_dim_names=('dp', 'tp')), then mesh['dp']"
        )
    try:
        mesh = concatenate([info.mesh, inner])
    except RuntimeError as error:
        raise RuntimeError(
            f"fully_shard: parameter {name} is a DTensor on {inner}, which cannot be joined with "
            f"the data-parallel mesh {info.mesh}: {error}. Take both from one mesh, as different "
            "dims: mesh['dp'] and mesh['tp']"
        ) from error
    cut = cut_inside(dim, _pieces(dim, zip(placements, inner.shape, strict=True)))
    return mesh, (*info.placements(dim)[:-1], cut, *placements)


def _on_full_mesh(
    original: Tensor, name: str, dim: int, info: MeshInfo, spmd: SpmdMesh
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    if not isinstance(original, DTensor):
        raise ValueError(
            "fully_shard: with dp_mesh_dims, all parameters must be DTensors on the full mesh; "
            f"{name} is a plain tensor. Use distribute_module or distribute_tensor first, or note "
            "its types (spmd_types.assert_type)"
        )
    if original.device_mesh != spmd.mesh:
        raise ValueError(
            f"fully_shard: parameter {name} is a DTensor on {original.device_mesh}; with "
            f"dp_mesh_dims it should be on the mesh that is passed, {spmd.mesh}. Pass the full "
            "mesh, or leave dp_mesh_dims out"
        )
    placements = list(original.placements)
    for axis in spmd.axes((*spmd.shard, *spmd.replicate)):
        if not isinstance(placements[axis], Replicate):
            names = spmd.mesh.mesh_dim_names or ()
            raise ValueError(
                f"fully_shard: parameter {name} is placed as {placements[axis]} on the "
                f"data-parallel dim {names[axis]!r} (index {axis}); expected Replicate() there"
            )
    for axis in spmd.axes(spmd.shard):
        later = zip(original.placements[axis + 1 :], spmd.mesh.shape[axis + 1 :], strict=True)
        placements[axis] = cut_inside(dim, _pieces(dim, later))
    if len(spmd.shard) < 2:
        return spmd.mesh, tuple(placements)
    return _with_one_shard_axis(placements, info, spmd)


def _with_one_shard_axis(
    placements: list[Placement], info: MeshInfo, spmd: SpmdMesh
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Several dims that shard appear as one, where the first of them stood, after the one that
    replicates.
    """
    meshes: list[DeviceMesh] = []
    merged: list[Placement] = []
    for name, placement in zip(spmd.mesh.mesh_dim_names or (), placements, strict=True):
        if name == spmd.shard[0]:
            meshes.append(info.mesh)
            merged += [*info.placements()[:-1], placement]
        elif name not in (*spmd.shard, *spmd.replicate):
            meshes.append(spmd.mesh[name])
            merged.append(placement)
    return concatenate(meshes), tuple(merged)


def _pieces(dim: int, axes: Iterable[tuple[Placement, int]]) -> int:
    """Into how many pieces these mesh axes cut a dim."""
    return prod(size for placement, size in axes if cuts(placement, dim))
