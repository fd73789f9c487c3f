"""What a forward leaves behind that means less than it says: views of gathered parameters, whose
memory is emptied at its end, and hooks on its inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.errors import shortened, warn_once

from .containers import map_tensors
from .full_params import FullParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.units.param import ShardedParam
    from compiled_fsdp.units.unit import Unit


def say_what_is_emptied(unit: Unit, params: Sequence[ShardedParam], output: Any) -> None:
    """Announce outputs, and attributes of modules, that view a parameter whose full form has been
    freed: torch refuses to read them, or reads memory that is not there.

    params: that are gathered into memory of their own.
    """
    memory = {
        param.gathered.untyped_storage()._cdata: param.fqn
        for param in params
        if param.unsharded is not None and not param.gathered.untyped_storage().nbytes()
    }
    found: dict[str, str] = {}

    def look(tensor: Tensor, what: str) -> Tensor:
        if tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
            fqn = memory.get(tensor.untyped_storage()._cdata)
            if fqn is not None and tensor.numel():
                found.setdefault(fqn, what)
        return tensor

    map_tensors(lambda tensor: look(tensor, "returns"), output)
    # FSDP1 itself, without `use_orig_params`, lets modules hold views of the flat parameter.
    shown = {owner for p in unit.params for owner in p.owners} if unit.is_flat else set()
    for module in unit.own_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and (module, name) not in shown:
                look(value, f"keeps, as {name},")
    for fqn, what in found.items():
        warn_once(
            f"compiled_fsdp: forward of unit {unit.name!r} {what} a view of {fqn}, whose memory is "
            "emptied behind it: whoever reads that outside of the unit gets torch's error about a "
            "storage of size 0, or crashes, as with torch's FSDP2. Use a copy (clone()), compute "
            "inside of the unit's forward, or shard with reshard_after_forward=False"
        )


def say_hooked_inputs(unit: Unit, inputs: Sequence[Tensor]) -> None:
    """Announce hooks that a forward has registered on its inputs: each call has tensors of its own.

    inputs: that the forward was given in the place of the caller's.
    """
    hooks = [hook for tensor in inputs for hook in (tensor._backward_hooks or {}).values()]
    theirs = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), FullParams)]
    if theirs:
        names = list(dict.fromkeys(getattr(h, "__qualname__", type(h).__name__) for h in theirs))
        warn_once(
            f"compiled_fsdp: forward of unit {unit.name!r} registers a hook on its input "
            f"(register_hook of {shortened(names, 1)}). Outside of a graph that is another tensor "
            "than the caller's, as in torch's FSDP2: the hook sees, and changes, the gradient of "
            "this call alone, not of other uses of the caller's tensor. Register it on the "
            "caller's before the call, or on a tensor that forward computes"
        )
