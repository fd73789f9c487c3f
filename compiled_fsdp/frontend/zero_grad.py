"""`module.zero_grad()` of modules that own sharded parameters.

Between forward and backward the outermost module, as any that keeps its full parameters, has these
registered, and gradients are the sharded ones': torch's loop over `parameters()` would drop none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.dynamo import never_traced_alone, untraced
from compiled_fsdp.units.registered import Registered, unwatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def zeroing(original: type[nn.Module]) -> Callable[..., None]:
    """The `zero_grad` of a class made of this one: what is its own, then hidden gradients."""

    @functools.wraps(original.zero_grad)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            original.zero_grad(self, *args, **kwargs)
            return
        with unwatched():
            original.zero_grad(self, *args, **kwargs)
        _zero_hidden(self, *args, **kwargs)

    never_traced_alone(zero_grad)
    return zero_grad


@untraced
def _zero_hidden(module: nn.Module, set_to_none: bool = True, *_: Any, **__: Any) -> None:
    """Of sharded parameters in the place of which full ones are registered."""
    for inner in module.modules():
        table: Any = inner._parameters
        for name in tuple(table.gathered) if isinstance(table, Registered) else ():
            sharded = table.owners[name][1].sharded
            if sharded.grad is None:
                continue
            if set_to_none:
                sharded.grad = None
            else:
                sharded.grad.zero_()
