"""A head read in chunks, and packed sequences of other lengths in each step: neither costs more
gathers or graphs than it has to.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import fully_shard, pipeline
from compiled_fsdp.ir.graph import phase_of
from compiled_fsdp.ir.regions import find_regions

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch.fx import GraphModule

    from compiled_fsdp import Plan

DIM, VOCAB, CHUNKS = 8, 12, 4


class Chunked(nn.Module):
    """The loss of a chunk of the rows at a time; logits are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        total = x.new_zeros(())
        for rows, wanted in zip(self.body(x).chunk(CHUNKS), targets.chunk(CHUNKS), strict=True):
            total = total + checkpoint(self.loss, rows, wanted, use_reentrant=False)
        return total / CHUNKS

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(rows), targets)


def sharded(model: Any, *parts: str) -> Any:
    for part in parts:
        fully_shard(getattr(model, part))
    return fully_shard(model)


def gathers_of_a_chunked_head() -> dict[str, int]:
    """How often each graph gathers the head; losses and gradients as without sharding."""
    reference = Chunked()
    model = sharded(copy.deepcopy(reference), "body", "head")
    found: dict[str, int] = {}

    def look(gm: GraphModule, _: Plan) -> None:
        regions = find_regions(gm.graph, "gather")
        found[phase_of(gm.graph)] = sum(
            spec.fqn == "head.weight" for region in regions for spec in region.tag.specs
        )

    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    batches = [(torch.randn(16, DIM), torch.randint(VOCAB, (16,))) for _ in range(2)]
    with pipeline(look, after="free"):
        loss = call(*batches[dist.get_rank()])
        loss.backward()
    losses = [reference(*each) for each in batches]
    (sum(losses) / 2).backward()
    assert torch.equal(loss, losses[dist.get_rank()])
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, 1e-6, 1e-7)  # chunks are added in turn
    return found


def test_a_head_read_in_chunks_is_gathered_once_each_way(two: Pool) -> None:
    assert two.run(gathers_of_a_chunked_head) == [{"forward": 1, "backward": 1}] * 2


def weights(q: Tensor, k: Tensor, ends: Tensor) -> Tensor:
    """Of attention within each sequence."""
    number = torch.bucketize(torch.arange(len(q)), ends, right=True)
    scores = (q @ k.T / DIM**0.5).masked_fill(number[:, None] != number, -torch.inf)
    return scores.softmax(-1)


@torch.library.custom_op("tests_lengths::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """As kernels for sequences of varying length, which no compiler sees into."""
    return weights(q, k, ends) @ v


@torch.library.custom_op("tests_lengths::attend_back", mutates_args=())
def attend_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    share = weights(q, k, ends)
    of_share = grad @ v.T
    of_scores = share * (of_share - (of_share * share).sum(-1, keepdim=True)) / DIM**0.5
    return of_scores @ k, of_scores.T @ q, share.T @ grad


attend.register_fake(lambda q, k, v, ends: torch.empty_like(q))
attend_back.register_fake(lambda grad, *given: tuple(torch.empty_like(x) for x in given[:3]))
attend.register_autograd(
    lambda ctx, grad: (*attend_back(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Packed(nn.Module):
    """Attention among the rows of the same sequence, of several that are packed one after another.

    kind: by a mask, by FlexAttention's mask, or by an op that is told where sequences end.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, x: Tensor, number: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.query(x).chunk(3, dim=-1)
        if self.kind == "op":
            found = attend(q, k, v, ends)
        elif self.kind == "flex":
            rows = len(x)
            mask = create_block_mask(
                lambda b, h, i, j: number[i] == number[j], None, None, rows, rows, device="cpu"
            )
            found = flex_attention(q[None, None], k[None, None], v[None, None], block_mask=mask)
            found = found[0, 0]
        else:
            is_same = number[:, None] == number[None, :]
            found = F.scaled_dot_product_attention(q[None], k[None], v[None], is_same[None])[0]
        return self.out(found).square().mean()


LENGTHS = ((3, 5), (4, 4, 4), (7,), (1, 2, 3, 4), (6, 6))  # packed in each step


def packed(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = LENGTHS[(step + rank) % len(LENGTHS)]
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (
        torch.randn(len(number), DIM, generator=generator),
        number,
        torch.tensor(lengths).cumsum(0),
    )


def graphs_of_packed_sequences(kind: str) -> tuple[int, int]:
    """Sharded and unsharded; with the same losses. FlexAttention has no backward on CPUs."""
    reference = Packed(kind)
    model = sharded(copy.deepcopy(reference), "query", "out")
    found, losses = [], []
    for each, backend in ((model, "compiled_fsdp_eager"), (copy.deepcopy(reference), "aot_eager")):
        counters.clear()
        call = torch.compile(each, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.0)
        for step in range(len(LENGTHS)):
            with torch.set_grad_enabled(kind != "flex"):
                loss = call(*packed(step, dist.get_rank()))
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        found.append(counters["stats"]["unique_graphs"])
    assert all(map(torch.equal, losses[: len(LENGTHS)], losses[len(LENGTHS) :]))
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["mask", "flex", "op"])
def test_packed_sequences_make_no_more_graphs_than_unsharded(two: Pool, kind: str) -> None:
    for ours, unsharded in two.run(graphs_of_packed_sequences, kind):
        assert ours == unsharded <= 3


def losses_with_parameters_that_stay(kind: str) -> list[Tensor]:
    """Of batches of other lengths, the first as long as a parameter."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False))
    if kind != "unsharded":
        for part in (model[0], model):
            fully_shard(part, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
    call = model
    if kind == "compiled":
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for rows in (DIM, 5, 3):
        loss = call(torch.ones(rows, DIM, requires_grad=True)).square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare_with_parameters_that_stay() -> None:
    expected, *others = map(losses_with_parameters_that_stay, ("unsharded", "eager", "compiled"))
    for found in others:
        assert all(map(torch.equal, found, expected))


def test_parameters_that_stay_have_known_sizes(two: Pool) -> None:
    """In a graph they are inputs, which `dynamic=True` takes for inputs of any size."""
    two.run(compare_with_parameters_that_stay)
