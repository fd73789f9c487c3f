"""Private to the package `spmd_types` (torchtitan's types of tensors over a mesh): how it notes
types on tensors, and its type checking, a mode that looks at every call of torch's.

Tried with spmd_types 0.2.3 and 0.3.1, on torch 2.13, 2.14 and 2.15. Nothing is imported: without
the package nobody has typed a parameter.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
R = TypeVar("R")


def types_of(tensor: Tensor) -> dict[Any, Any]:
    """The types that a user has noted on a tensor, by axis (`spmd_types.MeshAxis`); none of a
    plain one.
    """
    return getattr(tensor, "_local_type", None) or {}


def partition_of(tensor: Tensor) -> Any:
    """Which axes cut which of its dims (`spmd_types.PartitionSpec`); None if that is not noted."""
    return getattr(tensor, "_partition_spec", None)


def types_of_partition(partition: Any) -> dict[Any, Any]:
    """What a `PartitionSpec` says, as types by axis."""
    if partition is None:
        return {}
    found: dict[Any, Any] = _package(".types").partition_spec_to_shard_types(partition)
    return found


def same_on_all() -> Any:
    """The type R: the same on all ranks of an axis, with a gradient that is to be added up."""
    return _package().R


def axis_of(group: Any) -> Any:
    """The `MeshAxis` of a process group."""
    return _package().MeshAxis.of(group)


def flattened(axes: Iterable[Any]) -> Any:
    """One axis of several."""
    return _package("._mesh_axis").flatten_axes(tuple(axes))


def span_the_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether axes reach the same ranks as others, cut in another way perhaps."""
    normalize = _package().normalize_mesh
    one, other = normalize(frozenset(some)), normalize(frozenset(others))
    if not one or not other:
        return bool(one == other)
    return bool(flattened(one) == flattened(other))


def current_axes() -> tuple[Any, ...] | None:
    """The axes of `spmd_types.set_current_mesh`; None outside of it."""
    found = _package().current_mesh()
    return None if found is None else tuple(found)


def note_types(tensor: Tensor, types: dict[Any, Any], partition: Any) -> None:
    """Note types on a tensor, if the user has types checked here."""
    if _is_checking():
        _package().assert_type(tensor, types, partition_spec=partition)


def note_types_of(like: Tensor, tensor: Tensor) -> None:
    """Note on a tensor what is noted on another that is the same."""
    if _is_checking() and (types := types_of(like)):
        note_types(tensor, dict(types), partition_of(like))


def unchecked(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep the checking of types out of this function and of all that it calls: tensors of ours
    have none.
    """

    @functools.wraps(fn)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = _mode()
        if mode is None or mode._disabled:
            return fn(*args, **kwargs)
        try:
            mode._disabled = mode._fsdp_paused = True
            return fn(*args, **kwargs)
        finally:
            mode._disabled = mode._fsdp_paused = False

    return paused


def _is_checking() -> bool:
    """Whether the user has types checked, though `unchecked` has paused it."""
    mode = _mode()
    return mode is not None and (not mode._disabled or getattr(mode, "_fsdp_paused", False))


def _package(part: str = "") -> Any:
    return sys.modules[f"spmd_types{part}"]


def _mode() -> Any:
    """The mode that checks types in this thread, paused or not; None if there is none."""
    state: Any = sys.modules.get("spmd_types._state")
    return None if state is None else state._current_mode()
