"""A world of one rank: nothing is communicated, and the same passes and invariants hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Model(nn.Module):
    """A unit of one parameter, one of two, and a root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = (
            nn.Embedding(5, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 5, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens)))).square().mean()


def losses(wrap: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    call = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(3):
        found.append(call(torch.tensor([[0, 1, 4]])))
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def sharded(model: Model) -> Model:
    fully_shard(model.embedding)
    fully_shard(model.layer)
    return fully_shard(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_same_losses_as_unsharded(compiled: bool) -> None:
    def wrap(model: Model) -> Any:
        made = sharded(model)
        return (
            torch.compile(made, backend="compiled_fsdp_eager", fullgraph=True) if compiled else made
        )

    assert torch.equal(torch.stack(losses(wrap)), torch.stack(losses(lambda model: model)))
