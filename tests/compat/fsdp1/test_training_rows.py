"""Chapters 2, 6, 8 and 9: strategies, training steps, `no_sync`, mixed precision."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import plain
from kit.oracle_fsdp1 import (
    ALL_KINDS,
    STRATEGIES,
    Api,
    adam,
    close,
    eager_same,
    full,
    grads,
    hybrid_mesh,
    loss_of,
    net,
    outcome,
    rows,
    same,
    train_step,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

if TYPE_CHECKING:
    from kit.pool import Pool

BF16 = torch.bfloat16
PRECISIONS = (
    None,
    MixedPrecision(param_dtype=BF16),
    MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    MixedPrecision(reduce_dtype=BF16),
    MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
)


def three_steps(api: Api, **options: Any) -> Any:
    """Losses, gradients and whole parameters."""
    model = api.blocks(**options)
    call, optimizer = api.compile(model), adam(model)
    found = []
    for step in range(3):
        found.append([train_step(call, step), plain(grads(model))])
        if (
            options.get("mixed_precision") is not PRECISIONS[4]
        ):  # no optimizer takes gradients of another dtype
            optimizer.step()
        optimizer.zero_grad()
    return found, full(api, model)


@rows("2.1", "2.2", "2.3", "2.4", "2.13", "1.19", "6.28", "9.2", "9.4", "9.5", "9.6", "9.15")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_grid(two: Pool, use_orig_params: bool) -> None:
    two.run(grid, use_orig_params)


def grid(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        for precision in PRECISIONS:
            options = {
                "sharding_strategy": strategy,
                "mixed_precision": precision,
                "use_orig_params": use_orig_params,
            }
            # what the others compile to differs in no other way
            is_compiled = precision is PRECISIONS[2] or (
                strategy is STRATEGIES[0] and (use_orig_params or precision is None)
            )
            kinds = ALL_KINDS if is_compiled else ("eager",)
            same(lambda api, options=options: three_steps(api, **options), kinds=kinds)


@rows("2.5", "2.6", "2.13", "12.18")
def test_hybrid(four: Pool) -> None:
    four.run(hybrid)


def hybrid() -> None:
    mesh = hybrid_mesh()
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        for use_orig_params in (strategy is ShardingStrategy.HYBRID_SHARD,):
            options = {
                "sharding_strategy": strategy,
                "device_mesh": mesh,
                "use_orig_params": use_orig_params,
            }
            kinds = ALL_KINDS if strategy is ShardingStrategy.HYBRID_SHARD else ("eager",)
            how = {"kinds": kinds, "rtol": 1e-5, "atol": 1e-6}
            same(lambda api, options=options: three_steps(api, **options), **how)
    whole = {"kinds": ("eager",), "rtol": 1e-5, "atol": 1e-7}
    same(lambda api: three_steps(api, use_orig_params=True), **whole)


@rows("2.2")
def test_against_one_process(two: Pool) -> None:
    two.run(against_one_process)


def against_one_process() -> None:
    """The unsharded model on both ranks' batches. A mean of two halves, exactly; the loss in
    another order of additions.
    """
    model = net()
    optimizer = adam(model)
    for step in range(3):
        total = torch.zeros(())
        for rank in range(2):
            generator = torch.Generator().manual_seed(100 * step + rank)
            loss = model(torch.randn(4, 3, generator=generator)).square().mean()
            total = total + loss / 2
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [p.detach() for p in model.parameters()]
    for kind in ("eager", "compiled"):
        torch._dynamo.reset()
        _, found = three_steps(Api(kind), use_orig_params=True)
        for a, b in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@rows("6.18", "8.1", "8.2", "8.4", "8.5")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_accumulation(two: Pool, use_orig_params: bool) -> None:
    two.run(accumulation, use_orig_params)


def accumulation(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        # under NO_SHARD stock reduces what it has reduced before once more, with another rounding
        tolerance = (
            {} if strategy is not ShardingStrategy.NO_SHARD else {"rtol": 1e-5, "atol": 1e-7}
        )
        kinds = ALL_KINDS if strategy is STRATEGIES[0 if use_orig_params else 2] else ("eager",)
        same(lambda api, options=options: accumulate(api, **options), kinds=kinds, **tolerance)
    # what is not reduced yet is added up in the compute dtype, whatever it is reduced in
    for strategy, precision in zip(STRATEGIES, PRECISIONS[2:4], strict=False):
        options = {
            "sharding_strategy": strategy,
            "use_orig_params": use_orig_params,
            "mixed_precision": precision,
        }
        same(
            lambda api, options=options: accumulate(api, **options),
            kinds=ALL_KINDS if use_orig_params and strategy is STRATEGIES[0] else ("eager",),
        )


@rows("8.1")
def test_accumulation_hybrid(four: Pool) -> None:
    four.run(accumulation_hybrid)


def accumulation_hybrid() -> None:
    mesh = hybrid_mesh()
    options = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": mesh,
        "use_orig_params": True,
    }
    close(lambda api: accumulate(api, **options))


def accumulate(api: Api, **options: Any) -> Any:
    model = api.blocks(**options)
    call = api.compile(model)
    found: list[Any] = [train_step(call, 0), train_step(call, 1), plain(grads(model))]
    for p in model.parameters():
        p.grad = None
    with model.no_sync():
        found += [
            train_step(call, 2),
            plain(grads(model)),
            train_step(call, 3),
            plain(grads(model)),
        ]
    found += [train_step(call, 4), plain(grads(model))]
    model.zero_grad()
    with model.no_sync():
        train_step(call, 5)
    model.zero_grad()  # drops what is not reduced
    found += [train_step(call, 6), plain(grads(model))]
    found.append(outcome(lambda: model[1].no_sync().__enter__()))

    def turned_on_inside() -> None:
        with model.no_sync():
            model._sync_gradients = True

    found += [outcome(turned_on_inside), model._sync_gradients]
    return found


@rows("6.12", "6.11", "5.15", "5.17", "5.18", status="eager")
def test_what_is_registered_when(two: Pool) -> None:
    two.run(eager_same, what_is_registered)


def what_is_registered(api: Api) -> Any:
    found = []
    for strategy in STRATEGIES:
        model = api.blocks(sharding_strategy=strategy, use_orig_params=True)
        before = dict(model.named_parameters())
        found.append([tuple(p.shape) for p in before.values()])
        seen: list[Any] = []
        flat = model[1]._flat_param if strategy is ShardingStrategy.NO_SHARD else None
        model[1].a.register_forward_pre_hook(partial(note_weight, seen, flat))
        loss = loss_of(model)
        found += [
            seen,
            [tuple(p.shape) for p in model[1].module._parameters],
            [tuple(p.shape) for p in model.parameters()],
        ]
        loss.backward()
        after = dict(model.named_parameters())
        found += [
            [tuple(p.shape) for p in after.values()],
            grads(model),
            all(after[n] is before[n] for n in before),
        ]
    return found


def note_weight(seen: list[Any], flat: torch.Tensor | None, module: Any, args: Any) -> None:
    """What forward computes with; under NO_SHARD in the memory of the flat parameter: there is no
    second copy.
    """
    weight = module.weight
    is_shared = (
        flat is not None
        and weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    )
    seen.append((weight.shape, weight.grad_fn is None, is_shared))


@rows("6.12", status="eager")
def test_changed_between_forward_and_backward(two: Pool) -> None:
    two.run(eager_same, changed_between)


def changed_between(api: Api) -> Any:
    model = api.wrap(net(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
    loss = loss_of(model)
    for module in model.module.modules():
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                setattr(module, name, nn.Parameter(torch.ones(3)))
    found = outcome(loss.backward)[0]
    whole = api.wrap(net(), sharding_strategy=ShardingStrategy.NO_SHARD)
    loss = loss_of(whole)
    with torch.no_grad():
        whole._flat_param.mul_(2.0)  # as an optimizer's step does, to what autograd has saved
    return found, outcome(loss.backward)


@rows("9.16", status="improved")
def test_second_backward_in_low_precision(two: Pool) -> None:
    """Each gradient is reduced once, and added in full precision; stock reduces what it has added
    up once more, rounded.
    """
    two.run(second_backward)


def second_backward() -> None:
    for kind in ("stock", *ALL_KINDS):
        torch._dynamo.reset()
        once, twice = (reduced_gradient(Api(kind), steps) for steps in ((0,), (0, 1)))
        exact = [a + b for a, b in zip(once, reduced_gradient(Api(kind), (1,)), strict=True)]
        is_exact = all(torch.equal(a, b) for a, b in zip(twice, exact, strict=True))
        assert is_exact is (kind != "stock"), kind


def reduced_gradient(api: Api, steps: tuple[int, ...]) -> list[torch.Tensor]:
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "use_orig_params": True,
    }
    model = api.blocks(mixed_precision=MixedPrecision(reduce_dtype=BF16), **options)
    call = api.compile(model)
    for step in steps:
        loss_of(call, step).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
