"""Torch's pipeline schedules driving our units: two stages of two data-parallel ranks each."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from compat.oracle import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from pool import Pool

NUM_MICRO = 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_as_stock_and_unsharded(four: Pool, schedule: str) -> None:
    four.run(compare, schedule)


def run(schedule: str, shard: Any) -> dict[str, torch.Tensor]:
    """Gradients of this rank's stage after one step, whole."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    index = mesh.get_local_rank("pp")
    stage_module: Any = copy.deepcopy(whole[2 * index : 2 * index + 2])
    if shard is not None:
        for layer in stage_module:
            shard(layer, mesh=mesh["dp"])
        shard(stage_module, mesh=mesh["dp"])
    stage = PipelineStage(stage_module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    runner = SCHEDULES[schedule](stage, NUM_MICRO, loss_fn=lambda out, target: (out - target).square().mean())
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    for _ in range(2):
        x, target = (torch.randn(8, 6, generator=generator) for _ in range(2))
        stage_module.zero_grad()
        if index == 0:
            runner.step(x)
        else:
            runner.step(target=target)
    found = {}
    for name, p in stage_module.named_parameters():
        grad = p.grad.full_tensor() if shard is not None else p.grad.clone()
        if shard is None:
            dist.all_reduce(grad, group=mesh.get_group("dp"))
            grad /= 2
        found[name] = grad
    return found


def compare(schedule: str) -> None:
    ours, stock, unsharded = (run(schedule, shard) for shard in (fully_shard, stock_fully_shard, None))
    for name, grad in ours.items():
        assert torch.equal(grad, stock[name]), f"{name}: {(grad - stock[name]).abs().max().item():.1e} from stock"
        assert torch.allclose(grad, unsharded[name], atol=1e-6), name
