"""A world of one rank: nothing is communicated, and the same passes and invariants hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.harness import compiled as compile_whole
from kit.harness import train
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


def losses(wrap: Any) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    call = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return train(call, optimizer, [(torch.tensor([[0, 1, 4]]),)] * 3)


def sharded(model: Model) -> Model:
    fully_shard(model.embedding)
    fully_shard(model.layer)
    return fully_shard(model)


@pytest.mark.parametrize("compiled", [False, True])
def test_same_losses_as_unsharded(compiled: bool) -> None:
    def wrap(model: Model) -> Any:
        made = sharded(model)
        return compile_whole(made) if compiled else made

    assert losses(wrap) == losses(lambda model: model)
