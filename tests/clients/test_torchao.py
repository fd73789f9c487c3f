"""torchao's weights that are gathered in 8 or 4 bits, beside stock FSDP2: the library brings the
all-gathers (`fsdp_pre_all_gather`), and graphs trace them.

`make test-clients` installs torchao and runs this; otherwise these tests are skipped and say so.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from kit.oracle import Api, same
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

if TYPE_CHECKING:
    from kit.pool import Pool

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao: run `make test-clients`"
)

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NF4Linear(nn.Module):
    """A frozen 4-bit matrix, and a low-rank one beside it, as in QLoRA."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 2), requires_grad=False)
        self.a = nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.b(self.a(x))


def float8(model: Model) -> None:
    """Emulated: this processor has no matmul of float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model.layers, config=config)


def int8(model: Model) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model.layers, int8_mixed_precision_training())


def nf4(model: Model) -> None:
    for layer in model.layers:
        layer.up, layer.down = NF4Linear(layer.up), NF4Linear(layer.down)


CONVERT = {"float8": float8, "float8_precomputed": float8, "int8": int8, "nf4": nf4}


@pytest.mark.parametrize("kind", CONVERT)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_trained_as_stock(two: Pool, kind: str, dtype: torch.dtype | None) -> None:
    """Bit for bit; `fullgraph=True` is part of it."""
    two.run(same, train, kind, dtype)


def train(api: Api, kind: str, dtype: torch.dtype | None) -> Any:
    model = Model()
    CONVERT[kind](model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    api.units(model, *[f"layers.{i}" for i in range(3)], mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, foreach=False)
    call, found = api.compile(model), []
    for step in range(4):
        seed = 10 * step + torch.distributed.get_rank()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = call(x).float().square().mean()
        loss.backward()
        found.append((loss.detach(), [p.grad.full_tensor() for p in trained]))  # type: ignore[union-attr, operator]
        optimizer.step()
        optimizer.zero_grad()
        if kind == "float8_precomputed":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
    return found
