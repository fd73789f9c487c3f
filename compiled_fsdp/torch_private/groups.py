"""Private torch: process groups and their stores. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import functools
import hashlib
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    _register_process_group,
    _register_work,
    _unregister_process_group,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

# torch's name of a group -> what all ranks' graphs call it; see `name_axes`.
_common: dict[str, str] = {}

_traced: set[type] = set()  # see `trace_as_group`

Kept = TypeVar("Kept")


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group of an axis of a mesh; while a function is traced, too, where `get_group` finds
    those alone that were made with this very mesh, not with an equal one, which torch may have
    given a DTensor.
    """
    return group_named(mesh._dim_group_names[axis])


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Those of all axes."""
    return [group_of(mesh, axis) for axis in range(mesh.ndim)]


def common_name(name: str) -> str:
    """What all ranks' graphs call the group of this name: the axis of a mesh that it belongs to, if
    `name_axes` has seen it; its own name if not.
    """
    common = _common.get(name, name)
    is_known = common != name and _registered(common) is _registered(name)
    return common if is_known else name


def is_known(name: str) -> bool:
    """Whether a graph that names this group can run here."""
    return _registered(name) is not None


def is_common(name: str) -> bool:
    """Whether a name in a graph is the same group's on every rank, or on every rank that has it:
    that of all ranks, one of `name_axes`, or of a rank alone.
    """
    group = group_named(name)
    return group is dist.group.WORLD or group.group_name != name or group.size() == 1


def name_axes(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh, and of the one that it was cut from, names that are the same on
    all ranks.

    torch numbers groups as they are made, so that ranks 0 and 2 of a (replicate, shard) mesh of
    four shard over groups "1" and "2"; in their graphs both are "shard_2of4_9f86d081" from now on,
    and what one rank has compiled serves the other. The group of all ranks keeps its name, and so
    does that of a mesh that leaves ranks out: nobody knows here how the others are divided.
    """
    world = dist.get_world_size()
    for each in dict.fromkeys((mesh, mesh._get_root_mesh())):
        new = [
            axis
            for axis in range(each.ndim)
            if 1 < each.size(axis) < world and _is_unnamed(each, axis)
        ]
        with unset_fake_temporarily():  # parameters may be
            # [copies, *shape]
            ranks = each._layout.remap_to_tensor(each._rank_map) if new else None
        if ranks is None or ranks.numel() != world:
            continue
        for axis in new:
            size = each.size(axis)
            with unset_fake_temporarily():
                rows = ranks.movedim(axis + 1, -1).reshape(-1, size).tolist()
            digest = hashlib.sha256(repr(sorted(rows)).encode()).hexdigest()[:8]
            name = each.mesh_dim_names[axis] if each.mesh_dim_names else f"axis{axis}"
            name_group(group_of(each, axis), f"{name}_{size}of{world}_{digest}")


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Let graphs call a group by this name; by one with a number, where another group has it."""
    for number in itertools.count(1):
        unique = name if number == 1 else f"{name}_{number}"
        known = _registered(unique)
        if known is None:
            _register_process_group(unique, group)  # type: ignore[arg-type]
        if known is None or known is group:
            _common[group.group_name] = unique
            return


def _is_unnamed(mesh: DeviceMesh, axis: int) -> bool:
    try:
        name = group_of(mesh, axis).group_name
    except RuntimeError:  # of a process group that was destroyed: torch reuses equal meshes
        return False
    return common_name(name) == name


def _registered(name: str) -> dist.ProcessGroup | None:
    try:
        return group_named(name)
    except RuntimeError:  # unknown, or the group that had the name is gone
        _unregister_process_group(name)  # type: ignore[arg-type]
        return None


_assumed: list[str] = []  # backend that groups are taken to have; see `assume_backend`


@contextmanager
def assume_backend(name: str) -> Iterator[None]:
    """Inside, graphs are made as for groups of this backend, whatever those of this process are."""
    _assumed.append(name)
    try:
        yield
    finally:
        _assumed.pop()


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend of a group ("gloo", "nccl", ...), as graphs are to see it."""
    return _assumed[-1] if _assumed else str(dist.get_backend(group))


def default_group() -> dist.ProcessGroup:
    """That of all ranks."""
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def new_group(
    ranks: list[int], backend: str, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A process group that its own ranks make together, with torch's timeout or this one; torch's
    annotation since 2.15 knows also who is not among them.
    """
    made: Any = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, backend=backend
    )
    group: dist.ProcessGroup = made
    return group


def kept_for(
    first: dist.ProcessGroup,
    name: str,
    known: dict[str, tuple[dist.ProcessGroup, Kept]],
    make: Callable[[], Kept],
) -> Kept:
    """What is kept in `known` under a name beside a group. `make` makes it if there is none, or if
    the group was destroyed since and another one has its name.
    """
    if name not in known or known[name][0] is not first:
        known[name] = first, make()
    return known[name][1]


def rename(group: dist.ProcessGroup, name: str) -> None:
    """Let graphs call a group by this name, whatever had it before."""
    if _registered(name) is not None:
        _unregister_process_group(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]


def group_store(group: dist.ProcessGroup, prefix: str) -> Any:
    """The group's key-value store below a prefix: get, set, check and clone."""
    return PrefixStore(prefix, group.get_group_store())


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives may take; `init_process_group` and `new_group` set it."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def is_alone(group: dist.ProcessGroup) -> bool:
    """Whether no other process is in the group: one rank, or the others are only counted."""
    return group.size() == 1 or dist.get_backend(group) in ("fake", "timed")


PythonWork: Any = dist._Work  # type: ignore[attr-defined]  # to be awaited by code in Python
PythonGroup: Any = dist.ProcessGroup  # its collectives, written in Python


def lone_store() -> Any:
    """A key-value store of this process alone."""
    return HashStore()


def register_work(tensor: Tensor, work: Any) -> None:
    """Make `_c10d_functional.wait_tensor(tensor)` wait for `work`."""
    _register_work(tensor, work)


def reduce_op(name: str) -> Any:
    """The `ReduceOp` that functional collectives call by this name."""
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[name]


def trace_as_group(kind: type) -> None:
    """Let Dynamo take instances of a class for process groups, whose size and ranks are constants
    (`dist.get_world_size(group)` in a forward): torch 2.11 does so for its own classes alone, later
    versions for all. Tried on 2.11 and 2.13.
    """
    from torch._dynamo.variables import distributed

    variable: Any = getattr(distributed, "ProcessGroupVariable", None)
    known = getattr(variable, "is_process_group", None)
    _traced.add(kind)
    if known is None or hasattr(known, "__wrapped__"):
        return

    @functools.wraps(known)
    def is_process_group(value: object) -> bool:
        return known(value) or type(value) in _traced

    variable.is_process_group = staticmethod(is_process_group)


def never_record(backend: str) -> None:
    """Have no flight recorder attached to groups of this backend that are written in Python: since
    torch 2.15 it is, and asks C++ for a name that such a group does not have there. Tried on 2.11,
    2.13 and 2.15.
    """
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(backend)
