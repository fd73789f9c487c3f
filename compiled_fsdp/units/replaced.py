"""Parameters whose local tensor was replaced (`to`, `to_empty`, `load_state_dict(assign=True)`)
come back into the flat buffer of their unit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from compiled_fsdp.errors import shortened
from compiled_fsdp.torch_private.dtensors import local_tensor, make_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .flat import FlatBuffer
    from .param import ShardedParam


def bring_back(flat: FlatBuffer, *, is_moved: bool = False) -> None:
    """Nothing is done while parameters that a module holds are on the meta device, or have several
    dtypes: a state dict is loaded one module after the other. `check_one_dtype` asks before use.

    is_moved: the module was moved or cast, which does not come to parameters that no module holds
        any more (tied since): those follow the others.

    Raises:
        AssertionError: a local tensor has another size than the one in whose place it is.
    """
    locals_ = [local_tensor(p.sharded) for p in flat.params]
    pairs = list(zip(flat.params, locals_, strict=True))
    replaced = [local for param, local in pairs if _lies_elsewhere(flat, param, local)]
    flat.is_mixed = False
    if not replaced:
        return
    holds = flat.unit.in_use()
    held = [local for param, local in pairs if param.is_held_in(holds)]
    if any(local.device.type == "meta" for local in held or locals_):
        return
    flat.is_mixed = len({local.dtype for local in held or locals_}) > 1
    if flat.is_mixed:  # a buffer of either dtype would round, or widen, what has the other
        return
    _check_sizes(flat, pairs)
    given = [local for local in locals_ if local.device.type != "meta"]
    first = replaced[0] if is_moved else (given or locals_)[0]
    fresh = flat.unit.zeros(flat.layout.numel, first.dtype, first.device)
    with torch.no_grad():
        for param, local in pairs:
            _place(param, local, flat.local_view(fresh, param))
        if flat.data.device.type == fresh.device.type:
            flat.replace_memory(fresh)
            return
    flat.unit.forget_handles()  # e.g. from meta: `.data` cannot change the device
    flat.become(nn.Parameter(fresh, requires_grad=flat.data.requires_grad))


def check_one_dtype(flat: FlatBuffer) -> None:
    """Before parameters are read, all of a buffer have to be back in it.

    Raises:
        TypeError: some were cast, or loaded in another dtype, without the others.
    """
    if not flat.is_mixed:
        return
    dtypes: dict[torch.dtype, list[str]] = {}
    for param in flat.params:
        dtypes.setdefault(param.local.dtype, []).append(param.fqn)
    told = "; ".join(f"{shortened(names)} {dtype}" for dtype, names in dtypes.items())
    raise TypeError(
        f"{flat.unit.name}: parameters that had one dtype when they were sharded have several now "
        f"({told}): a submodule was cast, or load_state_dict(assign=True) brought another dtype "
        "for some. They are gathered from one buffer. Cast before fully_shard, which makes a "
        "buffer for each dtype, or cast the sharded module as a whole"
    )


def _lies_elsewhere(flat: FlatBuffer, param: ShardedParam, local: Tensor) -> bool:
    if local.untyped_storage()._cdata != flat.data.untyped_storage()._cdata:
        return True
    start = flat.local_view(flat.data, param).storage_offset()
    return bool(local.numel() and local.storage_offset() != start)


def _place(param: ShardedParam, local: Tensor, view: Tensor) -> None:
    """Let a parameter be this view of the buffer, with the values that it has."""
    if local.device.type == "meta":  # nobody holds it, so nobody gave it values
        if view.is_floating_point():
            view.fill_(math.nan)
        placed = make_dtensor(view.data, param.sharded)
        param.hold(nn.Parameter(placed, requires_grad=param.sharded.requires_grad))
        param.register(param.sharded)
        return
    view.copy_(local)
    placed = make_dtensor(view.data, param.sharded)
    param.sharded.data = placed  # takes over all but the local tensor; Dynamo looks at the offset
    param.sharded._local_tensor = placed._local_tensor  # type: ignore[attr-defined]


def _check_sizes(flat: FlatBuffer, pairs: Sequence[tuple[ShardedParam, Tensor]]) -> None:
    wrong = [
        f"{param.fqn}: {tuple(local.shape)} instead of {tuple(view.shape)}"
        for param, local in pairs
        if (view := flat.local_view(flat.data, param)).shape != local.shape
    ]
    if wrong:
        raise AssertionError(
            f"{flat.unit.name}: local tensors were replaced by some of another size: "
            f"{'; '.join(wrong)}. A rank's shard keeps its size; load a state dict to change "
            "values"
        )
