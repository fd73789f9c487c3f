"""Torch's pipeline schedules driving our units: two stages of two data-parallel ranks each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.oracle import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

NUM_MICRO = 4
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_as_stock_and_unsharded(four: Pool, schedule: str) -> None:
    four.run(compare, schedule)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class Counted:
    """A backend, with the number of graphs that Dynamo gave it."""

    def __init__(self) -> None:
        self.count = self.in_schedule = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.count += 1
        return torch._dynamo.lookup_backend("compiled_fsdp_eager")(gm, inputs)


def run(
    schedule: str,
    shard: Any,
    backend: Counted | None = None,
    steps: int = 2,
    *,
    is_alone: bool = False,
) -> dict[str, torch.Tensor]:
    """Gradients of this rank's stage after the last step, whole. is_alone: and after a step of the
    stage without a schedule.
    """
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    torch.manual_seed(0)
    stages = [Stage(), Stage()]
    index = mesh.get_local_rank("pp")
    stage_module: Any = stages[index]
    if shard is not None:
        for layer in stage_module.layers:
            shard(layer, mesh=mesh["dp"])
        shard(stage_module, mesh=mesh["dp"])
    if backend is not None:
        stage_module.compile(backend=backend)
    stage = PipelineStage(stage_module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    runner = SCHEDULES[schedule](
        stage, NUM_MICRO, loss_fn=lambda out, target: (out - target).square().mean()
    )
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    for _ in range(steps):
        x, target = (torch.randn(8, 6, generator=generator) for _ in range(2))
        stage_module.zero_grad()
        if index == 0:
            runner.step(x)
        else:
            runner.step(target=target)
    found = grads_of(stage_module, mesh["dp"])
    if backend is not None:
        backend.in_schedule = backend.count
    if is_alone:
        stage_module.zero_grad()
        stage_module(torch.randn(4, 6, generator=generator)).square().mean().backward()
        found |= {f"{n}, alone": grad for n, grad in grads_of(stage_module, mesh["dp"]).items()}
    return found


def grads_of(stage: nn.Module, mesh: Any) -> dict[str, torch.Tensor]:
    """Whole, and means over the data-parallel ranks."""
    found = {}
    for name, p in stage.named_parameters():
        if isinstance(p.grad, DTensor):
            found[name] = p.grad.full_tensor()
        else:
            found[name] = p.grad.clone()
            dist.all_reduce(found[name], group=mesh.get_group())
            found[name] /= 2
    return found


def compare(schedule: str) -> None:
    ours, stock, unsharded = (
        run(schedule, shard) for shard in (fully_shard, stock_fully_shard, None)
    )
    for name, grad in ours.items():
        assert torch.equal(grad, stock[name]), (
            f"{name}: {(grad - stock[name]).abs().max().item():.1e} from stock"
        )
        assert torch.allclose(grad, unsharded[name], atol=1e-6), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_stages(four: Pool, schedule: str) -> None:
    four.run(compare_compiled, schedule)


def compare_compiled(schedule: str) -> None:
    """One graph of the first microbatches, whose reductions nobody called off yet, and one that
    keeps gradients for the end of the step: from the second step on that alone, so that a step
    reduces once, as stock does. On torch 2.11 a schedule learns shapes under no_grad, which is a
    graph more, of unsharded stages too.

    A step between those of a schedule meets a graph that was made for the schedule; gradients that
    it keeps are reduced at the end of a backward that is to reduce.
    """
    backend = Counted()
    ours, eager = (
        run(schedule, fully_shard, entry, steps=3, is_alone=True) for entry in (backend, None)
    )
    unsharded = Counted()
    run(schedule, None, unsharded)
    assert backend.in_schedule == unsharded.count + 1, (backend.in_schedule, unsharded.count)
    for name, grad in ours.items():
        assert torch.equal(grad, eager[name]), (
            f"{name}: {(grad - eager[name]).abs().max().item():.1e} from eager"
        )
