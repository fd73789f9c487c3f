"""Parameters that an optimizer steps, and that are not what its units train.

Full ones: where a forward has left them (the outermost module's first forward, with gradients and
without a backward), `parameters()` yields them, and they get no gradient. Plain ones: what is put
into a sharded model after `fully_shard` (`model.head = nn.Linear(...)`), or is around the units of
a model whose outermost module was not sharded, stays a plain parameter: each rank steps it by its
own gradient, and ranks part. Both are so in torch's FSDP2, too, the latter in FSDP1.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from compiled_fsdp.eager.tree import TREES
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.torch_private.groups import is_alone
from compiled_fsdp.units.registered import unwatched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

    from compiled_fsdp.units.unit import Unit

# Plain parameters of each optimizer that may have to be told of, and how many it had in all.
_plain: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[nn.Parameter]]] = (
    weakref.WeakKeyDictionary()
)


def ignore(params: Iterable[nn.Parameter]) -> None:
    """These are in `ignored_params`: the user reduces them, or they are to differ between ranks."""
    for param in params:
        param._fsdp_is_ignored = True  # type: ignore[attr-defined]


def look_at_params(optimizer: Optimizer) -> None:
    """Before a step: announce, once, what of its parameters has a gradient of this rank alone.

    Raises:
        RuntimeError: it has full parameters of units.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    count, plain = _plain.get(optimizer, (-1, []))
    if count != len(params):
        _check_not_full(optimizer, params)
        plain = _of_nobody(params)
        _plain[optimizer] = len(params), plain
    if any(p.grad is not None for p in plain):
        # once more: FSDP1's are plain, and known once their model was called
        found = [p for p in _of_nobody(params) if p.grad is not None]
        _plain[optimizer] = len(params), [] if found else _of_nobody(params)
        if found:
            _announce(optimizer, found)


def announce_updated(optimizer: Optimizer, updated: Iterable[nn.Parameter]) -> None:
    """The same behind a whole step that has updated these parameters of no unit, whose gradients
    nobody sees.
    """
    count, plain = _plain.get(optimizer, (-1, []))
    changed = {id(p) for p in updated}
    if found := [p for p in plain if id(p) in changed]:
        _plain[optimizer] = count, []
        _announce(optimizer, found)


def _announce(optimizer: Optimizer, found: list[nn.Parameter]) -> None:
    warn_once(
        f"compiled_fsdp: {type(optimizer).__name__} steps {_named(found)} beside sharded "
        "parameters, as plain tensors that no unit has: their gradients are not reduced, so that "
        "each rank steps by its own and the ranks part, as in torch's FSDP. Shard what was put "
        "into the model since (model.head = fully_shard(new_head)), or the outermost module; what "
        "you reduce yourself, or what is to differ between ranks, can be told by ignored_params "
        "(FSDP1: ignored_states)",
        about="unreduced parameters",
    )


def _check_not_full(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    full = {
        id(param.unsharded): (param.fqn, runtime.unit.name)
        for tree in list(TREES)
        for runtime in tree.members
        if not runtime.unit.is_flat
        for param in runtime.unit.params
    }
    held = [full[id(p)] for p in params if id(p) in full]
    if held:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: it holds full parameters of {held[0][1]!r} "
            f"({shortened([name for name, _ in held])}), which stood in the place of the sharded "
            "ones when it was built: a forward had left them there, for a backward that had not "
            "come. They get no gradient, so that the step would change nothing that the model "
            "uses. Build the optimizer before the first forward, or after reshard() on that "
            "module, or run a forward without a backward in torch.no_grad()"
        )


def _of_nobody(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Plain trained parameters beside those of units."""
    units = [runtime.unit for tree in list(TREES) for runtime in tree.members]
    held = {id(p): unit for unit in units for param in unit.params for p in param.held_as}
    among: list[Unit] = [held[id(p)] for p in params if id(p) in held]
    if not among or any(_is_alone(unit) for unit in among):
        return []
    plain = [
        p
        for p in params
        if p.requires_grad
        and not isinstance(p, DTensor)
        and id(p) not in held
        and not getattr(p, "_fsdp_is_ignored", False)
    ]
    reduced = _of_ddp() if plain else set()
    return [p for p in plain if id(p) not in reduced]


def _of_ddp() -> set[int]:
    """Parameters that torch's `DistributedDataParallel` reduces, which notes nothing on them."""
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DDP)]
    return {
        id(p)
        for wrapper in wrappers
        for name, p in wrapper.module.named_parameters()
        if name not in wrapper.parameters_to_ignore
    }


def _is_alone(unit: Unit) -> bool:
    return all(is_alone(flat.mesh_info.shard_group) for flat in unit.flats)


def _named(params: list[nn.Parameter]) -> str:
    """By their names in the outermost sharded modules, or by their shapes."""
    wanted = {id(p) for p in params}
    roots = [
        module
        for tree in list(TREES)
        for runtime in tree.in_order()
        if runtime.unit.is_outermost
        for module in runtime.unit.modules
    ]
    with unwatched():
        names = [name for root in roots for name, p in root.named_parameters() if id(p) in wanted]
    return shortened(names or [str(tuple(p.shape)) for p in params])
