"""A user's all-reduce hook on a stream of the user's: `set_all_reduce_hook(hook, stream=...)`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# By identity, while a unit keeps them, and they keep what they were made of.
_made: weakref.WeakValueDictionary[tuple[int, int], HookOnStream] = weakref.WeakValueDictionary()


class HookOnStream:
    """Calls a hook on a stream, behind what has reduced the gradient; what uses the gradient then,
    on the current stream, waits for the hook.

    Stock divides and casts on the hook's stream too, and awaits it at the end of backward; the
    values are the same.
    """

    def __init__(self, hook: Callable[[Tensor], object], stream: Any) -> None:
        self.hook, self.stream = hook, stream

    @classmethod
    def of(cls, hook: Callable[[Tensor], object], stream: Any) -> HookOnStream:
        """Returns the same object for the same hook and stream, so that it has one key in a graph.

        Raises:
            TypeError: `stream` is none.
        """
        if not callable(getattr(stream, "wait_stream", None)):
            raise TypeError(
                f"set_all_reduce_hook: stream is {named(stream)}, which has no wait_stream(); "
                "should be a stream of the device that the parameters are on, such as a "
                "torch.cuda.Stream"
            )
        key = id(hook), id(stream)
        made = _made.get(key) or cls(hook, stream)
        _made[key] = made
        return made

    def __call__(self, reduced: Tensor) -> None:
        """Call the hook."""
        device = torch.get_device_module(reduced.device)
        current = device.current_stream()
        self.stream.wait_stream(current)
        with device.stream(self.stream):
            self.hook(reduced)
        current.wait_stream(self.stream)
