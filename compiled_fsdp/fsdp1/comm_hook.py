"""FSDP1's communication hooks as custom reductions: `hook(state, grad, out)` when sharded,
`hook(state, grad)` under NO_SHARD.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# By identity, while a unit keeps them, and they keep what they were made of.
_made: weakref.WeakValueDictionary[tuple[type, int, int], Any] = weakref.WeakValueDictionary()


class _Hook:
    def __init__(self, hook: Callable[..., Any], state: object) -> None:
        self.hook, self.state = hook, state

    @classmethod
    def of(cls, hook: Callable[..., Any], state: object) -> Any:
        """The same object for the same hook and state, so that it has one key in a graph."""
        key = (cls, id(hook), id(state))
        made = _made.get(key) or cls(hook, state)
        _made[key] = made
        return made


class ReduceScatterHook(_Hook):
    """As `set_custom_reduce_scatter` takes it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input and the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Reduce into the output."""
        self.hook(self.state, input_tensor, output_tensor)


class AllReduceHook(_Hook):
    """As `set_all_reduce_hook` takes it."""

    def __call__(self, grad: Tensor) -> None:
        """Reduce in place."""
        self.hook(self.state, grad)
