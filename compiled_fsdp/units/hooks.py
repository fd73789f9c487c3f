"""Hooks of users on sharded parameters that nobody calls: autograd never computes a gradient of
these, it is reduced and put there. And those on full parameters, which autograd calls in eager mode
alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.torch_private.autograd import has_hooks_of_users

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from .param import ShardedParam

_INSTEAD = (
    "Call register_post_accumulate_grad_hook on the sharded parameter: that hook gets it with its "
    "reduced gradient, and may change that"
)


def say_lost(names: Iterable[str], parameters: Iterable[Tensor], *, is_flat: bool = False) -> None:
    """Parameters are about to be sharded: their hooks stay with what is thrown away."""
    lost = [
        name
        for name, p in zip(names, parameters, strict=True)
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if lost:
        instead = "Change gradients before optimizer.step()" if is_flat else _INSTEAD
        warn_once(
            f"compiled_fsdp: hooks that were registered on {shortened(lost)} before it was sharded "
            f"are never called: the sharded parameter is another tensor. {instead}",
            about="hooks from before sharding",
        )


def say_uncalled(params: Iterable[ShardedParam]) -> None:
    """Gradients of these are put there, and no hook of `register_hook` sees them."""
    uncalled = [p.fqn for p in params if p.sharded._backward_hooks]
    if uncalled:
        warn_once(
            f"compiled_fsdp: hooks of register_hook on {shortened(uncalled)} are never called, as "
            f"with torch's fully_shard: autograd has no gradient of sharded parameters. {_INSTEAD}",
            about="hooks of register_hook",
        )


def why_hooked(params: Iterable[ShardedParam]) -> str:
    """Which hooks on full parameters keep a unit out of graphs; "" if none do. In a graph there is
    no such parameter, and nobody to call them; in eager mode it is the same object in every step.
    """
    hooked = [p.fqn for p in params if p.unsharded is not None and has_hooks_of_users(p.unsharded)]
    if not hooked:
        return ""
    return (
        f"hooks that were registered on the full parameters ({shortened(hooked, 1)}), in a forward "
        "or after unshard(), which eager mode alone calls,"
    )


def say_uncalled_flat(names: Iterable[str], held: Iterable[Tensor]) -> None:
    """The same of FSDP1's: what optimizers hold of a flat parameter, where no hook is called."""
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in held):
        warn_once(
            f"compiled_fsdp: hooks on parameters of a FullyShardedDataParallel instance (of "
            f"{shortened(list(names))}) are never called. Change gradients before "
            "optimizer.step(), or register a communication hook",
            about="hooks on FSDP1's parameters",
        )
