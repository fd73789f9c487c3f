"""Full parameters that stay registered when an eager forward, or `unshard()`, has ended: graphs
gather for themselves, and would not see what is written to these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.wire.ops import TRACED

if TYPE_CHECKING:
    from .runtime import Runtime


def is_for_graphs(runtime: Runtime) -> bool:
    """Whether graphs gather the unit, and no gradient of theirs will drop what is left."""
    return _is_frozen(runtime) and runtime.unit.key in TRACED


def drop_left_over(runtime: Runtime) -> bool:
    """Before a compiled call: reshard a unit whose full parameters no gradient will drop. Returns
    whether there were any.
    """
    if runtime.is_in_forward or runtime in runtime.tree.backward:
        return False
    is_frozen = _is_frozen(runtime)
    is_dropped = is_frozen if runtime.is_left_over else _is_opened(runtime, is_frozen)
    if is_dropped:
        runtime.reshard()
    return is_dropped


def put_down(runtime: Runtime) -> None:
    """Behind a forward that has raised: register the sharded parameters, as those that have the
    gradients, unless another call of the unit, or of what borrows its parameters, is around.

    A hook may have ended forward once it had what it wanted, of which a backward comes: the full
    ones keep their memory until the next forward ends, and their gradients are waited for.
    """
    is_read = any(each.is_in_forward for each in (runtime, *runtime.borrowers))
    is_needed = is_read or len(runtime.under_way) > 1 or runtime in runtime.tree.transformed
    if runtime.is_unsharded and not is_needed:
        runtime.watch_leaves()
        runtime.reshard(keeps_storage=True)


def _is_opened(runtime: Runtime, is_frozen: bool) -> bool:
    """Whether `unshard()` gathered the unit, which graphs gather too, and no gradient comes."""
    stays = not runtime.unit.settings.reshard_after_backward or runtime in runtime.tree.transformed
    is_for_graphs = runtime.unit.key in TRACED and not stays
    return runtime.is_unsharded and is_for_graphs and (is_frozen or not torch.is_grad_enabled())


def _is_frozen(runtime: Runtime) -> bool:
    return not any(param.sharded.requires_grad for param in runtime.unit.params)
