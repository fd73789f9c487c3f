"""The tensors inside what a forward is given and what it returns: containers, dataclasses, objects
of the user's.

Private torch used here (tried on 2.13): `torch.utils._pytree`.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `fn` to the tensors inside containers and dataclasses; what did not change is the same
    object.
    """
    leaves, structure = tree_flatten(value)
    mapped = [_map_leaf(fn, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


def _map_leaf(fn: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    fields_ = {f.name: getattr(leaf, f.name) for f in fields(leaf) if f.init}
    changed = {
        name: new for name, old in fields_.items() if (new := map_tensors(fn, old)) is not old
    }
    return replace(leaf, **changed) if changed else leaf


MOST_LOOKED_AT = 1000  # objects of one output that are no containers
HOLDS_NONE = (NoneType, int, float, str, bytes, type, ModuleType, FunctionType, nn.Module)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors inside containers, and inside objects that hold them: what a forward returns may
    be a distribution, a class of the user's, or a dict of one.
    """
    seen: dict[int, Any] = {}  # with what has the identity, which else another may get
    leaves: set[type] = set()  # of pytree, which goes by types; to ask is what takes long
    num_objects = 0
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, Tensor):
            yield found
        elif not isinstance(found, HOLDS_NONE) and id(found) not in seen:
            seen[id(found)] = found
            if (held := _held_by_container(found, leaves)) is None:
                leaves.add(type(found))
                num_objects += 1
                held = _held_by_object(found) if num_objects <= MOST_LOOKED_AT else ()
            left += held


def _held_by_container(value: Any, leaves: set[type]) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if type(value) in leaves:
        return None
    held = tree_leaves(value)
    return None if len(held) == 1 and held[0] is value else held


def _held_by_object(value: Any) -> Iterable[Any]:
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
    held = [getattr(value, name, None) for name in names if not name.startswith("__")]
    return [*held, *getattr(value, "__dict__", {}).values()]
