"""`compile_step` of `FullyShardedDataParallel`: the numbers of a loop with stock's."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.harness import ROUNDING, SLOW
from kit.overlap import OPTIMIZERS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as StockFSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from compiled_fsdp import FullyShardedDataParallel, compile_step, explain, planned
from compiled_fsdp.sharded_grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from kit.pool import Pool

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_fn(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean() * factor  # type: ignore[no-any-return]


def batch(i: int, *, scaled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
    is_inf = scaled and i == 1 and dist.get_rank() == 1
    return x, torch.tensor(float("inf") if is_inf else 1.0)


class Net(nn.Module):
    """Odd sizes, a frozen parameter, and one of which no gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def trained(
    api: Any,
    *,
    whole: bool,
    optimizer: str = "adamw",
    clip: float | None = None,
    count: int = 1,
    scaled: bool = False,
    freezes: bool = False,
    **options: Any,
) -> tuple[list[float], list[Any]]:
    """Losses of four steps; parameters and the optimizer's state at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    if freezes:
        net.second.bias.requires_grad_(False)
    net.first = api(net.first, device_id="cpu", **options)
    model = api(net, device_id="cpu", **options)
    made = OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    scaler = ShardedGradScaler("cpu", init_scale=1331.0, growth_interval=2, enabled=scaled)
    step: Any = None
    if whole:
        step = compile_step(
            model,
            made,
            loss_fn,
            clip=clip,
            accumulate=count,
            scaler=scaler,
            backend="compiled_fsdp_eager",
        )
    losses = []
    for i in range(4):
        batches = [batch(i + 10 * n, scaled=scaled) for n in range(count)]
        if whole:
            loss = step(*batches[0]) if count == 1 else step(batches)
        else:
            loss = torch.zeros(())
            for each in batches:
                part = loss_fn(model, *each) / count
                scaler.scale(part).backward()
                loss = loss + part.detach()
            scaler.unscale_(made)
            if clip is not None:
                model.clip_grad_norm_(clip)
            scaler.step(made)
            scaler.update()
            made.zero_grad()
        losses.append(float(loss))
    assert all(p.grad is None for p in model.parameters())
    if whole:
        assert "2 in a graph" in str(explain(model))
    state = [[p.detach().clone() for p in model.parameters()], scaler.state_dict()]
    trained = [p for p in model.parameters() if p in made.state]
    return losses, [*state, [list(made.state[p].values()) for p in trained]]


def compare() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"use_orig_params": True, "freezes": True, "scaled": True},
        {"use_orig_params": True, "count": 2, "optimizer": "sgd", "mixed_precision": BF16},
        {"use_orig_params": False, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"use_orig_params": True, "clip": 0.05},
    )
    for more in cases:
        wanted = trained(StockFSDP, whole=False, **more)
        apart = "count" not in more  # with a gather for each unit, the next step's start ahead
        with planned(bucket_bytes=0) if apart else nullcontext():
            found = trained(FullyShardedDataParallel, whole=True, **more)
        if "clip" in more:  # stock adds the norms of originals, in the order of a set
            check_equal(list(found), list(wanted), f"fsdp1, {more}", *ROUNDING)
        else:
            check_equal([str(x) for x in found[0]], [str(x) for x in wanted[0]], f"fsdp1, {more}")
            check_equal(found[1], wanted[1], f"fsdp1, {more}")


def test_numbers(two: Pool) -> None:
    """Bit for bit with stock's loop: originals and flat parameters, frozen and unused ones, a
    scaler, micro-batches, mixed precision; close, where clipped.
    """
    two.run(compare, timeout=SLOW)


def between() -> None:
    """Kept gradients, an ordinary step between, and what is refused."""
    precision = MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=True)
    options: dict[str, Any] = {"use_orig_params": True, "device_id": "cpu"}
    low = FullyShardedDataParallel(nn.Linear(4, 4), mixed_precision=precision, **options)
    sgd = torch.optim.SGD(low.parameters(), lr=0.1)
    with pytest.raises(
        NotImplementedError, match="keep_low_precision_grads=True has gradients cast"
    ):
        compile_step(low, sgd, clip=1.0)
    models = []
    for is_whole in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(5, 4), **options)
        made = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = compile_step(model, made, loss_fn, keep_grads=True, backend="compiled_fsdp_eager")
        grads = []
        for i in range(4):
            if is_whole and i != 2:
                step(*batch(i, scaled=False))
            else:
                made.zero_grad()
                loss_fn(model, *batch(i, scaled=False)).backward()
                made.step()
            grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            if i == 2:
                made.zero_grad()
        models.append([grads, [p.detach().clone() for p in model.parameters()]])
    check_equal(models[1], models[0], "kept gradients")
    loss_fn(model, *batch(9, scaled=False)).backward()
    with pytest.raises(RuntimeError, match="has a gradient of an earlier backward"):
        step(*batch(9, scaled=False))


def test_between(two: Pool) -> None:
    two.run(between, timeout=SLOW)
