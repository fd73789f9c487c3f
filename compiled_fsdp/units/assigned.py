"""What a user has put in the place of a unit's sharded parameters: taken over where it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp.errors import warn_once
from compiled_fsdp.torch_private.dtensors import local_tensor

from .registered import UNITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .param import ShardedParam
    from .unit import Unit


def adopt_replaced(unit: Unit) -> None:
    """Take over parameters that were assigned to the modules, as `load_state_dict(assign=True)`
    does.

    Raises:
        TypeError: a new parameter is not a DTensor with the mesh, placements and shape of the
            old one.
    """
    assigned = _assigned(unit)
    for param, new in assigned:
        if not _fits(param, new):
            old: Any = param.sharded
            raise TypeError(
                f"load_state_dict: parameter {param.fqn} was assigned a "
                f"{type(new.data).__name__} of shape {tuple(new.shape)}; its unit needs a "
                f"DTensor placed as {old.placements}, shape {tuple(old.shape)}. Use "
                "distribute_tensor, or "
                "torch.distributed.checkpoint.state_dict.set_model_state_dict"
            )
        if of := _shares_memory(param, new):
            warn_once(
                f"compiled_fsdp: load_state_dict(assign=True) gave {param.fqn} the memory of the "
                f"sharded parameter {of}{' of another model' if of == param.fqn else ''}, of "
                f"which it has the values now. {APART}",
                about="load_state_dict(assign=True) of memory that another has",
            )
    _adopt(unit, assigned)


def adopt_assigned(unit: Unit) -> None:
    """Take over what users assigned since the last call and fits; what does not fit is read as
    it is.

    Raises:
        RuntimeError: one of several names of a tied parameter was assigned a sharded parameter
            of its own, or one shares its memory with another.
    """
    assigned = _assigned(unit)
    fitting = [(param, new) for param, new in assigned if _fits(param, new)]
    for param, new in fitting:
        if of := _shares_memory(param, new):
            raise RuntimeError(
                f"{unit.name}: {param.fqn} was assigned a Parameter that has the memory of {of}. "
                f"{APART}: nn.Parameter(p.detach().clone())"
            )
        kept = [name for module, name in param.owners if module._parameters.get(name) is not new]
        if kept:
            raise RuntimeError(
                f"{unit.name}: {param.fqn} is tied, and only some of the modules that hold it "
                f"were assigned another sharded parameter ({kept} were not). Untie weights "
                "before fully_shard, or assign to all of them"
            )
    plain = [
        p.fqn
        for p, new in assigned
        if isinstance(new, nn.Parameter) and not isinstance(new, DTensor)
    ]
    if plain:
        warn_once(
            f"compiled_fsdp: in the place of {', '.join(plain)} of unit {unit.name!r} stands a "
            "plain nn.Parameter: it is read as it is, neither gathered nor reduced over the "
            "ranks, and what was sharded is not trained meanwhile. To change its values, copy "
            "into the sharded parameter, or load a state dict"
        )
    _adopt(unit, fitting)


def _assigned(unit: Unit) -> list[tuple[ShardedParam, Any]]:
    unit.was_assigned = False
    return [(param, new) for param in unit.params if (new := param.assigned()) is not None]


def _shares_memory(param: ShardedParam, new: Any) -> str:
    """Of which other sharded parameter the new one has the memory; "" if of none."""
    start = local_tensor(new).data_ptr()
    for flat in (f for unit in list(UNITS) for f in unit.flats if not f.is_apart):
        begin = flat.data.data_ptr()
        if not new.numel() or not begin <= start < begin + flat.data.nbytes:
            continue
        shared = [p for p in flat.params if flat.local_view(flat.data, p).data_ptr() == start]
        return "" if param in shared else (shared or flat.params)[0].fqn
    return ""


APART = (
    "Sharded parameters have memory of their own, so that a change of one does not reach the "
    "other. Assign the other parameter itself, which ties them, or a copy of it"
)


def _adopt(unit: Unit, assigned: Sequence[tuple[ShardedParam, Any]]) -> None:
    for param, new in assigned:
        _say_it_stays_tied(param, new)
        param.hold(new)
        param.register(new)
        param.put_back()
    if assigned:
        for flat in unit.flats:
            flat.refresh()
        unit.publish()


def _say_it_stays_tied(param: ShardedParam, new: Any) -> None:
    """`load_state_dict(assign=True)` gives each name a parameter of its own, one after the
    other.
    """
    if any(module._parameters.get(name) is not new for module, name in param.owners):
        warn_once(
            f"compiled_fsdp: parameter {param.fqn} is tied, and load_state_dict(assign=True) gave "
            "each of its names a parameter of its own, which ends the tie of a plain module. "
            "Sharded weights stay tied, with the values given to one name. Untie weights before "
            "fully_shard, or load without assign=True"
        )


def _fits(param: ShardedParam, new: Any) -> bool:
    """Whether a parameter can take the place of a sharded one."""
    old: Any = param.sharded
    if not isinstance(new, nn.Parameter) or not isinstance(new, DTensor):
        return False
    return (new._spec.mesh, new.placements, new.shape) == (
        old.device_mesh,
        old.placements,
        old.shape,
    )
