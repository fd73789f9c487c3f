"""Which ranks shard, which replicate, and how gradients are reduced on their backend."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from compiled_fsdp.ir.spec import Reduction
from compiled_fsdp.torch_private.dtensors import concatenate, flatten
from compiled_fsdp.torch_private.groups import (
    backend_of,
    common_name,
    kept_for,
    name_axes,
    name_group,
    new_group,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


@dataclass(frozen=True, slots=True)
class SpmdMesh:
    """`dp_mesh_dims`: parameters are DTensors on `mesh` already, and of its dims these are data
    parallel.
    """

    mesh: DeviceMesh
    shard: tuple[str, ...]
    replicate: tuple[str, ...]

    def axes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Where these dims of the mesh are."""
        return tuple((self.mesh.mesh_dim_names or ()).index(name) for name in names)


@dataclass(frozen=True)
class MeshInfo:
    """A 1-D mesh (fully sharded) or a 2-D one (HSDP: axis 0 replicates, axis 1 shards).

    spmd: the full mesh that this one is a part of; only then may a 1-D mesh replicate instead.
    """

    mesh: DeviceMesh
    spmd: SpmdMesh | None = None

    @property
    def is_sharding(self) -> bool:
        """Whether parameters are cut at all."""
        return self.spmd is None or bool(self.spmd.shard)

    @property
    def is_replicating(self) -> bool:
        """Whether gradients are all-reduced."""
        return self.mesh.ndim == 2 or not self.is_sharding

    @property
    def shard_axis(self) -> int:
        """The mesh axis that parameters are cut over."""
        return self.mesh.ndim - 1

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The group that gathers parameters and scatters gradients; if nothing is cut, the ranks
        that replicate.
        """
        return self.mesh.get_group(self.shard_axis)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The part of the mesh that all-gather extensions are told."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh[(self.mesh.mesh_dim_names or ())[-1]]

    @property
    def shard_size(self) -> int:
        """Ranks that a parameter is cut over."""
        return self.mesh.size(self.shard_axis) if self.is_sharding else 1

    @cached_property
    def shard_rank(self) -> int:
        """This rank's place among them; torch computes it anew each time, from the group."""
        return self.mesh.get_local_rank(self.shard_axis) if self.is_sharding else 0

    @property
    def replicate_size(self) -> int:
        """Ranks that hold the same shard (1 without HSDP)."""
        return self.mesh.size(0) if self.is_replicating else 1

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The group that all-reduces gradients, or None without HSDP."""
        return self.mesh.get_group(0) if self.is_replicating else None

    @property
    def axes(self) -> list[dist.ProcessGroup]:
        """The group of every axis."""
        return [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]

    def placements(self, dim: int = 0) -> tuple[Placement, ...]:
        """Returns the placements of a DTensor on `mesh` for a parameter that is cut on `dim`."""
        return (Replicate(), Shard(dim)) if self.mesh.ndim == 2 else (Shard(dim),)

    @property
    def device(self) -> torch.device:
        """Where parameters live and compute happens."""
        if self.mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.mesh.device_type, torch.accelerator.current_device_index())

    def post_forward_mesh(self, size: int) -> DeviceMesh:
        """The [-1, size] mesh that int `reshard_after_forward` keeps slices on; collective: makes
        process groups.
        """
        mesh = DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(-1, size))
        name_axes(mesh)
        return mesh


_twins: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def twin_group(group: dist.ProcessGroup) -> str:
    """The name of a second group with the same ranks; made once for each group, by all its ranks
    together.
    """

    def make() -> dist.ProcessGroup:
        twin = new_group(dist.get_process_group_ranks(group), dist.get_backend(group))
        if (common := common_name(group.group_name)) != group.group_name:
            name_group(twin, f"{common}_twin")
        return twin

    return common_name(kept_for(group, group.group_name, _twins, make).group_name)


def resolve_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> MeshInfo:
    """Check a user's mesh, or make the default one over all ranks (initialising the process group,
    as stock does).
    """
    if mesh is None:
        if not dist.is_initialized():
            _init_process_group()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator else "cpu"
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if mesh.device_type != "cpu" and not torch.accelerator.is_available():
        raise RuntimeError(
            f"fully_shard: the mesh {mesh} is on {mesh.device_type}, and this process sees no such "
            "device. Make it with init_device_mesh('cpu', ...), or see to it that torch finds the "
            "device"
        )
    if dims is not None:
        return _resolve_dims(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard: mesh has {mesh.ndim} dimensions ({mesh}); expects a 1D mesh (shard) or "
            "a 2D mesh (replicate, shard). Pass a sub-mesh, for example mesh['dp']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            f"fully_shard: the 2D mesh {mesh} has no mesh_dim_names; HSDP needs them. Pass "
            "mesh_dim_names=('replicate', 'shard') to init_device_mesh"
        )
    name_axes(mesh)
    return MeshInfo(mesh)


def _init_process_group() -> None:
    try:
        dist.init_process_group()
    except ValueError as error:
        raise ValueError(
            "fully_shard: there is no process group, and none can be made here: "
            f"{error}. Start the script with torchrun --nproc-per-node N, or call "
            "torch.distributed.init_process_group(...) with rank and world_size before fully_shard"
        ) from error


def _resolve_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> MeshInfo:
    """The data-parallel part of a full mesh; several dims of a kind become one (collective: makes a
    process group).
    """
    shard, replicate = dims.shard_names, dims.replicate_names
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"fully_shard: dp_mesh_dims={dims} names dims of the mesh, and {mesh} has no "
            "mesh_dim_names. Pass them to init_device_mesh"
        )
    absent = [name for name in (*replicate, *shard) if name not in mesh.mesh_dim_names]
    if absent or not (replicate or shard):
        raise ValueError(
            f"fully_shard: dp_mesh_dims={dims} should name one or more of the mesh's dims "
            f"{mesh.mesh_dim_names}" + (f"; {absent[0]!r} is not found there" if absent else "")
        )
    parts = [
        mesh[names[0]] if len(names) == 1 else flatten(mesh, names)
        for names in (replicate, shard)
        if names
    ]
    own = concatenate(parts) if len(parts) > 1 else parts[0]
    for each in (mesh, own):
        name_axes(each)
    return MeshInfo(own, SpmdMesh(mesh, shard, replicate))


def resolve_placement(
    result: object, name: str, param: torch.Tensor, default: MeshInfo
) -> tuple[int, MeshInfo]:
    """The dimension and the mesh that a parameter is cut over, from what `shard_placement_fn`
    returned for it.

    `result` is None (dim 0), a `Shard`, or torch's `ShardPlacementResult` (known by its two fields)
    with a mesh of its own.
    """
    placement, info = result, default
    if not default.is_sharding:
        raise ValueError(
            "fully_shard: shard_placement_fn needs a mesh that shards, and dp_mesh_dims names "
            f"only {default.spmd} to replicate over. Leave it out, or name dims to shard over"
        )
    if hasattr(result, "mesh_info") and hasattr(result, "placement"):
        placement, info = result.placement, _own_mesh(result.mesh_info)
    if placement is None:
        return 0, info
    if not isinstance(placement, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn returned {result!r} for {name}, an invalid result; "
            "should be None, a Shard, or a ShardPlacementResult"
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(
            f"fully_shard: shard_placement_fn returned {placement} for {name} of shape "
            f"{tuple(param.shape)}, which has no dim {placement.dim}"
        )
    if dim and param.shape[dim] % info.shard_size:
        raise NotImplementedError(
            f"fully_shard: FSDP does not support uneven sharding on dim {dim}: {name} has size "
            f"{param.shape[dim]} there, and the shard mesh has {info.shard_size} ranks. Return "
            "Shard(0), or pad the parameter"
        )
    return dim, info


def _own_mesh(info: Any) -> MeshInfo:
    """The mesh of torch's `FSDPMeshInfo` for one parameter, with the whole one around it if that is
    there.
    """
    name_axes(info.mesh)
    dims: DataParallelMeshDims | None = getattr(info, "dp_mesh_dims", None)  # 2.11 has none
    if dims is None:
        return MeshInfo(info.mesh)
    name_axes(info.spmd_mesh)
    return MeshInfo(info.mesh, SpmdMesh(info.spmd_mesh, dims.shard_names, dims.replicate_names))


def resolve_reshard(value: object, shard_size: int) -> bool | int | None:
    """Check `reshard_after_forward`; an int equal to the shard size means True, and 1 means
    False.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            f"fully_shard: reshard_after_forward={value!r}; should be a bool, an int group size, "
            "or None"
        )
    if value < 1 or value > shard_size or shard_size % value:
        raise ValueError(
            f"fully_shard: reshard_after_forward={value}; an int should be a factor of the shard "
            f"mesh size {shard_size}, so that slices can be kept on groups of that size"
        )
    if value == 1:
        _warn_of_one()
    return {1: False, shard_size: True}.get(value, value)


@cache
def _warn_of_one() -> None:
    """Once, on the logger and in the sense of stock."""
    logging.getLogger("torch.distributed.fsdp.fully_shard").warning(
        "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
        "reshard_after_forward=True (bool). It is treated as False: parameters stay unsharded "
        "after forward"
    )


def power_of_two_factor(total: float) -> float:
    """The pre-division that keeps low-precision sums in range: stock FSDP's rule, near the square
    root of `total`.
    """
    factor = 1
    while total % factor == 0 and total / factor > factor:
        factor *= 2
    return float(factor)


def averages(dtype: torch.dtype, factor: float | None, *, is_sum: bool) -> bool:
    """Whether stock asks the backend for the mean itself, so that nothing is divided afterwards."""
    return dtype in (torch.float32, torch.bfloat16) and factor is None and not is_sum


def reduction(
    info: MeshInfo, dtype: torch.dtype, factor: float | None, *, is_sum: bool
) -> Reduction:
    """The mean over all data-parallel ranks, as the backend does it best; `factor` divides instead
    of their number.

    NCCL, and a timed world in its place, averages fp32 and bf16 itself, unless `factor` or `is_sum`
    (`set_force_sum_reduction_for_comms`) ask for a sum. Elsewhere it is a sum and an explicit
    division: gloo's AVG has been wrong in some releases, and it rejects PREMUL_SUM, which stock
    uses for a factor. Other dtypes (fp16 has little range) divide before and after, by stock FSDP's
    factors.
    """
    world = info.shard_size * info.replicate_size
    total = float(world) if factor is None else factor
    backend = backend_of(info.shard_group)
    replicate = info.replicate_group
    pre, post = 1.0, total
    op = "sum"
    if dtype not in (torch.float32, torch.bfloat16):
        pre = power_of_two_factor(total)
        post = total / pre
    elif backend in ("nccl", "timed") and averages(dtype, factor, is_sum=is_sum):
        op, post = "avg", 1.0
    return Reduction(
        dtype=dtype,
        op=op,
        algorithm="all_to_all" if backend == "gloo" else "reduce_scatter",
        pre_divide=pre,
        post_divide=post,
        replicate_size=info.replicate_size,
        replicate_group=common_name(replicate.group_name) if replicate else "",
    )


def by_exchange(how: Reduction, size: int) -> Reduction:
    """The same reduction over `size` ranks by an all-to-all and a local sum,
    which knows no mean.
    """
    if how.op == "sum":
        return replace(how, algorithm="all_to_all")
    factor = how.post_divide * size * how.replicate_size
    return replace(how, algorithm="all_to_all", op="sum", post_divide=factor)
