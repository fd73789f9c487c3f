"""What scripts call and do not define: functions and an operator."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts


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
