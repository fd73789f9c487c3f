"""Private torch: DTensors and their meshes. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, no_grad
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor import Placement


def make_dtensor(
    local: Tensor,
    like: Tensor,
    mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] = (),
) -> DTensor:
    """A DTensor around `local` with the global shape and stride of `like`, and its mesh unless one
    is given.

    `DTensor.from_local` is public but records autograd and costs five times as much, which counts
    for gradients: one per parameter and step.
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


def look_for_strided_once() -> None:
    """Let torch look for strided shards among the arguments of a call once, not for each of them,
    once for all.

    The first step of a fused optimizer is one call with all parameters, gradients and states: of
    1,700 DTensors torch looked at all, 340 times. Tried on 2.13 and 2.15.
    """
    look = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)
    if look is None or hasattr(look, "__wrapped__"):
        return
    without: list[Callable[[], Any]] = [lambda: None]  # the last call that has none

    @functools.wraps(look)
    def look_once(strategy: Any, call: Any) -> None:
        if without[0]() is call:
            return
        look(strategy, call)
        placements = [p for spec in call.args_spec for p in spec.placements]
        if not any(isinstance(p, _StridedShard) for p in placements):
            without[0] = weakref.ref(call)

    changed: Any = _sharding_prop
    changed._propagate_use_strided_shard_flag = look_once


def starting_at_zero(tensor: DTensor) -> DTensor:
    """Another DTensor around the same local tensor, one that `copy.deepcopy` and `torch.save` take.

    A DTensor says the offset of its local tensor in its storage as its own, and has no storage:
    where it is not 0, torch takes what follows from it for an address. Tried on 2.13 and 2.15.
    """
    local = tensor._local_tensor
    copied = DTensor(local.new_empty(0), tensor._spec, requires_grad=False)
    copied._local_tensor = local
    return copied


def in_own_storage(tensor: DTensor, counted: Tensor | None = None) -> DTensor:
    """Another DTensor in the same memory and with the same version, whose local tensor has a
    storage of its own and starts it.

    So `copy.deepcopy`, `torch.save`, and Dynamo, which wants to hear the local tensor's offset,
    take it. Tried on 2.11, 2.13 and 2.15.

    counted: whose version is to count what is written to its local tensor, too.
    """
    local = tensor._local_tensor
    start = local.storage_offset() * local.itemsize
    extent = (
        sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        + 1
    )
    end = start + (extent * local.itemsize if local.numel() else 0)
    part: Any = local.untyped_storage()[start:end]
    placed = DTensor(
        local.new_empty(0).set_(part, 0, local.shape, local.stride()),
        tensor._spec,
        requires_grad=False,
    )
    made: Any = tensor.detach()
    made.data = placed  # all but version and local tensor
    made._local_tensor = placed._local_tensor
    if counted is not None:
        with no_grad():
            made._local_tensor = counted.detach()
        made._local_tensor.data = placed._local_tensor  # all but the version
    return made  # type: ignore[no-any-return]


def movable(tensor: DTensor) -> DTensor:
    """Another DTensor in the same memory that `copy.deepcopy` and `torch.save` take; a parameter,
    if it is one.
    """
    moved: Any = (starting_at_zero if tensor.device.type == "meta" else in_own_storage)(tensor)
    moved.requires_grad_(tensor.requires_grad)
    moved.__dict__.update(_of_users(tensor))  # `nn.Parameter(moved)` would say the offset again
    return moved  # type: ignore[no-any-return]


def move_all_once() -> None:
    """Let `copy.deepcopy` and `torch.save` take DTensors that do not start their storage, too,
    once for all.

    Those are parameters behind the first of their flat buffer, and with torch's `fully_shard`
    gradients; torch raises "invalid python storage" (see `starting_at_zero`). Tried on 2.11, 2.13,
    2.14 and 2.15.
    """
    if "__deepcopy__" in vars(DTensor):
        return

    changed: Any = DTensor
    by_torch: Any = Tensor

    def is_moved(tensor: DTensor) -> bool:
        return type(tensor) is DTensor and tensor.is_leaf and bool(tensor.storage_offset())

    def copied(self: DTensor, memo: dict[int, Any]) -> Any:
        is_alike = self.grad is None or self.grad.dtype == self.dtype  # torch forgets grad_dtype
        if id(self) in memo or (is_alike and not is_moved(self)):
            return by_torch.__deepcopy__(self, memo)
        made: Any = self.detach().clone().requires_grad_(self.requires_grad)
        made.__dict__.update(copy.deepcopy(_of_users(self), memo))
        memo[id(self)] = made
        if not is_alike:
            made.grad_dtype = self.grad_dtype
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def reduced(self: DTensor, protocol: Any) -> Any:
        return by_torch.__reduce_ex__(movable(self) if is_moved(self) else self, protocol)

    changed.__deepcopy__, changed.__reduce_ex__ = copied, reduced


def _of_users(tensor: DTensor) -> dict[str, Any]:
    """Its attributes but for ours: a copy is no parameter of a unit."""
    return {name: v for name, v in tensor.__dict__.items() if not name.startswith("_fsdp_")}


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements and global metadata."""
    return tensor._spec


def placed_otherwise(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """The same of a tensor that is placed so."""
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around `local`, whose dtype it takes; the rest is as `spec` says."""
    meta = spec.tensor_meta
    assert meta is not None
    if local.dtype != meta.dtype:
        spec = DTensorSpec(
            spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype)
        )
    return DTensor(local, spec, requires_grad=local.requires_grad)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, and any other tensor itself; awaited, if a collective is still
    to deliver it.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor."""
    return tuple(make_contiguous_strides_for(tuple(shape)))


def cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement cuts this dim of the tensor."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def cut_inside(dim: int, split_factor: int) -> Placement:
    """The placement of a tensor that is cut on `dim` by a mesh axis, after later axes have cut it
    into `split_factor` pieces.
    """
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the named axes of several parts of one root mesh; also while parameters are
    made fake.
    """
    with unset_fake_temporarily():
        mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def flatten(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """One axis of several of a mesh, named after all of them; collective: makes a process group."""
    return mesh[names]._flatten("_".join(names))
