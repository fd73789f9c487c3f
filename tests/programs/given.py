"""What scripts call and do not define: functions, an operator,
and the loop that a whole step stands for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from collections.abc import Callable


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def disabled(x: Tensor) -> Tensor:
    return x * 0.5


def raise_error(grad: Tensor) -> Tensor:
    raise ValueError("as asked, in backward")


class Scaled(torch.autograd.Function):
    """Each column of x [rows, d] times what that column of a weight [d, d] adds up to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum(0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_weight = (grad * x).sum(0).to(weight.dtype).expand_as(weight)
        return grad * weight.sum(0).to(grad.dtype), of_weight


@torch.library.custom_op("programs::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    """The same as an operator that nobody looks into."""
    return x * weight.sum(0).to(x.dtype)


@scaled.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, grad: Scaled.backward(ctx, grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
save_products = functools.partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)


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
            loss = self.loss_fn(self.model, *each)
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
