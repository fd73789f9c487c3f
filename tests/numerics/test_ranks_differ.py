"""Ranks may differ in what they compute, not in what they communicate: a modality, a batch or a
branch that only one of them has.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

DIM, STEPS = 8, 4
# Images of this rank in a step; None: it does not call that part of the model.
Images = int | None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Text, images in front of it, and a branch without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.head = Block(), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor, image: Tensor | None = None, is_odd: bool = False) -> Tensor:
        if image is not None:
            x = torch.cat([self.vision(image), x])
        if is_odd:
            x = x + torch.tanh(x @ x.T @ x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def inputs(kind: str, step: int, rank: int) -> tuple[Any, ...]:
    torch.manual_seed(10 * step + rank)
    rows = 4
    if kind in ("rows", "dynamic rows"):
        rows += step if rank == 0 else 0
    if kind == "other rows":
        rows += 3 * rank
    images: Images = {"no images": 3 * (1 - rank), "unused": None if rank else 3}.get(kind)
    x = torch.randn(rows, DIM)
    return x, None if images is None else torch.randn(images, DIM), kind == "branch" and rank == 0


KINDS = ("branch", "rows", "dynamic rows", "other rows", "no images")


def train(kind: str, backend: str) -> int:
    """Beside one process that has both ranks' inputs; graphs of this rank.

    unused: the images' part belongs to the root's unit, and only rank 0 reads it.
    """
    torch.manual_seed(0)
    reference = Model()
    model: Any = copy.deepcopy(reference)
    for part in [*([] if kind == "unused" else [model.vision]), *model.blocks]:
        fully_shard(part)
    fully_shard(model)
    if kind == "unused":
        model.set_reduce_scatter_unused_params(True)
    call = torch.compile(model, backend=backend, fullgraph=kind != "unused")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    counters.clear()
    for step in range(STEPS):
        mine = inputs(kind, step, dist.get_rank())
        if kind == "dynamic rows" and dist.get_rank() == 0:
            torch._dynamo.mark_dynamic(mine[0], 0)
        loss = call(*mine)
        loss.backward()
        wanted = [reference(*inputs(kind, step, rank)) for rank in range(2)]
        (sum(wanted) / 2).backward()
        assert torch.equal(loss, wanted[dist.get_rank()]), (kind, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counters["stats"]["unique_graphs"]


def every(backend: str) -> dict[str, int]:
    found = {}
    for kind in KINDS:
        torch._dynamo.reset()
        found[kind] = train(kind, backend)
    return found


def test_in_what_they_compute(two: Pool) -> None:
    """Exact: the mean of two gradients is the same sum.
    Rank 0 compiles once more for other rows.
    """
    once = dict.fromkeys(KINDS, 1)
    assert two.run(every, "compiled_fsdp_eager") == [{**once, "rows": 2}, once]


def test_unused_parameters_take_part(two: Pool) -> None:
    """In eager mode, which the option asks for: once a backward, and in the same order."""
    two.run(train, "unused", "compiled_fsdp_eager")
