"""What an optimizer remembers of a unit's parameters, where it rests on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch.distributed as dist
    from torch import Tensor

    from .flat import FlatBuffer


class OnStates(Protocol):
    """The optimizers of a whole step, of which the state of some parameters rests on the host."""

    def fetch(
        self, flat: FlatBuffer, offsets: Sequence[int], numel: int
    ) -> tuple[Tensor, dist.Work | None]:
        """Start to copy what is remembered of the parameters at these offsets, `numel` elements, to
        the device; returns the copy, and what awaits it: None if nothing is remembered yet.
        """

    def lent(
        self, flat: FlatBuffer, offsets: Sequence[int], state: Tensor
    ) -> AbstractContextManager[None]:
        """Inside, the state of the parameters at these offsets lies in that copy; what else it
        becomes meanwhile is in it at the end.
        """

    def store(self, flat: FlatBuffer, offsets: Sequence[int], state: Tensor) -> dist.Work:
        """Start to copy it back to the host."""
