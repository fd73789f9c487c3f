"""`compile_step(scaler=..., schedule=...)`: scaled gradients in one graph,
with the loop's numbers.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.harness import ROUNDING, SLOW, local
from kit.overlap import OPTIMIZERS
from kit.regions import in_regions
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from compiled_fsdp import Muon, compile_step, explain, fully_shard, planned
from compiled_fsdp.sharded_grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from kit.pool import Pool

FP16 = {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)}
# 1.5 and 0.7: scales that are no powers of two, so that what is scaled and unscaled is rounded
ODD = {"init_scale": 1331.0, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 2}
EVEN = {"init_scale": 1024.0, "growth_interval": 2}


def loss_fn(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean() * factor  # type: ignore[no-any-return]


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Infinite on every rank in the first step, NaN on one of them in the fourth."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
    is_nan = i == 3 and dist.get_rank() == 1
    return x, torch.tensor(float("inf") if i == 0 else float("nan") if is_nan else 1.0)


class Shift(nn.Module):
    """Assigns a buffer, which a graph returns behind the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.detach().float().mean(0)
        return torch.relu(x - self.mean.to(x.dtype))


def trained(
    *,
    whole: bool,
    sharded: bool = False,
    optimizer: str = "adamw",
    clip: float | None = None,
    count: int = 1,
    settings: dict[str, Any] = EVEN,
    backend: str = "compiled_fsdp_eager",
    **policy: Any,
) -> list[Any]:
    """Six steps; after each the loss, the scaler, learning rate, parameters and state; at the end
    what was warned of schedules.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), Shift(), nn.Linear(9, 3))
    for unit in (model[0], model):
        fully_shard(unit, **policy)
    params = list(model.parameters())
    made = OPTIMIZERS[optimizer](params)
    scaler = (ShardedGradScaler if sharded else torch.amp.GradScaler)("cpu", **settings)
    schedule = StepLR(made, 2, 0.5)
    found: list[Any] = []
    step = compile_step(
        model,
        made,
        loss_fn,
        clip=clip,
        accumulate=count,
        scaler=scaler,
        schedule=schedule,
        backend=backend,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(6):
            batches = [batch(i), batch(i + 20)][:count]
            if whole:
                loss = step(*batches[0]) if count == 1 else step(batches)
            else:
                loss = torch.zeros(())
                for each in batches:
                    part = loss_fn(model, *each) / count
                    scaler.scale(part).backward()
                    loss = loss + part.detach()
                if clip is not None:
                    scaler.unscale_(made)
                    nn.utils.clip_grad_norm_(params, clip)
                scaler.step(made)
                scaler.update()
                made.zero_grad()
                schedule.step()
            state = [
                {
                    k: local(v) if isinstance(v, torch.Tensor) else v
                    for k, v in made.state[p].items()
                }
                for p in params
                if p in made.state
            ]
            found += [str(float(loss)), copy.deepcopy(scaler.state_dict()), schedule.get_last_lr()]
            found += [*(local(p) for p in params), model[1].mean.clone(), state]
    found.append([str(w.message)[:40] for w in caught if "lr_scheduler" in str(w.message)])
    assert all(p.grad is None for p in params)
    if whole:
        assert "2 in a graph" in str(explain(model))
    return found


def compare() -> None:
    for more in (
        {"settings": ODD, **FP16},
        {"sharded": True, "clip": 0.05, "optimizer": "sgd", "count": 2, "settings": ODD},
        {"optimizer": "adamw_fused"},
        {"clip": 0.05, "optimizer": "adamw_fused", "settings": ODD},
    ):
        wanted = trained(whole=False, **more)  # type: ignore[arg-type]
        apart = "clip" not in more  # with a gather for each unit, the next step's start ahead
        with planned(bucket_bytes=0) if apart else nullcontext():
            found = trained(whole=True, **more)  # type: ignore[arg-type]
        check_equal(found, wanted, f"scaled, {more}")


def test_numbers(two: Pool) -> None:
    """Bit for bit: growth, backoff, skipped steps (the first, and one that a rank alone would
    skip), the scaler's state dict, the schedule and its warning, fp16, clipping, micro-batches,
    optimizers that unscale by themselves.
    """
    two.run(compare, timeout=SLOW)


def compare_in_regions() -> None:
    for count, clip in ((1, None), (2, 0.5)):
        expected = trained(whole=False, count=count, clip=clip)
        with in_regions() as calls:
            found = trained(whole=True, count=count, clip=clip)
        check_equal(found, expected, f"in regions, {count=}, {clip=}")
        assert calls.num > 0


def test_in_regions(two: Pool) -> None:
    """What is made of reduced gradients, up to their updates, is left where rules look for it."""
    two.run(compare_in_regions, timeout=SLOW)


def compare_inductor() -> None:
    """What is decided, exactly; what is computed, up to rounding."""
    more: Any = {"clip": 0.05, "optimizer": "sgd", "settings": ODD}
    found = trained(whole=True, backend="compiled_fsdp", **more)
    wanted = trained(whole=False, **more)
    for of_step, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, str):
            torch.testing.assert_close(float(of_step), float(theirs), equal_nan=True)
        elif isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(of_step, theirs, rtol=ROUNDING[0], atol=ROUNDING[1])
        elif not (theirs and isinstance(theirs[0] if isinstance(theirs, list) else 0, dict)):
            assert of_step == theirs
    scales = [each["scale"] for each in wanted if isinstance(each, dict)]
    assert len(set(scales)) > 2, "the scale neither grew nor shrank"


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


def partly_infinite(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Where the factor is infinite, the gradient of the last bias is, and no other."""
    plain: torch.Tensor = model(x).float().square().mean()
    return plain + (factor - 1) * model[2].bias.float().sum()


def weight_infinite(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The same of the last weight, which lies before its bias."""
    plain: torch.Tensor = model(x).float().square().mean()
    return plain + (factor - 1) * model[2].weight.float().sum()


def adamw_and_muon(model: nn.Sequential, *, fused: bool = False) -> list[Any]:
    biases = [model[0].bias, model[2].bias]
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    return [torch.optim.AdamW(biases, lr=0.02, fused=fused), Muon(weights, lr=0.05)]


def adamw_and_muon_fused(model: nn.Sequential) -> list[Any]:
    return adamw_and_muon(model, fused=True)


def adamw_and_sgd(model: nn.Sequential) -> list[Any]:
    """The last bias by itself."""
    others = [*model[0].parameters(), model[2].weight]
    return [
        torch.optim.SGD([model[2].bias], lr=0.05, momentum=0.9),
        torch.optim.AdamW(others, lr=0.02),
    ]


def both_fused(model: nn.Sequential) -> list[Any]:
    others = [*model[0].parameters(), model[2].weight]
    return [
        torch.optim.AdamW([model[2].bias], lr=0.05, fused=True),
        torch.optim.AdamW(others, lr=0.02, fused=True),
    ]


def trained_by(make: Any, loss: Any, *, whole: bool, clip: float | None = None) -> list[Any]:
    """Six steps with several optimizers; after each loss, scaler, parameters, and states."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), Shift(), nn.Linear(9, 3))
    for unit in (model[0], model):
        fully_shard(unit)
    made = make(model)
    scaler = torch.amp.GradScaler("cpu", **EVEN)
    step = compile_step(model, made, loss, clip=clip, scaler=scaler, backend="compiled_fsdp_eager")
    found: list[Any] = [local(p).clone() for p in model.parameters()]
    for i in range(6):
        if whole:
            lost = step(*batch(i))
        else:
            lost = loss(model, *batch(i))
            scaler.scale(lost).backward()
            if clip is not None:
                for each in made:
                    scaler.unscale_(each)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            for each in made:
                scaler.step(each)
            scaler.update()
            for each in made:
                each.zero_grad()
        states = [
            local(v) if isinstance(v, torch.Tensor) else v
            for each in made
            for p in model.parameters()
            for v in each.state.get(p, {}).values()
        ]
        found += [str(float(lost)), copy.deepcopy(scaler.state_dict()), states]
        found += [local(p).clone() for p in model.parameters()]
    return found


# Weight and bias of the first layer, and of the last: which are as before after an infinite loss.
ALL, BIASES, WEIGHTS, LAST = [True] * 4, [False, True] * 2, [True, False] * 2, [False] * 3 + [True]


def compare_several() -> None:
    for make, loss, clip, unchanged in (
        (adamw_and_sgd, partly_infinite, None, LAST),
        (adamw_and_sgd, loss_fn, 0.05, ALL),
        (adamw_and_muon, partly_infinite, None, BIASES),
        (adamw_and_muon, weight_infinite, None, WEIGHTS),
        (adamw_and_muon, loss_fn, 0.05, ALL),
        (adamw_and_muon_fused, partly_infinite, None, BIASES),
        (both_fused, partly_infinite, None, LAST),
    ):
        wanted = trained_by(make, loss, whole=False, clip=clip)
        found = trained_by(make, loss, whole=True, clip=clip)
        check_equal(found, wanted, f"{make}, {loss.__name__}, clip={clip}")
        first, then = wanted[:4], wanted[7:11]  # parameters, before and after an infinite loss
        same = [torch.equal(a, b) for a, b in zip(first, then, strict=True)]
        assert same == unchanged, f"{make}: {same}"


def test_several_optimizers(two: Pool) -> None:
    """Bit for bit: each leaves out the steps in which one of its own gradients is infinite, on all
    ranks, and no other; matrices of a `Muon` too, and the scaler backs off.
    """
    two.run(compare_several, timeout=SLOW)


def compare_moved() -> None:
    """A parameter changes hands between two steps: its infinite gradient is the other's now."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), Shift(), nn.Linear(9, 3))
    for unit in (model[0], model):
        fully_shard(unit)
    first, second = adamw_and_sgd(model)
    scaler = torch.amp.GradScaler("cpu", **EVEN)
    step = compile_step(
        model, [first, second], partly_infinite, scaler=scaler, backend="compiled_fsdp_eager"
    )
    step(*batch(1))
    second.param_groups[0]["params"].append(first.param_groups[0]["params"].pop())
    before = [local(p).clone() for p in model.parameters()]
    step(*batch(0))
    assert all(torch.equal(a, local(b)) for a, b in zip(before, model.parameters(), strict=True))


def test_a_parameter_changes_hands(two: Pool) -> None:
    two.run(compare_moved)


class Own(torch.amp.GradScaler):
    """A scaler that somebody has changed."""


def refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")

    def made(optimizer: Any = sgd, of: nn.Module = model, **more: Any) -> Any:
        return compile_step(of, optimizer, loss_fn, backend="compiled_fsdp_eager", **more)

    for scale in (Own("cpu"), 2.0):
        with pytest.raises(TypeError, match=r"scaler=.*; should be a torch.amp.GradScaler"):
            made(scaler=scale)
    with pytest.raises(TypeError, match=r"schedule=ReduceLROnPlateau; should be .* no argument"):
        made(schedule=ReduceLROnPlateau(sgd))
    with pytest.raises(ValueError, match="schedule=StepLR is of another optimizer"):
        made(schedule=StepLR(torch.optim.SGD(model.parameters()), 1))
    half = fully_shard(nn.Linear(6, 4).half())
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients, of weight"):
        made(torch.optim.SGD(half.parameters()), half, scaler=scaler)
    off = made(scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert off(*batch(1)) > off(*batch(1))
    step = made(scaler=scaler)
    step(*batch(1))
    scaler.scale(loss_fn(model, *batch(1))).backward()
    scaler.unscale_(sgd)
    sgd.zero_grad()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) or step\(\) of the scaler was called"):
        step(*batch(1))
    scaler.update()
    assert step(*batch(1)) > step(*batch(1))


def test_refused(two: Pool) -> None:
    two.run(refused, timeout=SLOW)
