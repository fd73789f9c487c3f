"""Units of torch's own FSDP in a model of ours, whichever came first: said before anything is lost.

One import that was forgotten is enough for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from compiled_fsdp.eager.stock_state import is_sharded_by_stock, names_held_by_stock
from compiled_fsdp.errors import shortened
from compiled_fsdp.torch_private.modules import plain_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import nn

    from compiled_fsdp.units.unit import Unit

ONE_OF_THEM = (
    "One model cannot have units of both. Import {name} from compiled_fsdp alone, or call "
    "compiled_fsdp.replace_stock() before anything else is imported"
)
FUNCTION, CLASS = "fully_shard", "FullyShardedDataParallel"


def _one_of_them(name: str) -> str:
    return f"torch.distributed.fsdp.{name}. {ONE_OF_THEM.format(name=name)}"


def stock_name(module: nn.Module) -> str:
    """By which of torch's names a module was sharded; "" for ours and all others."""
    if "_fsdp_state" in module.__dict__:
        return ""
    if isinstance(module, FullyShardedDataParallel):
        return CLASS
    return FUNCTION if isinstance(module, FSDPModule) else ""


def check_no_stock_unit(
    what: str,
    roots: Iterable[nn.Module],
    managed: Sequence[nn.Module],
    ignored: Collection[int] = (),
) -> None:
    """No module that a unit is about to take may be of torch's FSDP,
    nor a parameter of it be a shard of an outer one.

    Args:
        what: which function of ours asks.
        roots: what it was given.
        managed: the modules among them whose parameters it takes.
        ignored: ids of the parameters that it leaves alone.

    Raises:
        RuntimeError: one is; nothing has been changed.
    """
    takes = {id(module) for module in managed if not _is_ignored(module, ignored)}
    found: dict[str, list[str]] = {}
    for root in roots:
        for path, module in root.named_modules():
            if id(module) in takes and (name := stock_name(module)):
                shown = plain_name(path) or type(module).__name__
                found.setdefault(name, []).append(shown)
    for name, paths in found.items():
        raise RuntimeError(
            f"{what}: {_modules(paths)} sharded by {_one_of_them(name)}. Nothing was changed"
        )
    for module in managed:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in ignored and _is_stock(parameter):
                raise RuntimeError(
                    f"{what}: parameter {key} of {type(module).__name__} was sharded by a call on "
                    f"a module around it, of {_one_of_them(FUNCTION)}. Nothing was changed"
                )


def _is_ignored(module: nn.Module, ignored: Collection[int]) -> bool:
    params = [id(parameter) for parameter in module.parameters()]
    return bool(params) and all(key in ignored for key in params)


def _modules(paths: list[str]) -> str:
    return f"module {paths[0]!r} was" if len(paths) == 1 else f"modules {shortened(paths)} were"


def _is_stock(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and is_sharded_by_stock(parameter)


def check_not_taken(units: Iterable[Unit]) -> None:
    """What units registered must be theirs alone, at the first forward.

    Raises:
        RuntimeError: torch's `fully_shard`, called on a module around them, has sharded it again.
    """
    theirs = names_held_by_stock()
    for unit in units if theirs else ():
        if any(owner in theirs for param in unit.params for owner in param.owners):
            raise RuntimeError(
                f"{unit.name}: its parameters were sharded again, by a call on a module around it, "
                f"of {_one_of_them(FUNCTION)}"
            )


class NotInsideTheWrapper:
    """A module that `fully_shard` was given, which `FullyShardedDataParallel` cannot flatten.

    The constructor, torch's or ours, marks for Dynamo what is below it before it flattens that.
    """

    @property
    def _fsdp_use_orig_params(self) -> bool:
        """What Dynamo reads of modules that FSDP manages."""
        if "_is_fsdp_managed_module" not in self.__dict__:
            raise AttributeError("_fsdp_use_orig_params")
        return True

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, value: bool) -> None:
        name = self.__dict__["_fsdp_state"].unit.name
        raise RuntimeError(
            f"{CLASS} was called on a module around {name!r}, which compiled_fsdp.fully_shard had "
            f"sharded. Use one of the two: fully_shard for the outer modules too, or {CLASS} for "
            "the inner ones"
        )
