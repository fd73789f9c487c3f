"""The loop that a whole step stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class WrittenOut:
    """The loop that `compile_step` stands for. syncs: the model is sharded, and can be told when to
    reduce; the rest is as for `compile_step`.
    """

    model: Any
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]
    loss_fn: Callable[..., Tensor]
    syncs: bool
    clip: float | None = None
    accumulate: int = 1
    reduce_once: bool = False
    keep_grads: bool = False
    scaler: Any = None
    schedule: Any = None

    def __call__(self, *batch: Any) -> Tensor:
        """One step, and its loss."""
        if self.keep_grads:
            self._zero()
        total = torch.zeros(())
        batches = batch[0] if self.accumulate > 1 else [batch]
        for i, each in enumerate(batches):
            if self.reduce_once and self.syncs:
                self.model.set_requires_gradient_sync(i == self.accumulate - 1)
            given = each if isinstance(each, list | tuple) else [each]
            loss = self.loss_fn(self.model, *given)
            loss = loss / self.accumulate if self.accumulate > 1 else loss
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            total = total + loss.detach()
        self._update()
        if not self.keep_grads:
            self._zero()
        return total

    def _update(self) -> None:
        if self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for each in self._optimizers():
            _ = self.scaler.step(each) if self.scaler else each.step()
        if self.scaler is not None:
            self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()

    def _zero(self) -> None:
        for each in self._optimizers():
            each.zero_grad()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]
