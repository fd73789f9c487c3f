"""Small models, each with what makes sharding hard: ties, odd sizes, frozen and unused parameters,
units called twice.

A `Recipe` says how to build one, which modules are the units (in the order of the `fully_shard`
calls; a list is one unit of several modules), and what a batch is. `forward` returns the loss, or
an output that `loss_of` squares.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from gpt import GPT, SIZES, RMSNorm, rotary_table, rotate
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Recipe:
    build: Callable[[], nn.Module]
    units: Callable[[Any], list[Any]]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]


def loss_of(output: Tensor) -> Tensor:
    return output if output.dim() == 0 else output.float().square().mean()


def _tokens(generator: torch.Generator, vocabulary: int = 64) -> tuple[Tensor, ...]:
    tokens = torch.randint(0, vocabulary, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _rows(width: int, count: int = 6) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randn(count, width, generator=generator),)


class Block(nn.Module):
    """A residual layer of two matmuls."""

    def __init__(self, width: int = 6, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Blocks between two layers; `around` says how a block is called (activation checkpointing of
    one kind or another), `middle` what the second one is.
    """

    def __init__(
        self,
        around: Callable[[nn.Module, Tensor], Tensor] | None = None,
        middle: Callable[[], nn.Module] = Block,
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(middle() if i == 1 else Block() for i in range(num_blocks))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = self.around(layer, x) if self.around else layer(x)
        return self.head(x)


class LlamaBlock(nn.Module):
    """Grouped-query attention (2 heads of query, 1 of key and value) and SwiGLU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.query, self.key = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, width // 2, bias=False),
        )
        self.value, self.out = (
            nn.Linear(width, width // 2, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gate, self.up = nn.Linear(width, 44, bias=False), nn.Linear(width, 44, bias=False)
        self.down = nn.Linear(44, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        query = rotate(self.query(h).view(batch, length, 2, -1).transpose(1, 2), table)
        key = rotate(self.key(h).view(batch, length, 1, -1).transpose(1, 2), table).expand(
            -1, 2, -1, -1
        )
        value = self.value(h).view(batch, length, 1, -1).transpose(1, 2).expand(-1, 2, -1, -1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A block and a head that shares the embedding's weight."""

    def __init__(self, width: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([LlamaBlock(width)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.register_buffer("table", rotary_table(32, width // 2), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Tied(nn.Module):
    """An embedding and a head that share a weight of odd rows, and a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.embedding(tokens)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class MoE(nn.Module):
    """Every expert computes every row; the router weighs. Three experts: not divisible by two or
    four ranks.
    """

    def __init__(self, width: int = 12, hidden: int = 10, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        top = weights.topk(2, dim=-1)
        kept = torch.zeros_like(weights).scatter(-1, top.indices, top.values)
        experts = torch.einsum("bd,edh->ebh", x, self.up)
        y = torch.einsum("ebh,ehd->ebd", F.silu(experts), self.down)
        return x + torch.einsum("ebd,be->bd", y, kept)


class ConvNet(nn.Module):
    """Convolutions and BatchNorm, whose running statistics are buffers that forward changes; each
    rank has its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.stage2 = nn.Sequential(nn.Conv2d(5, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.stage1(x)).mean((2, 3)))


class OddMLP(nn.Module):
    """Rows 7, perhaps 5, 3 and 1: uneven shards, fewer rows than ranks,
    empty shards, with biases.
    """

    def __init__(self, *, is_deep: bool = False) -> None:
        super().__init__()
        rows = (6, 7, 5, 3) if is_deep else (6, 7, 3)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(rows))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def frozen(*, is_deep: bool = False) -> nn.Module:
    """The first layer is frozen whole, in the second only the bias, in the root's unit only the
    weight.
    """
    model = OddMLP(is_deep=is_deep)
    model.layers[0].requires_grad_(False)
    model.layers[1].bias.requires_grad_(False)
    model.last.weight.requires_grad_(False)
    return model


class Unused(OddMLP):
    """A parameter inside a unit that nothing reads, and a unit that nothing calls."""

    def __init__(self, *, is_deep: bool = False) -> None:
        super().__init__(is_deep=is_deep)
        self.layers[1].spare = nn.Parameter(torch.ones(3, 2))
        self.idle = nn.Linear(4, 4)


class ReadTwice(nn.Module):
    """One weight read three times in a forward: the gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x), self.weight)
        return F.linear(torch.tanh(x) @ self.weight, self.weight)


class CalledTwice(nn.Module):
    """One unit called twice in a forward (a recurrent step, say)."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self.step(x)))


class TwoDtypes(nn.Module):
    """A unit whose parameters are of bf16, between others of fp32, which come in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 33)
        self.low = nn.Linear(33, 33).bfloat16()
        self.middle, self.last = nn.Linear(33, 33), nn.Linear(33, 3)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(torch.tanh(self.first(x)).bfloat16())
        return self.last(torch.tanh(self.middle(low.float())))


class Branches(nn.Module):
    """Parallel branches: the gradients of both biases are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(torch.tanh(x))


class Halves(nn.Module):
    """Floating, integer and non-tensor inputs, inputs and outputs in containers, a keyword
    argument, and a buffer.
    """

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.register_buffer("scale", torch.full((5,), 1.1))

        def forward(self, pair: dict[str, Any], *, factor: float) -> dict[str, Any]:
            x = self.linear(pair["x"]) * self.scale.to(pair["x"].dtype)
            return {"x": torch.tanh(x) * factor, "count": pair["count"] + 1}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Halves.Inner() for _ in range(2))
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        pair = {"x": x, "count": torch.zeros((), dtype=torch.int64)}
        for module in self.inner:
            pair = module(pair, factor=0.5)
        return self.last(pair["x"]) * pair["count"]


RECIPES: dict[str, Recipe] = {
    "gpt": Recipe(lambda: GPT(SIZES["tiny"]), lambda m: [*m.layers, [m.norm, m.head], m], _tokens),
    "gpt_of_one_layer": Recipe(
        lambda: GPT(replace(SIZES["tiny"], num_layers=1)),
        lambda m: [*m.layers, [m.norm, m.head], m],
        _tokens,
    ),
    "llama": Recipe(Llama, lambda m: [*m.layers, m], _tokens),
    "llama_tied_unit": Recipe(
        Llama, lambda m: [*m.layers, [m.embedding, m.norm, m.head], m], _tokens
    ),
    "tied": Recipe(
        Tied, lambda m: [m.layer, [m.embedding, m.head], m], partial(_tokens, vocabulary=11)
    ),
    "moe": Recipe(
        lambda: nn.Sequential(MoE(), nn.Linear(12, 12), MoE()), lambda m: [m[0], m[2], m], _rows(12)
    ),
    "conv": Recipe(
        ConvNet,
        lambda m: [m.stage1, m.stage2, m],
        lambda g: (torch.randn(4, 3, 8, 8, generator=g),),
    ),
    "odd": Recipe(OddMLP, lambda m: [*m.layers, m], _rows(6)),
    "deep": Recipe(lambda: OddMLP(is_deep=True), lambda m: [*m.layers, m], _rows(6)),
    "deep frozen": Recipe(lambda: frozen(is_deep=True), lambda m: [*m.layers, m], _rows(6)),
    "deep unused": Recipe(lambda: Unused(is_deep=True), lambda m: [*m.layers, m.idle, m], _rows(6)),
    "one_unit": Recipe(OddMLP, lambda m: [m], _rows(6)),
    "frozen": Recipe(frozen, lambda m: [*m.layers, m], _rows(6)),
    "unused": Recipe(Unused, lambda m: [*m.layers, m.idle, m], _rows(6)),
    "read_twice": Recipe(ReadTwice, lambda m: [m.first, m], _rows(6)),
    "called_twice": Recipe(CalledTwice, lambda m: [m.step, m], _rows(5)),
    "two_dtypes": Recipe(TwoDtypes, lambda m: [m.low, m], _rows(6)),
    "branches": Recipe(Branches, lambda m: [m.left, m.right, m], _rows(6)),
    "equal_units": Recipe(
        lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), lambda m: [*m], _rows(64)
    ),
    "list_units": Recipe(
        lambda: OddMLP(is_deep=True),
        lambda m: [[m.layers[0], m.layers[1]], [m.layers[2], m.last], m],
        _rows(6),
    ),
    "halves": Recipe(Halves, lambda m: [*m.inner, m], _rows(5)),
}
