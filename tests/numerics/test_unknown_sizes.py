"""Layers whose sizes only data decides, compiled once by Inductor: the same numbers as in eager
mode, with any sizes, none among them.

Random programs: rows are split where data says so, what becomes of each part is random, and the
same in all layers.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.outline import outline
from kit.passes_harness import PLAN
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

from compiled_fsdp.ir.expected import note_expected
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_context
from compiled_fsdp.ir.subgraphs import INVOKE, called_by
from compiled_fsdp.torch_private.subgraphs import prepare_subgraphs
from compiled_fsdp.verification.meaning import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph

ROWS, WIDTH, DEPTH = 12, 16, 4  # a row is 128 bytes: parts begin where vectors may


class Outlined(CustomGraphPass):
    """`outline`, alone, on whatever Inductor compiles; what it makes is verified."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.unknown: set[Any] = set()  # symbols inside of what is called

    def __call__(self, graph: Graph) -> None:
        prepare_subgraphs()
        gm = graph.owning_module
        assert gm is not None
        note_expected(graph)
        before = Captured(graph)
        set_context(gm, Context(is_fused=True, inline=""))
        outline(gm, PLAN)
        set_context(gm, None)
        assert list(before.differences(gm.graph)) == []
        calls = find(gm.graph, INVOKE)
        self.num_calls += len(calls)
        for call in calls:
            values = [n.meta["val"] for n in called_by(call).find_nodes(op="placeholder")]  # type: ignore[union-attr]
            sizes = [s for v in values for s in (v.shape if isinstance(v, Tensor) else [v])]
            self.unknown.update(str(s) for s in sizes if isinstance(s, torch.SymInt))

    def uuid(self) -> str:
        return "outlined"


def ways(choose: random.Random) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """From rows [n, WIDTH] and a weight to as many rows."""
    k = choose.randint(2, 5)
    return [
        lambda a, w: a @ w,
        lambda a, w: a.sin() * k,
        lambda a, w: a - a.mean(-1, keepdim=True),
        lambda a, w: a.softmax(-1) + w[0],
        lambda a, w: a + a.sum(0) / ROWS,
        lambda a, w: a * torch.arange(a.shape[0])[:, None] / ROWS,
        lambda a, w: torch.cat([a, torch.zeros(a.shape[0], k, dtype=a.dtype)], 1)[:, k:],
        lambda a, w: a.repeat(2, 1)[a.shape[0] :],
        lambda a, w: a.T.contiguous().cos().T,
        lambda a, w: a.flip(0) / ROWS,
        lambda a, w: (a.reshape(-1) + 1).view(a.shape[0], 2, WIDTH // 2).flatten(1),
        lambda a, w: torch.where(a > 0, a, a.new_full((a.shape[0], 1), 0.5)),
    ]


def program(seed: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of rows [ROWS, WIDTH], of how many are in each part of each layer, and of weights
    [DEPTH, WIDTH, WIDTH].
    """
    choose = random.Random(seed)
    chosen = [[choose.choice(ways(choose)) for _ in range(choose.randint(5, 7))] for _ in range(2)]

    after = [choose.choice(ways(choose)) for _ in range(8)]

    def layer(x: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
        parts = []
        counts = counts + (0 * x.sum()).long()  # as a router, it looks at rows
        for part, steps in zip(x.split(counts[:2].tolist()), chosen, strict=True):
            for step in steps:
                part = step(part, weight)
            parts.append(part)
        rows = torch.cat(parts).tanh()
        torch._check(rows.shape[0] == ROWS)
        read = (0 * rows.sum()).long().item()  # on the host: what follows is another span
        for step in after:
            rows = step(rows, weight)
        places = torch.arange(ROWS).flip(0)
        return x + torch.zeros_like(x).index_add(0, places, rows) + read

    def compute(x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = layer(x, counts[i], weights[i])
        return x

    return compute


@pytest.mark.parametrize("seed", [1, 5])
def test_random_programs(seed: int) -> None:
    """Forward and backward, without a second compilation."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    passes, compute = Outlined(), program(seed)
    with (
        inductor_config.patch(post_grad_custom_post_pass=passes, fx_graph_cache=False),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        call = torch.compile(compute, fullgraph=True)
        for sizes in ([5, 3, 7, 1], [0, 12, 6, 2], [12, 12, 12, 12], [4, 4, 4, 0]):
            # programs may be ill-conditioned
            x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
            weights = torch.randn(DEPTH, WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5
            weights.requires_grad_()
            counts = torch.tensor([[n, ROWS - n] + [0] * 6 for n in sizes])  # 64 bytes
            found, expected = (
                (y, *torch.autograd.grad(y.sum(), (x, weights)))
                for y in (each(x, counts, weights) for each in (call, compute))
            )
            for value, other in zip(found, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=1e-7, atol=1e-7)
            with torch.compiler.set_stance("fail_on_recompile"):
                call(x, counts, weights)
    assert passes.num_calls >= 3
    assert passes.unknown
