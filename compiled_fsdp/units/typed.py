"""Parameters with types of the package `spmd_types`, as torchtitan has them by default.

[Note: typed parameters]
Such a parameter is a plain tensor, this rank's part; what the others have is noted on it, an axis
of the mesh at a time: the same (R or I), or another part (S(dim)). It is cut and kept as the
DTensor that this describes (`tensor_parallel.py`), and computation reads a plain tensor again, with
its types where they are checked. Types say what its gradient is, too: on an axis of R each rank has
a summand, to be added up before it is reduced; of I and S it is the parameter's own.

Torch 2.14 and 2.15 do the same (`_fsdp_param.py`, "FSDP and spmd_types"); here 2.13 has it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from compiled_fsdp.torch_private.spmd import (
    axis_of,
    current_axes,
    flattened,
    note_types,
    partition_of,
    same_on_all,
    span_the_same,
    types_of,
    types_of_partition,
    unchecked,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from .mesh import MeshInfo


@dataclass(frozen=True, slots=True)
class Typed:
    """What the types of a parameter say.

    mesh, placements: of the DTensor that it is cut as.
    grads: how its gradient is placed there, before anything is added up.
    types: what is noted on the gathered parameter, by axis.
    partition: which axes cut which of its dims, noted as well.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    grads: tuple[Placement, ...]
    types: tuple[tuple[Any, Any], ...]
    partition: Any

    @unchecked
    def placed(self, parameter: nn.Parameter) -> DTensor:
        """The parameter as a DTensor."""
        local = parameter.detach()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def note_on(self, gathered: Tensor) -> None:
        """Note the types on what computation reads, if they are checked."""
        note_types(gathered, dict(self.types), self.partition)


def typed(parameter: nn.Parameter, name: str, info: MeshInfo) -> Typed | None:
    """What the types of a parameter say; None if it has none.

    Raises:
        ValueError: they do not say how it is placed on each axis of the mesh, or it is not the
            same on the axes that are data-parallel.
    """
    types = types_of(parameter)
    if not types or isinstance(parameter, DTensor):
        return None
    if info.spmd is None:
        raise ValueError(
            f"fully_shard: parameter {name} has types of spmd_types ({_said(types)}), which speak "
            "of axes of a whole mesh. Pass that mesh, with mesh_dim_names, and "
            "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...), which names those of its "
            "axes that are data-parallel"
        )
    partition = partition_of(parameter)
    told = types | types_of_partition(partition)
    mesh = info.spmd.mesh
    axes = {axis: axis_of(mesh.get_group(axis)) for axis in mesh.mesh_dim_names or ()}
    noted = _noted(name, types, told, axes)
    parallel = (*info.spmd.shard, *info.spmd.replicate)
    _check_parallel(name, told, axes, parallel)
    placed: list[tuple[Placement, Placement]] = []
    for axis, size in zip(axes, mesh.shape, strict=True):
        if axis in parallel:
            placed.append((Replicate(), Partial()))
        elif size == 1:  # types are noted for axes of several ranks
            placed.append((Replicate(), Replicate()))
        else:
            placed.append(_placement(name, axis, told.get(axes[axis])))
    return Typed(
        mesh,
        tuple(placement for placement, _ in placed),
        tuple(grad for _, grad in placed),
        tuple((axis, types.get(axis, same_on_all())) for axis in noted),
        partition,
    )


def _noted(
    name: str, types: dict[Any, Any], told: dict[Any, Any], axes: dict[str, Any]
) -> tuple[Any, ...]:
    """The axes that types are noted for when the parameter is gathered: those that it has, if they
    are a whole mesh, else those of `set_current_mesh`.
    """
    stored = tuple(axes.values())
    noted = tuple(told) if span_the_same(told, stored) else current_axes()
    if noted is None:
        raise ValueError(
            f"fully_shard: parameter {name} has types for some axes of the mesh "
            f"{tuple(axes)} only ({_said(told)}). Note one for each, R on those that are "
            "data-parallel, or call fully_shard inside of spmd_types.set_current_mesh(...)"
        )
    if unknown := [axis for axis in types if axis not in noted]:
        raise ValueError(
            f"fully_shard: parameter {name} has a type for {unknown[0]}, which is no axis of "
            f"spmd_types.set_current_mesh(...), {noted}. Note types for its axes alone"
        )
    if not span_the_same(noted, stored):
        raise ValueError(
            f"fully_shard: parameter {name} has types for the axes {noted}, which do not reach the "
            f"same ranks as those of the mesh that fully_shard was given, {stored}. Pass a mesh "
            "over the ranks that types are noted for"
        )
    return noted


def _check_parallel(
    name: str, told: dict[Any, Any], axes: dict[str, Any], parallel: tuple[str, ...]
) -> None:
    """Types are for axes of the mesh, or parts of those that are data-parallel, where it is the
    same on all ranks.
    """
    all_parallel = flattened(axes[each] for each in parallel)
    for own, kind in told.items():
        if own <= all_parallel:
            if kind is not same_on_all():
                raise ValueError(
                    f"fully_shard: parameter {name} has type {kind} on {own}, which is "
                    "data-parallel; should be R there: fully_shard adds up its gradients"
                )
        elif own not in axes.values():
            raise ValueError(
                f"fully_shard: parameter {name} has a type for {own}, which is neither an axis of "
                f"the mesh {tuple(axes)} nor a part of its data-parallel axes {parallel}"
            )


def _placement(name: str, axis: str, kind: Any) -> tuple[Placement, Placement]:
    """How a parameter of this type, and its gradient, are placed on an axis."""
    if hasattr(kind, "dim"):
        return Shard(kind.dim), Shard(kind.dim)
    known: dict[str, tuple[Placement, Placement]] = {
        "R": (Replicate(), Partial()),
        "I": (Replicate(), Replicate()),
    }
    if kind is None or kind.value not in known:
        raise ValueError(
            f"fully_shard: parameter {name} has {'no type' if kind is None else f'type {kind}'} on "
            f"axis {axis!r} of the mesh, which is not data-parallel; should be R, I or S(dim), "
            "which says on which of its dims it is cut"
        )
    return known[kind.value]


def _said(types: dict[Any, Any]) -> str:
    return ", ".join(f"{axis}: {kind}" for axis, kind in types.items())
