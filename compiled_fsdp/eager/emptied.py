"""What a forward leaves behind of gathered parameters, whose memory is emptied at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp.errors import warn_once

from .tree import map_tensors

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
    for module in unit.own_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                look(value, f"keeps, as {name},")
    for fqn, what in found.items():
        warn_once(
            f"compiled_fsdp: forward of unit {unit.name!r} {what} a view of {fqn}, whose memory is "
            "emptied behind it: whoever reads that outside of the unit gets torch's error about a "
            "storage of size 0, or crashes, as with torch's FSDP2. Use a copy (clone()), compute "
            "inside of the unit's forward, or shard with reshard_after_forward=False"
        )
