"""What the other optimizers of a model have stepped since its gradients were computed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from compiled_fsdp.torch_private.autograd import without_torch_function
from compiled_fsdp.torch_private.dtensors import local_tensor

if TYPE_CHECKING:
    from torch import Tensor, optim


class Others:
    """Other optimizers than one that overlaps."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, optimizer: optim.Optimizer) -> None:
        """One of them has stepped, with the gradients that are there."""
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                self._used[id(p)] = weakref.ref(p.grad), _version(p.grad)

    def are_done(self, param: Tensor) -> bool:
        """Whether none of them is going to change a parameter before the next backward: its
        gradient is used, or there is none.
        """
        grad = param.grad
        if grad is None:
            return True
        used, version = self._used.get(id(param), (None, -1))
        return used is not None and used() is grad and _version(grad) == version


def _version(grad: Tensor) -> int:
    """Without waiting for a gradient that is still being reduced, nor reading one that was used up
    inside backward.
    """
    with without_torch_function():
        return local_tensor(grad)._version
