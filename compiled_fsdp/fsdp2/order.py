"""Modules that cannot be sharded any more: an outer one was sharded first, or torch's own FSDP has
been there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from compiled_fsdp.frontend.beside_stock import check_no_stock_unit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

BOTTOM_UP = (
    "Call fully_shard from the inside out: on the blocks first, then on what contains them, on the "
    "whole model last"
)


def check_order(
    roots: Sequence[nn.Module], managed: Sequence[nn.Module], ignored: Collection[nn.Parameter]
) -> None:
    """Say what a parameter that is a shard already comes from, unless it is tensor-parallel.

    Raises:
        RuntimeError: from an outer unit, or from torch's FSDP.
    """
    skip = {id(parameter) for parameter in ignored}
    for module in managed:
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or id(parameter) in skip:
                continue
            owner: Any = module.__dict__.get("_fsdp_owner")
            if owner is not None and any(p.sharded is parameter for p in owner.unit.params):
                fqn = next(p.fqn for p in owner.unit.params if p.sharded is parameter)
                raise RuntimeError(
                    f"fully_shard: parameter {name} of {type(module).__name__} is {fqn} of the "
                    f"unit {owner.unit.name!r} already, which was sharded before what is inside "
                    f"it. {BOTTOM_UP}"
                )
    check_no_stock_unit("fully_shard", roots, managed, skip)
