"""What is sent is made in one piece; all else is padded as ever."""

from __future__ import annotations

import re

import pytest
import torch
from kit.graphs import uncached
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from compiled_fsdp import fully_shard, planned

WIDTH = 1027  # of a row that Inductor pads


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, WIDTH)
        self.down = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin())


@pytest.mark.usefixtures("fake_world")
def test_a_bucket_is_no_copy_of_a_padded_one() -> None:
    model = fully_shard(Wide())
    call = torch.compile(model, fullgraph=True)
    with planned(reductions="reduce_scatter"), uncached():
        _, codes = run_and_get_code(lambda: call(torch.ones(4, 5)).sum().backward())
    made = re.findall(r"= empty_strided_cpu\((\(.*?\)), (\(.*?\))", codes[-1])
    row = sum(-(-len(p) // 2) * p.shape[1:].numel() for p in model.parameters())
    assert (f"(2, {row})", f"({row}, 1)") in made
    assert f"({2 * row}, )" not in {size for size, _ in made}
    assert (f"(4, {WIDTH})", "(1056, 1)") in made
