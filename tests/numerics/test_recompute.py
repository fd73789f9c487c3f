"""Activations that a memory budget has computed again in backward: the same numbers, bit for bit,
for fewer bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import compile_step, explain, fully_shard, planned
from compiled_fsdp.planning import consensus

if TYPE_CHECKING:
    from kit.pool import Pool

WIDTH, ROWS, LAYERS = 16, 64, 3


class Block(nn.Module):
    """kind: what is special about it.

    dropout: random numbers, once with their mask saved, once before a matmul.
    checkpointed: the user has all of it computed again.
    counted: it writes to a buffer that it computes with.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.kind == "counted":
            h = (h + self.scale).tanh()
            self.scale.mul_(1.5)
        h = nn.functional.gelu(self.up(self.dropout(h)))
        return x + self.dropout(self.down(h))


def model_of(kind: str) -> nn.Module:
    torch._dynamo.reset()
    consensus._settled.clear()  # by the structure of parameters, which all kinds share
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(LAYERS)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator)


# Ops whose results cannot be computed again.
NEVER: dict[str, set[str]] = {"plain": set(), "dropout": {"add"}, "counted": {"tanh"}}
PLANS: tuple[dict[str, Any], ...] = ({}, {"memory_budget": 0.0, "recompute": "budget"})


def choices_of(model: nn.Module) -> list[dict[str, Any]]:
    return [choice for graph in explain(model).graphs for choice in graph.choices]


def train(kind: str) -> list[str]:
    """Returns what was computed again."""
    seen, peaks = [], []
    for plan in PLANS:
        model = model_of(kind)
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        losses = []
        with planned(**plan):
            for step in range(2):
                torch.manual_seed(step)
                loss = call(batch()).square().mean()
                loss.backward()
                losses.append(loss.detach())
        seen.append([*losses, *(whole(p.grad) for p in model.parameters()), *model.buffers()])
        peaks.append(max(graph.peak for graph in explain(model).graphs))
    assert all(map(torch.equal, *seen)), kind
    again = [c["name"] for c in choices_of(model) if c["what"] == "save" and not c["is_kept"]]
    assert not again or peaks[1] < peaks[0], peaks
    return again


@pytest.mark.parametrize("kind", ["plain", "dropout", "counted"])
def test_same_numbers(two: Pool, kind: str) -> None:
    """Of dropout, the masks stay saved, and what a mask was put on; of what is made of a buffer
    that forward writes to, its first value.
    """
    for again in two.run(train, kind):
        ops = {name.rstrip("_0123456789") for name in again}
        assert "addmm" in ops, again
        ops -= {"getitem"}  # of a norm, which 2.15 leaves whole
        assert ops <= {"addmm", "add", "clone", "tanh"} - NEVER[kind], again


def test_a_users_checkpoints(two: Pool) -> None:
    """What is computed again for them is theirs; their inputs stay saved, or are made of others."""
    two.run(train, "checkpointed")


def take_steps() -> list[str]:
    seen = []
    for plan in PLANS:
        model = model_of("plain")
        optimizer = torch.optim.AdamW(model.parameters())
        step = compile_step(
            model, optimizer, lambda m, x: m(x).square().mean(), backend="compiled_fsdp_eager"
        )
        with planned(**plan):
            losses = [step(batch()).detach() for _ in range(2)]
        seen.append([*losses, *(whole(p.detach()) for p in model.parameters())])
    assert all(map(torch.equal, *seen))
    assert "__closure__" not in str(explain(model))  # where Dynamo has found the model
    return [c["name"] for c in choices_of(model) if c["what"] == "save" and not c["is_kept"]]


def test_whole_step(two: Pool) -> None:
    assert all(two.run(take_steps))


def shapes_differ() -> list[str]:
    """Ranks have batches of other sizes, and compute the same activations again."""
    model = model_of("plain")
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    with planned(memory_budget=0.3, recompute="budget"):
        call(batch()[: ROWS // (1 + dist.get_rank())]).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    return [c["name"] for c in choices_of(model) if c["what"] == "save" and not c["is_kept"]]


def test_ranks_decide_together(two: Pool) -> None:
    mine, theirs = two.run(shapes_differ)
    assert sorted(mine) == sorted(theirs)


def said() -> str:
    model = model_of("plain")
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    with planned(memory_budget=0.0, recompute="budget"):
        call(batch()).square().mean().backward()
        return str(explain(model))


def test_explain(two: Pool) -> None:
    text, _ = two.run(said)
    (line,) = (line for line in text.splitlines() if "activations computed again" in line)
    assert "costs" in line
    assert "*.up addmm" in line
    assert "parameters kept" in text  # the peak is where none would be dropped
    assert "Plan.recompute=" in text
