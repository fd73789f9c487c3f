"""Inductor makes as few kernels of a layer's region as of the layer in a graph of its own: what
orders the copies around communication holds back nothing else.

Kernels are counted in generated code; numbers are in `test_regions.py`.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from compiled_fsdp import fully_shard

WIDTH, HIDDEN, DEPTH = 64, 128, 5


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class Layer(nn.Module):
    """SwiGLU behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def kernels(code: str) -> dict[str, list[str]]:
    """The kernels that each region calls, by what they were made of."""
    found: dict[str, list[str]] = {}
    inside: list[str] = []
    for line in code.splitlines():
        if begin := re.match(r"def (fsdp_region_\d+)\(", line):
            inside = found.setdefault(begin[1], [])
        elif re.match(r"\S", line):
            inside = []
        elif call := re.match(r"\s+cpp_fused_(\w+)\(", line):
            inside.append(call[1])
    return found


@pytest.mark.usefixtures("fake_world")
def test_layers_of_a_backward() -> None:
    """Both gradients of `silu(gate) * up` come of one kernel, though a product stands between the
    uses of the one and the other.
    """
    model = nn.Sequential(*(Layer() for _ in range(DEPTH)), nn.Linear(WIDTH, WIDTH)).bfloat16()
    for layer in model[:-1]:
        fully_shard(layer)
    call = torch.compile(fully_shard(model))

    def train() -> None:
        call(torch.rand(2, 8, WIDTH, dtype=torch.bfloat16)).float().sum().backward()

    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        _, (_, backward) = run_and_get_code(train)
    (names,) = kernels(backward).values()
    of_silu = [name for name in names if "silu" in name]
    assert len(of_silu) == 1, names
    assert "silu_backward" in of_silu[0]
