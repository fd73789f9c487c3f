"""Chapters 7, 8 and 11: write-back, `summon_full_params`, `apply`, names, clipping, communication
hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import plain
from kit.oracle_fsdp1 import (
    ALL_KINDS,
    STRATEGIES,
    Api,
    batch,
    close,
    each,
    eager_same,
    full,
    grads,
    hybrid_mesh,
    loss_of,
    net,
    outcome,
    params,
    rows,
    same,
    train_step,
    warned,
)
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

if TYPE_CHECKING:
    from kit.pool import Pool

ORIG = {"use_orig_params": True}


@rows("7.1", "7.2", "7.3", "7.4", "7.5", "7.7", "7.9")
def test_writeback(two: Pool) -> None:
    two.run(
        close, writeback
    )  # under NO_SHARD stock reduces what it has reduced before once more, with another rounding


def writeback(api: Api) -> Any:
    found: list[Any] = []
    for strategy in (STRATEGIES[0], STRATEGIES[2]):
        model = api.blocks(sharding_strategy=strategy, **ORIG)
        call = api.compile(model)
        layer = model[1].a
        train_step(call)
        layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.5))
        found += [train_step(call, 1), plain(grads(model)), full(api, model)]
        layer.bias.data = torch.full_like(layer.bias, 0.25)
        found += [train_step(call, 2), plain(grads(model)), full(api, model)]
        if layer.weight.grad is not None:
            layer.weight.grad = torch.ones_like(layer.weight)
        layer.bias.grad = None
        found += [train_step(call, 3), plain(grads(model))]
        for p in model.parameters():
            p.grad = None
        loss_of(call)
        found.append([m._flat_param.grad is None for m in api.FSDP.fsdp_modules(model)])
    model = api.blocks(**ORIG)
    for module in model.modules():  # some on every rank, or the others would wait
        for name, p in list(module._parameters.items()):
            if p is not None and p.numel():
                setattr(module, name, nn.Parameter(torch.ones(2, 3)))
    found.append(outcome(lambda: train_step(model))[0])
    return found


@rows("7.7")
def test_a_deregistered_parameter(two: Pool) -> None:
    two.run(eager_same, a_deregistered_parameter)


def a_deregistered_parameter(api: Api) -> Any:
    model = api.blocks(**ORIG)
    weight = model[1].a.weight
    del model[1].a.weight
    model[1].a.weight = weight
    return train_step(model), grads(model)


@rows("8.6", "8.7", "8.8", "8.10", "8.13", "8.15", "8.18", "8.19", "8.22")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_summon(two: Pool, use_orig_params: bool) -> None:
    two.run(summon_rows, use_orig_params)


def summon_rows(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        same(
            lambda api, strategy=strategy: summon(
                api, sharding_strategy=strategy, use_orig_params=use_orig_params
            ),
            kinds=ALL_KINDS if strategy is STRATEGIES[0] else ("eager",),
        )


def summon(api: Api, **options: Any) -> Any:
    model = api.blocks(mixed_precision=MixedPrecision(torch.bfloat16), **options)
    fsdp, call = api.FSDP, api.compile(model)
    found: list[Any] = [
        full(api, model),
        full(api, model, recurse=False),
        full(api, nn.Sequential(model), recurse=False),
    ]
    train_step(call)
    for writeback in (True, False):
        with fsdp.summon_full_params(model, writeback=writeback):
            for p in model.parameters():
                p.data.fill_(0.5 if writeback else 0.25)
        found.append(full(api, model))
    found.append(outcome(lambda: full(api, model, rank0_only=True)))
    if options["sharding_strategy"] is not ShardingStrategy.NO_SHARD:
        found.append(full(api, model, rank0_only=True, writeback=False))
    else:
        found.append(outcome(lambda: full(api, model, offload_to_cpu=True, writeback=False)))
    model.zero_grad()  # under NO_SHARD stock would reduce what it has reduced once more, in bf16
    train_step(call)
    if options["use_orig_params"]:
        with fsdp.summon_full_params(model, with_grads=True):
            found.append(plain(grads(model)))
            for p in model.parameters():
                p.grad.fill_(2.0)
        found.append(plain(grads(model)))
        found.append(outcome(lambda: full(api, model, with_grads=True, offload_to_cpu=True)))
    else:
        found.append(outcome(lambda: full(api, model, with_grads=True)))
    with fsdp.summon_full_params(model):
        found += [list(params(model)), outcome(lambda: full(api, model))[0]]
    inside: list[Any] = []
    model[1].a.register_forward_pre_hook(
        lambda *_: inside.append(outcome(lambda: full(api, model))[0])
    )
    train_step(model)
    found += [inside, list(params(model)), model.check_is_root(), model[1].check_is_root()]
    roots = [len(fsdp.fsdp_modules(model, root_only=only)) for only in (False, True)]
    return found, roots, len(fsdp.fsdp_modules(nn.Linear(1, 1)))


@rows("8.12", status="improved")
def test_summon_to_cpu(two: Pool) -> None:
    """Works on the CPU too, where stock's crashes: the full parameters are copies."""
    two.run(each, summon_to_cpu)


def summon_to_cpu(api: Api) -> None:
    for use_orig_params in (True, False):
        model = api.blocks(use_orig_params=use_orig_params)
        expected = full(api, model)
        with warned() as given, api.FSDP.summon_full_params(model, offload_to_cpu=True):
            found = plain(params(model))
            for p in model.parameters():
                p.data.add_(1)
        assert any("offload_to_cpu" in text for text in given), given
        assert all(
            torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True)
        )
        after = full(api, model)
        assert all(
            torch.equal(a, b + 1) for a, b in zip(after.values(), expected.values(), strict=True)
        )


@rows("8.17")
def test_summon_between_forward_and_backward(two: Pool) -> None:
    two.run(same, summon_between)


def summon_between(api: Api) -> Any:
    found = []
    for use_orig_params in (True, False):
        model = api.blocks(use_orig_params=use_orig_params)
        call = api.compile(model)
        loss = loss_of(call)
        found.append(full(api, model, writeback=False))
        loss.backward()
        found += [plain(grads(model)), train_step(call, 1)]
    return found


@rows("8.20", "8.21", "6.6")
def test_apply(two: Pool) -> None:
    two.run(same, apply_rows)


def apply_rows(api: Api) -> Any:
    found: list[Any] = []
    for use_orig_params in (True, False):
        model = api.blocks(use_orig_params=use_orig_params)
        seen: list[Any] = []
        model.apply(
            lambda m, seen=seen: seen.append(
                (
                    type(m).__name__.replace("FSDP", ""),
                    [tuple(p.shape) for p in m._parameters.values() if p is not None],
                )
            )
        )
        model.apply(
            lambda m: nn.init.constant_(m.weight, 0.5) if isinstance(m, nn.Linear) else None
        )
        found += [len(seen), model._is_root, full(api, model)]
        model = api.blocks(use_orig_params=use_orig_params).double()
        call = api.compile(model)
        loss = call(batch().double()).square().mean()
        loss.backward()
        found += [loss.detach(), plain(grads(model)), full(api, model)]
    return found


@rows("11.1", "11.2", "11.3", "11.4", "11.6")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_clip(two: Pool, use_orig_params: bool) -> None:
    two.run(same, clip, use_orig_params)


def clip(api: Api, use_orig_params: bool) -> Any:
    found: list[Any] = []
    for strategy in (STRATEGIES[0], STRATEGIES[2]):
        model = net()
        unmanaged = model[3]
        sharded = api.blocks(
            model,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            ignored_modules=[unmanaged],
        )
        call = api.compile(sharded)
        for norm_type in (2.0, 1, torch.inf):
            sharded.zero_grad()
            train_step(call)
            found += [sharded.clip_grad_norm_(0.01, norm_type), plain(grads(sharded))]
        found.append(outcome(lambda sharded=sharded: sharded[1].clip_grad_norm_(1.0)))
    low = api.blocks(
        mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True),
        use_orig_params=use_orig_params,
    )
    train_step(api.compile(low))
    found.append(low.clip_grad_norm_(0.1))
    low.zero_grad()
    with warned() as given:
        found.append(low.clip_grad_norm_(0.1))
    return found, sorted(set(given))


@rows("11.8")
def test_clip_hybrid(four: Pool) -> None:
    four.run(clip_hybrid_rows)


def clip_hybrid_rows() -> None:
    same(clip_hybrid, rtol=1e-5, atol=1e-7)


def clip_hybrid(api: Api) -> Any:
    mesh = hybrid_mesh()
    model = api.blocks(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, **ORIG)
    train_step(api.compile(model))
    return model.clip_grad_norm_(0.01), grads(model)


def halving(state: dict[str, int], grad: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """A hook that reduces, counts, and halves."""
    state["calls"] = state.get("calls", 0) + 1
    if out is None:
        dist.all_reduce(grad)
        grad.div_(2)
    else:
        dist.reduce_scatter_tensor(out, grad)
        out.div_(2)


@rows("11.9", "11.10")
def test_comm_hook(two: Pool) -> None:
    two.run(same, comm_hook)


def comm_hook(api: Api) -> Any:
    found: list[Any] = []
    for strategy in STRATEGIES:
        for use_orig_params in (True, False):
            model = api.blocks(sharding_strategy=strategy, use_orig_params=use_orig_params)
            state: dict[str, int] = {}
            found += [
                outcome(lambda m=model: m[1].register_comm_hook(None, halving))
                if strategy is STRATEGIES[0]
                else 0
            ]
            model = api.blocks(sharding_strategy=strategy, use_orig_params=use_orig_params)
            found.append(outcome(lambda m=model: m.register_comm_hook(None, 3)))
            model.register_comm_hook(state, halving)
            found.append(outcome(lambda m=model: m.register_comm_hook(None, halving)))
            call = api.compile(model) if use_orig_params else model
            found += [train_step(call), plain(grads(model)), state["calls"]]
    return found


@rows("11.11", status="improved")
def test_low_precision_hook(two: Pool) -> None:
    """Torch's hooks run on the CPU too: they are the dtype of the reduction, which passes see.
    Stock needs a stream for them.
    """
    two.run(each, low_precision_hook)


def low_precision_hook(api: Api) -> None:
    model = api.blocks(**ORIG)
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.fp16_compress_hook)
    train_step(api.compile(model))
    plain_model = api.blocks(**ORIG)
    train_step(plain_model)
    for a, b in zip(model.parameters(), plain_model.parameters(), strict=True):
        if a.grad is not None:  # fp16 has three digits
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=1e-4)


def test_order_of_hooks(two: Pool) -> None:
    """A unit's gradient is complete when backward has come to the beginning of its forward: the
    root's is the last.
    """
    two.run(eager_same, order_of_hooks)


class Headed(nn.Module):
    """Layers of different sizes, the first and the last of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
        self.beside = nn.Linear(3, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.first(x)) + self.beside(x))


def order_of_hooks(api: Api) -> Any:
    found: list[Any] = []
    for inner in (
        ("layers.0", "layers.1"),
        ("first", "layers.0", "layers.1", "beside"),
        ("first", "layers", "beside", "head"),
    ):
        model = Headed()
        for name in inner:
            above, _, last = name.rpartition(".")
            parent = model.get_submodule(above)
            setattr(parent, last, api.wrap(getattr(parent, last)))
        model = api.wrap(model)
        order: list[int] = []

        def hook(order: list[int], grad: torch.Tensor, out: torch.Tensor) -> None:
            order.append(grad.numel())
            dist.reduce_scatter_tensor(out, grad)

        for _ in range(2):
            if not order:
                model.register_comm_hook(order, hook)
            model(torch.randn(2, 3)).sum().backward()
        found.append(order)
    return found


def test_state_inside_forward(two: Pool) -> None:
    """Refused as stock refuses it, and the step goes on as if nobody had asked."""
    two.run(eager_same, state_inside_forward)


def state_inside_forward(api: Api) -> Any:
    found: list[Any] = []
    for use_orig_params in (True, False):
        for asked in (0, 1):
            model = api.blocks(use_orig_params=use_orig_params)
            owner = (model, model[1])[asked]

            def ask(*_: object, owner: Any = owner, said: list[Any] = found) -> None:
                kind = outcome(owner.state_dict)
                said.append(kind[0] if isinstance(kind, list) else "saved")

            model[1].b.register_forward_hook(ask)
            found += [train_step(model), plain(grads(model))]
    return found
