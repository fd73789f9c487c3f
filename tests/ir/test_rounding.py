"""Casts that autograd makes in a backward, and those that it only differentiates, in joint graphs
as AOTAutograd traces them, with and without Inductor's decompositions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from compiled_fsdp.ir.meta import of_autograd
from compiled_fsdp.ir.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

LOW = torch.bfloat16


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * w.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, (grad * x).sum(0)


class RoundedScale(Scale):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, (grad * x).sum(0).to(LOW)


def written(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.zeros(2, 8)
    rows[0] = w
    return x * rows[0]


def beside(x: Tensor, w: Tensor) -> Tensor:
    """Casts of what needs no gradient have the number of the op before them."""
    y = x * w
    return y + x.to(LOW).float()


@torch.library.custom_op("compiled_fsdp_tests::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w.float()


@scale.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def of_scale(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    (x,) = ctx.saved_tensors
    return None, (grad * x).sum(0).to(LOW)


scale.register_autograd(
    of_scale, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0])
)

# Of activations [4, 8] in fp32 and a weight [8] in bf16: how many casts autograd makes of the
# gradient of the weight itself.
KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "promoted": (lambda x, w: x * w, 1),
    "added": (lambda x, w: x + w, 1),
    "twice": (lambda x, w: x * w + torch.sin(x) * w, 2),
    "beside a cast": (beside, 1),
    "sum": (lambda x, w: x * w.sum(dtype=torch.float32), 1),
    "function": (Scale.apply, 1),
    "in place": (lambda x, w: x.clone().mul_(w), 1),
    "with what is made of it": (lambda x, w: torch.where(x > 0, w, w + 1) * x, 0),
    "joined with what is made of it": (lambda x, w: torch.cat([x[0], w + 1, w]), 1),
    "cast": (lambda x, w: x * w.float(), 0),
    "one more": (lambda x, w: x * (1 + w), 0),
    "handed on": (lambda x, w: x * w.clone() + x * w.view(8), 0),
    "function of another": (lambda x, w: Scale.apply(x, w.clone()), 0),
    "custom op": (scale, 0),
    "cumsum": (lambda x, w: x * torch.cumsum(w[:1], 0, dtype=torch.float32), 0),
    "rounding function": (RoundedScale.apply, 0),
    "written": (written, 0),
    "norm": (lambda x, w: F.layer_norm(x.to(LOW), (8,), w), 0),
    "softmax": (lambda x, w: x * torch.softmax(w, 0, dtype=torch.float32), 0),
    "all low": (lambda x, w: x.to(LOW) * w, 0),
}


@pytest.mark.parametrize("decomposes", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_of_autograd(name: str, decomposes: bool) -> None:
    function, expected = KINDS[name]
    found = []

    def partition(joint: GraphModule, inputs: Any, **_: Any) -> Any:
        rounding, nodes = Rounding(joint.graph), list(joint.graph.nodes)
        taker = next(n for n in nodes if (of_autograd(n)[2] or [("",)])[-1][0] == "sin")
        found.append([n for n in nodes if rounding.is_rounded(n, taker)])
        raise RuntimeError("seen")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        """The sine stands for a read: what differentiates it takes the gradient."""
        result: Tensor = function(x, torch.sin(w)).sum()
        return result

    table: Any = select_decomp_table() if decomposes else None
    backend = aot_autograd(
        fw_compiler=lambda gm, _: gm, partition_fn=partition, decompositions=table
    )
    torch._dynamo.reset()
    with pytest.raises(Exception, match="seen"):
        torch.compile(loss, backend=backend)(
            torch.randn(4, 8), torch.randn(8, dtype=LOW, requires_grad=True)
        )
    assert len(found[0]) == expected, found[0]
