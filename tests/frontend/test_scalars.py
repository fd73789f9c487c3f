"""Numbers of a step in a training script's own logger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from compiled_fsdp import fully_shard, log_scalars
from compiled_fsdp.wire import runs

pytestmark = pytest.mark.usefixtures("fake_world", "_nothing_ran")


@pytest.fixture
def _nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of other tests are none of this one's."""
    torch._dynamo.reset()
    monkeypatch.setattr(runs, "_runs", {})


class Board:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.found.append((tag, scalar_value, global_step))


class Run:
    """As a run of W&B."""

    def log(self, data: dict[str, Any], step: int) -> None:
        self.found = data, step


def trained(**options: Any) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    fully_shard(model[0])
    fully_shard(model)
    call = torch.compile(model, backend="compiled_fsdp_eager", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        call(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, call


def test_tensorboard() -> None:
    _, call = trained()
    board = Board()
    values = log_scalars(board, call, 7)
    assert board.found == [(name, value, 7) for name, value in values.items()]
    assert values["fsdp/gathered_bytes"] == 4 * (20 + 8)  # in forward; backward needs none
    assert values["fsdp/reduced_bytes"] == 4 * (20 + 8)
    assert values["fsdp/units_not_in_a_graph"] == 0
    assert values["fsdp/step_seconds"] > 0
    assert values["fsdp/peak_bytes"] > 0
    assert "fsdp/exposed_share" not in values  # without costs or a profile nobody knows


def test_wandb_and_a_profile() -> None:
    model, call = trained()
    run = Run()
    with torch.profiler.profile(profile_memory=True) as profile:
        call(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    values = log_scalars(run, model, 3, profile=profile)
    assert run.found == (values, 3)
    assert 0 <= values["fsdp/exposed_share"] <= 1


def test_neither() -> None:
    _, call = trained()
    with pytest.raises(TypeError, match=r"log_scalars: list \[\] has neither add_scalar"):
        log_scalars([], call, 0)
