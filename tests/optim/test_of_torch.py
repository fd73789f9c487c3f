"""Every optimizer of torch.optim in an ordinary loop: as stock has it, and as unsharded."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn, optim

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

KINDS = [
    kind
    for kind in vars(optim).values()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
WAYS = ("", "foreach", "fused")
# Torch's adds partial sums of matrix products, in bfloat16.
CLOSE = {optim.Muon: 1e-2}


def train(kind: Any, way: str, shard: Any) -> list[float] | str:
    """Losses, of data that all ranks see; or the kind of error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    if shard is not None:
        shard(model[0])
        shard(model)
    optimizer = kind(model.parameters(), lr=1e-2, **({way: True} if way else {}))
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        try:
            losses.append(optimizer.step(closure).item())
        except (RuntimeError, NotImplementedError) as error:
            return type(error).__name__
    return losses


def compare_optimizers() -> dict[str, str]:
    """Returns which cannot step sharded parameters, and the error."""
    cannot = {}
    for kind in KINDS:
        for way in (w for w in WAYS if not w or w in inspect.signature(kind).parameters):
            ours, unsharded = train(kind, way, fully_shard), train(kind, way, None)
            assert ours == train(kind, way, stock.fully_shard), (kind, way)
            if isinstance(unsharded, str):  # of sparse gradients alone
                assert ours == unsharded, (kind, way)
            elif isinstance(ours, str):
                cannot[f"{kind.__name__} {way}".strip()] = ours
            else:
                assert ours == pytest.approx(unsharded, rel=CLOSE.get(kind, 0), abs=0), (kind, way)
    return cannot


def test_as_stock_and_as_unsharded(two: Pool) -> None:
    """What DTensors have no rule for is stock's error too; README.md and docs/optimizers.md say
    which those are.
    """
    (cannot, _) = two.run(compare_optimizers)
    known = {
        f"{name} {way}".strip()
        for name, ways in (
            ("Adafactor", WAYS),
            ("Rprop", WAYS),
            ("SGD", ("fused",)),
            ("Adagrad", ("fused",)),
        )
        for way in ways
    }
    assert set(cannot) <= known, cannot
