"""A large head, at which a step holds the most: less is held, and the numbers are the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from kit.compare import whole
from kit.harness import SLOW
from measure import peak_tensor_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compiled_fsdp import compile_step, fully_shard, pipeline

WIDTH, VOCAB, TOKENS = 128, 2048, 32
LOGITS = TOKENS * VOCAB * 4


class Model(nn.Module):
    """Layers, and a head over a vocabulary; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return cross_entropy(self.head(self.norm(x)), labels)


def train(way: str, backend: str) -> tuple[list[Tensor], int]:
    """Losses and parameters of three steps; the most bytes of the last one, above those at rest."""
    model = Model()
    for unit in (*model.layers, [model.norm, model.head], model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(TOKENS, WIDTH), torch.randint(VOCAB, (TOKENS,))
    losses = []

    if way in ("whole", "batches"):
        count = 2 if way == "batches" else 1
        update = compile_step(
            model, optimizer, lambda m, *args: m(*args), backend=backend, accumulate=count
        )

        def step(*batch: Tensor) -> Tensor:
            return update([batch] * count) if count > 1 else update(*batch)
    else:
        call = model if way == "eager" else torch.compile(model, backend=backend, fullgraph=True)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = call(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    losses.append(step(*batch))
    memory = peak_tensor_bytes(lambda: losses.append(step(*batch)))
    return [*losses, *(whole(p).detach() for p in model.parameters())], memory.above_rest


def beside(way: str, backend: str) -> tuple[bool, int, int]:
    """Whether numbers are the same, bit for bit; the peak with the pass, and without."""
    flat, lower = train(way, backend)
    torch._dynamo.reset()
    with pipeline(without="flatten_peak"):
        usual, higher = train(way, backend)
    is_same = all(torch.equal(a, b) for a, b in zip(flat, usual, strict=True))
    if backend == "compiled_fsdp_eager":
        eager, _ = train("eager", backend)
        is_same = is_same and all(torch.equal(a, b) for a, b in zip(flat, eager, strict=True))
    return is_same, lower, higher


@pytest.mark.parametrize(
    ("way", "backend", "is_lower"),
    [
        ("halves", "compiled_fsdp", True),
        ("whole", "compiled_fsdp", True),
        ("whole", "compiled_fsdp_eager", True),
        ("batches", "compiled_fsdp_eager", True),
        # Saved is what norm made, not what it is made of: the head is gathered behind the gradient
        # of its weight, which hides that.
        ("halves", "compiled_fsdp_eager", False),
    ],
)
def test_a_large_head(two, way, backend, is_lower):
    """The gradient of the logits and the gathered weight are gone before the weight's gradient is
    copied into its bucket.
    """
    for is_same, lower, higher in two.run(beside, way, backend, timeout=SLOW):
        assert is_same
        assert (higher - lower > LOGITS / 2) == is_lower, (lower, higher)
