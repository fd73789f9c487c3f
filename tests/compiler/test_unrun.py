"""What is captured and not run is what Inductor would get: the same decompositions, and what its
own passes fuse has no memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.graphs import captured, uncached
from kit.harness import SLOW
from torch import nn

from compiled_fsdp import fully_shard
from compiled_fsdp.compiler import inductor, unrun
from compiled_fsdp.planning.memory import profile_step

VOCAB, WIDTH, TOKENS = 2048, 16, 64


class Model(nn.Module):
    """Its logits are most of the memory: 0.5 MB each time that somebody makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens).tanh()), tokens)


def peak_of(where: Any) -> int:
    """The peak that is predicted of the two graphs that a step compiles."""
    torch._dynamo.reset()
    model = Model()
    for module in (model.embedding, model.head, model):
        fully_shard(module)
    call = torch.compile(model, fullgraph=True)
    with captured(where) as graphs:
        call(torch.zeros(TOKENS, dtype=torch.int64)).backward()
    forward, backward = graphs
    return profile_step(forward, backward, is_fused=True).peak


@pytest.mark.timeout(SLOW)
@pytest.mark.usefixtures("fake_world")
def test_the_peak_is_that_of_what_inductor_compiles() -> None:
    with unrun.unrun():
        ours = peak_of(unrun)
    with uncached():
        inductors = peak_of(inductor)
    assert abs(ours / inductors - 1) < 0.01, (ours, inductors)
    assert inductors < 3 * 4 * VOCAB * TOKENS, "no more than two tensors of logits"
