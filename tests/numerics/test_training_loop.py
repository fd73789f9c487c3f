"""What loops do around forward and backward: accumulate, clip, zero, evaluate; and the kinds of
optimizer.
"""

from __future__ import annotations

import pytest
import torch
from kit.compare import check_equal
from kit.harness import Options, batch_of, build, check_parity, compiled, local, shard, train
from kit.models import loss_of
from kit.pool import Pool
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import fully_shard


@pytest.mark.parametrize(
    "optimizer",
    [
        "sgd",
        "sgd+foreach",
        "adamw+foreach",
        "adamw+fused",
        "adamw+amsgrad",
        "adamw+maximize",
    ],
)
def test_optimizers(two: Pool, optimizer: str) -> None:
    options = Options("odd", steps=5, optimizer=optimizer)
    if not optimizer.endswith("fused"):
        two.run(check_parity, options)
        return
    # The fused kernel steps what lies beyond the last whole vector of a tensor by scalar code,
    # which rounds otherwise (up to 1.2e-7 for values near 1). So it is exact where tensors have the
    # same lengths, as ours and stock's shards have wherever they lie, but not where an element of a
    # shard is compared with the same element of the whole parameter.
    two.run(
        check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), 1e-5, 1e-6, ("stock",)
    )


@pytest.mark.parametrize(("model", "set_to_none"), [("frozen", True), ("unused", False)])
def test_accumulate_three_backwards(two: Pool, model: str, set_to_none: bool) -> None:
    two.run(check_parity, Options(model, steps=4, num_backwards=3, set_to_none=set_to_none))


def test_evaluate_between_steps(two: Pool) -> None:
    two.run(check_parity, Options("conv", steps=3, evaluate=True))


def test_compiled_training_and_eager_evaluation(two: Pool) -> None:
    two.run(mixed_executors)


def mixed_executors() -> None:
    options = Options("odd")
    models = [shard(build("odd"), options, fully_shard) for _ in range(2)]
    calls = [models[0], compiled(models[1])]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in models]
    for step in range(6):
        seen = []
        for model, call, optimizer in zip(models, calls, optimizers, strict=True):
            loss = loss_of((model if step % 3 == 2 else call)(*batch_of("odd", step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                evaluated = loss_of(model(*batch_of("odd", 100 + step)))
            seen.append((loss.item(), evaluated.item()))
        assert seen[0] == seen[1], (step, seen)


def test_parameters_changed_by_hand(two: Pool) -> None:
    two.run(changed_by_hand)


def changed_by_hand() -> None:
    """Writes to the sharded parameters between steps, also through `.data`, reach the next
    forward.
    """
    results = []
    for kind in ("stock", "eager", "compiled"):
        model = shard(
            build("odd"), Options("odd"), stock_fully_shard if kind == "stock" else fully_shard
        )
        call = compiled(model) if kind == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses = train(call, optimizer, [batch_of("odd", 0)])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
                p.data.add_(0.01)
                p.to_local().sub_(0.005)
        losses += train(call, optimizer, [batch_of("odd", 1), batch_of("odd", 2)])
        results.append([losses, *map(local, model.parameters())])
    for found in results[1:]:
        check_equal(found, results[0], "changed by hand")
