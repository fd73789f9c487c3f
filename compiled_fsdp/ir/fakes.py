"""What an op yields for fake tensors: asked once for each way that its arguments look.

A layer looks like the next one, a trial like the graph that it tries, and backward or the graph of
other lengths like forward, so that passes insert the same few hundred calls by the ten thousand.
Asking torch takes four times as long as making a result again that looks as it did, and shares
storage with the same argument. As in torch's own cache, what is known is known in every mode.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private import fakes

from .schema import traits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

# Whose results follow from how their arguments look, and nothing else; as those of collectives do.
NAMESPACES = ("aten", "prims", "_c10d_functional")
PLAIN = (int, float, str, type(None), torch.dtype, torch.device, torch.memory_format)

MOST = 1 << 12  # calls that are known: some 15 MB

# By call: what the result looks like, and which argument it is a view of.
_known: dict[Hashable, tuple[fakes.Look, int | None]] = {}


def run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op on fake tensors."""
    tensors: list[Tensor] = []
    key = _key((args, sorted(kwargs.items())), tensors) if _is_pure(op) else None
    mode = next((m for m in map(fakes.mode_of, tensors) if m is not None), None)
    if key is None or mode is None:
        mode = mode or next((m for m in map(fakes.mode_of, _tensors(args)) if m), None)
        return _ask(mode, op, args, kwargs)
    call = op, key, torch.get_default_dtype()  # which a quotient of whole numbers has
    if call in _known:
        look, place = _known[call]
        return fakes.alike(mode, look, None if place is None else tensors[place])
    result = _ask(mode, op, args, kwargs)
    found = _described(result, tensors)
    if found is not None:
        if len(_known) == MOST:
            _known.clear()
        _known[call] = found
    return result


def _ask(mode: Any, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with mode or nullcontext(), torch.no_grad():
        return op(*args, **kwargs)


def _is_pure(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload):
        return False
    is_known = op.namespace in NAMESPACES or traits_of(op).is_collective
    return is_known and not op._schema.is_mutable


def _key(value: Any, tensors: list[Tensor]) -> Hashable | None:
    """How arguments look, with their tensors in order; None if there is more to one than that."""
    if isinstance(value, list | tuple):
        keys = [_key(each, tensors) for each in value]
        return None if None in keys else (type(value), *keys)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return fakes.look(value)
    return (type(value), value) if isinstance(value, PLAIN) else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _described(result: Any, tensors: Sequence[Tensor]) -> tuple[fakes.Look, int | None] | None:
    """How a result looks, and which argument it is a view of;
    None if it could not be made again.
    """
    look = fakes.look(result)
    if look is None or any(result is tensor for tensor in tensors):
        return None
    storage, nbytes = fakes.storage_of(result)
    shared = [i for i, t in enumerate(tensors) if fakes.storage_of(t)[0] == storage]
    if shared:
        return (look, shared[0]) if len(shared) == 1 else None
    again = fakes.alike(result.fake_mode, look)
    is_whole = not look[2] and fakes.storage_of(again)[1] == nbytes
    return (look, None) if is_whole else None
