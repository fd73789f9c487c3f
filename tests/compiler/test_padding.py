"""Inductor looks for what may be padded on a device: at results that a user sees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiled_fsdp import fully_shard, overlap_optimizer


@pytest.mark.usefixtures("fake_world")
def test_results_that_are_gone() -> None:
    """Gradients that are left under way are none of a backward's results; see
    `kit.pool.lower_as_for_a_device`.
    """
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for unit in (*model, model):
        fully_shard(unit)
    overlap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.compile(model, fullgraph=True)(torch.ones(2, 4)).sum().backward()
