"""Private torch: where ranks are in a mesh, and compiling as if this process were another rank.

Tried on torch 2.13.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from .groups import common_name

if TYPE_CHECKING:
    from collections.abc import Iterator

COORDINATE = "_coordinate_on_dim"  # of a mesh: where this rank is in it


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Inside, what is traced sees the number of this rank and its place in every mesh; groups stay
    those of this process.

    What DTensor remembers of its own arithmetic goes by mesh and placements alone, and is forgotten
    on the way in and out.
    """
    known: dict[int, tuple[DeviceMesh, tuple[int, ...] | None]] = {}
    rank_in, local_rank = ProcessGroup.__dict__["rank"], DeviceMesh.get_local_rank

    def place(mesh: DeviceMesh) -> tuple[int, ...] | None:
        if id(mesh) not in known:
            known[id(mesh)] = mesh, places(mesh).get(rank)
        return known[id(mesh)][1]

    def keep(mesh: DeviceMesh, value: Any) -> None:
        mesh.__dict__[COORDINATE] = value

    def place_on(mesh: DeviceMesh, mesh_dim: int | str | None = None) -> int:
        found = mesh.get_coordinate()
        assert found is not None
        if isinstance(mesh_dim, str):
            mesh_dim = (mesh.mesh_dim_names or ()).index(mesh_dim)
        return found[mesh_dim or 0]

    def rank_as(group: ProcessGroup) -> int:
        return rank if group is dist.group.WORLD else rank_in.__get__(group)()

    mesh_class: Any = DeviceMesh
    group_class: Any = ProcessGroup
    _forget()
    setattr(mesh_class, COORDINATE, property(place, keep))
    mesh_class.get_local_rank, group_class.rank = place_on, rank_as
    try:
        yield
    finally:
        delattr(mesh_class, COORDINATE)
        mesh_class.get_local_rank, group_class.rank = local_rank, rank_in
        _forget()


def places(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Where each rank is in a mesh, or in the one that it has instead;
    those that have none are left out.
    """
    with _disable_current_modes():  # a graph may be traced
        ranks = mesh._layout.remap_to_tensor(mesh._rank_map)  # [copies, *shape]
        indices = (ranks >= 0).nonzero().tolist()
        return {int(ranks[tuple(index)]): tuple(index[1:]) for index in indices}


def mesh_in_words(mesh: DeviceMesh) -> str:
    """Sizes of its axes and what graphs call their groups: the same on every rank."""
    names = mesh.mesh_dim_names or [f"axis{axis}" for axis in range(mesh.ndim)]
    return ", ".join(
        f"{name}={mesh.size(axis)} ({common_name(group.group_name)})"
        for axis, (name, group) in enumerate(zip(names, mesh.get_all_groups(), strict=True))
    )


def _forget() -> None:
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
