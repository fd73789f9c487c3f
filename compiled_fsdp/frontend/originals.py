"""Parameters as they were before they were cut: who has kept them is told."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.units.cutting import sharded_as

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from compiled_fsdp.units.unit import Unit

FEW = 4  # parameters that variables of loops hold, which nobody reads any more


def watch_originals(units: Sequence[Unit]) -> None:
    """Before the first forward: say so when a parameter as it was before it was cut gets a
    gradient. What has kept it, a list or a closure, would compute with it for ever.
    """
    for original, (unit, param) in list(sharded_as.items()):
        if unit in units and original.is_leaf and original.requires_grad:
            original.register_post_accumulate_grad_hook(partial(_say_stale, param.fqn))


def _say_stale(fqn: str, _original: Tensor) -> None:
    warn_once(
        f"compiled_fsdp: {fqn} has got a gradient as it was before fully_shard: something has kept "
        "that tensor (a list or a closure that forward reads, a module outside of the sharded "
        "one) and computes with it. The model has had another in its place since, so that no step "
        "of its optimizer changes what is computed, as with torch's FSDP2. Read it from its "
        "module in forward (self.weight)"
    )


def warn_held(units: Sequence[Unit]) -> None:
    """After a step: who holds parameters as they were before they were cut believes to have the
    model's, and the memory of these is not freed.
    """
    if len(_held(units)) > FEW:
        gc.collect()  # of what only cycles hold
    if len(held := _held(units)) > FEW:
        warn_once(
            "compiled_fsdp: something (a list of parameters(), a dict, a closure) has kept "
            f"parameters as they were before fully_shard, whole: {shortened(held)}. What is done "
            "with them, clip_grad_norm_ or p.grad = None or an average, does not come to the "
            "model, as with torch's FSDP2, and their memory is not freed. Make such lists after "
            "fully_shard, or drop them"
        )


def _held(units: Sequence[Unit]) -> list[str]:
    return [
        param.fqn
        for original, (unit, param) in list(sharded_as.items())
        if unit in units and original.grad is None and not original.is_meta
    ]
