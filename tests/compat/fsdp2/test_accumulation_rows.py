"""Chapters 10 and 11: gradient accumulation, synchronisation flags, frozen, unused, ignored and
tied parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.compare import plain
from kit.harness import IS_BEFORE_2_14, SLOW
from kit.oracle import (
    Api,
    against_stock,
    batch,
    close,
    close_eager,
    communications,
    each,
    eager_same,
    grads,
    inductor_same,
    is_sharded,
    mesh_of,
    net,
    net_of_units,
    params,
    raised,
    rows,
    same,
    train_step,
)
from kit.pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import compiled_fsdp


class Branches(nn.Module):
    """`left` always runs, `right` on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, use_right: bool) -> Tensor:
        out = self.left(x)
        return out + self.right(x).tanh() if use_right else out


class Twice(nn.Module):
    """The same weight under two names, and one parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.unused = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def branch_step(call: Any, step: int, use_right: bool) -> None:
    call(batch(step=step), use_right).square().mean().backward()


@rows("10.1")
def test_repeated_backward(two: Pool) -> None:
    two.run(same, repeated_backward)


def repeated_backward(api: Api) -> Any:
    model, call = net_of_units(api)
    train_step(call)
    first = [p.grad for p in model.parameters()]
    seen = [plain(first)]
    for step in (1, 2):
        seen.append(
            [
                communications(lambda step=step: train_step(call, step))["reduce"],
                plain(grads(model)),
            ]
        )
    return seen, [a is p.grad for a, p in zip(first, model.parameters(), strict=True)]


@rows("10.2", "10.3", "10.4")
def test_gradient_sync(two: Pool) -> None:
    two.run(same, gradient_sync)


def test_gradient_sync_with_inductor(two: Pool) -> None:
    two.run(inductor_same, gradient_sync, timeout=SLOW)


def gradient_sync(api: Api) -> Any:
    model, call = net_of_units(api)
    model.set_requires_gradient_sync(False)
    unsynced = [
        communications(lambda step=step: train_step(call, step))["reduce"] for step in (0, 1)
    ]
    kept = grads(model)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    synced = communications(lambda: train_step(call, 2))["reduce"]
    reduced = plain(grads(model))
    model.set_requires_gradient_sync(False)
    train_step(call, 3)
    return unsynced, kept, is_sharded(model), synced, reduced, grads(model)


@rows("10.3", "10.5")
def test_all_reduce_flag(four: Pool) -> None:
    four.run(close, all_reduce_flag)
    four.run(close_eager, all_reduce_flag_and_others)


def all_reduce_flag(api: Api) -> Any:
    model, call = net_of_units(api, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    model.set_requires_all_reduce(False)
    partial = [reductions(lambda: train_step(call)), grads(model)]
    model.set_requires_all_reduce(True)
    return partial, reductions(lambda: train_step(call, 1)), grads(model)


def all_reduce_flag_and_others(api: Api) -> Any:
    model, call = net_of_units(api, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    overridden = reductions(lambda: train_step(call, 2))
    model.set_requires_gradient_sync(False)
    unsynced = reductions(lambda: train_step(call, 3))
    return overridden, unsynced, grads(model)


def reductions(run: Any) -> Any:
    counts = communications(run)
    return counts["reduce"], counts["all_reduce"]


@rows("10.5")
def test_all_reduce_flag_without_hsdp(two: Pool) -> None:
    two.run(same, all_reduce_flag_without_hsdp)


def all_reduce_flag_without_hsdp(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_requires_all_reduce(False)
    counts = communications(lambda: train_step(api.compile(model)))
    return counts["reduce"], counts["all_reduce"], grads(model)


@rows("10.6")
def test_reshard_after_backward(two: Pool) -> None:
    two.run(same, reshard_after_backward)


@rows("10.6", status="eager")
def test_reshard_after_backward_registration(two: Pool) -> None:
    two.run(eager_same, reshard_after_backward_registration)


def reshard_after_backward(api: Api) -> Any:
    model, call = net_of_units(api)
    model.set_reshard_after_backward(False)
    losses = [train_step(call, step) for step in (0, 1)]
    model.set_reshard_after_backward(True)
    return losses, train_step(call, 2), is_sharded(model), grads(model)


def reshard_after_backward_registration(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model.set_reshard_after_backward(False)
    train_step(model)
    left = is_sharded(model), plain(params(model))
    counts = communications(lambda: model(batch(step=1)))["gather"]
    model[0].reshard()
    return left, counts, is_sharded(model)


@rows("10.7", "15.12")
def test_is_last_backward(two: Pool) -> None:
    two.run(same, is_last_backward)


def is_last_backward(api: Api) -> Any:
    model, call = net_of_units(api)
    seen = []
    for step in range(5):
        last = step in (2, 4)
        (model if step == 0 else model[2]).set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        seen.append([train_step(call, step), last and is_sharded(model)])
    return seen, grads(model)


@rows("15.12")
@pytest.mark.skipif(
    hasattr(FSDPModule, "finalize_backward"), reason="stock of torch 2.15 has a method for it"
)
def test_backward_that_is_ended_by_state(two: Pool) -> None:
    two.run(same, backward_that_is_ended_by_state)


def backward_that_is_ended_by_state(api: Api) -> Any:
    """As torch's pipeline schedules do, and copies of them in training repositories, which call it
    for inner units too.
    """
    model, call = net_of_units(api)
    seen = []
    for _ in range(2):
        for last in (False, False, True):
            for unit in (model, model[0], model[2]):
                unit.set_is_last_backward(last)
                unit.set_requires_gradient_sync(last)
            if not last:
                seen.append(train_step(call, len(seen)))
        states = [api.fully_shard.state(unit) for unit in (model, model[0], model[2])]
        for below in (below for state in states for below in state._state_ctx.all_states):
            if below._fsdp_param_group:
                below._fsdp_param_group.post_backward()
        for state in states:
            state._root_post_backward_final_callback()
        seen.append(plain(grads(model)))
    return seen


@rows("10.8")
def test_recurse(two: Pool) -> None:
    two.run(same, recurse_in_values)
    against_stock(
        two,
        same,
        recurse_is_a_keyword,
        "set_reduce_scatter_unused_params",
        "set_reduce_scatter_max_input_buffers",
    )


def recurse_in_values(api: Api) -> Any:
    model, call = net_of_units(api)
    model.set_requires_gradient_sync(False, recurse=False)
    train_step(call)
    without_root = plain(grads(model))
    model.set_requires_gradient_sync(True, recurse=False)
    model[2].set_requires_gradient_sync(False)
    train_step(call, 1)
    return without_root, grads(model)


def recurse_is_a_keyword(api: Api) -> Any:
    model = api.units(net(), "0")
    flags = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward")
    unused = "set_reduce_scatter_unused_params"
    found = [
        raised(lambda name=name: getattr(model, name)(True, False)) for name in (*flags, unused)
    ]
    found += [raised(lambda: model.set_reduce_scatter_max_input_buffers(2, True))]
    return found, model.set_reshard_after_forward(True, False)


@rows("10.9")
def test_retained_and_then_unused(two: Pool) -> None:
    two.run(same, retained_and_then_unused)


def retained_and_then_unused(api: Api) -> Any:
    model = api.units(Branches(), "left", "right")
    call = api.compile(model)
    model.set_requires_gradient_sync(False)
    branch_step(call, 0, use_right=True)
    model.set_requires_gradient_sync(True)
    counts = communications(lambda: branch_step(call, 1, use_right=False))
    return counts["reduce"], is_sharded(model), grads(model)


@rows("11.1", "11.2")
def test_frozen(two: Pool) -> None:
    two.run(same, frozen)


def frozen(api: Api) -> Any:
    model = net()
    model[0].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    api.units(model, "0", "2")
    call = api.compile(model)
    seen = [train_step(call), plain(grads(model))]
    for step, wanted in enumerate((True, False, True), start=1):
        model[0].weight.requires_grad_(wanted)
        model[2].weight.requires_grad_(not wanted)
        model.zero_grad()
        seen += [train_step(call, step), plain(grads(model))]
    return seen


@rows("11.2")
def test_whole_unit_frozen(two: Pool) -> None:
    two.run(same, whole_unit_frozen)


def whole_unit_frozen(api: Api) -> Any:
    model, call = net_of_units(api)
    seen = []
    for step, wanted in enumerate((True, False, True)):
        model[2].requires_grad_(wanted)
        model.zero_grad()
        seen += [
            communications(lambda step=step: train_step(call, step))["reduce"],
            plain(grads(model)),
        ]
    return seen


@rows("11.3")
def test_unfrozen_after_lazy_init(two: Pool) -> None:
    two.run(same, unfrozen_after_lazy_init, torch.float32)


def unfrozen_after_lazy_init(api: Api, dtype: torch.dtype) -> Any:
    model = net()
    model[2].requires_grad_(False)
    api.units(model, "0", "2", mp_policy=api.MixedPrecisionPolicy(param_dtype=dtype))
    call = api.compile(model)
    train_step(call)
    model[2].requires_grad_(True)
    model.zero_grad()
    train_step(call, 1)
    return grads(model)


@rows("11.3", status="improved")
def test_unfrozen_with_mixed_precision(two: Pool) -> None:
    """Before torch 2.14 stock has no dtype to cast the gradient to, and fails; ours casts as for
    any other parameter.
    """
    two.run(unfrozen_with_mixed_precision)


def unfrozen_with_mixed_precision() -> None:
    if not IS_BEFORE_2_14:
        same(unfrozen_after_lazy_init, torch.bfloat16)
    else:
        assert raised(lambda: unfrozen_after_lazy_init(Api("stock"), torch.bfloat16)) is not None
    each(unfrozen_has_the_original_dtype)


def unfrozen_has_the_original_dtype(api: Api) -> None:
    assert {g.dtype for g in unfrozen_after_lazy_init(api, torch.bfloat16).values()} == {
        torch.float32
    }


@rows("11.4")
def test_unused(two: Pool) -> None:
    two.run(same, unused)


def unused(api: Api) -> Any:
    model = api.units(Branches(), "left", "right")
    call = api.compile(model)
    seen = []
    for step, use_right in enumerate((False, True, False)):
        model.zero_grad()
        counts = communications(
            lambda step=step, use_right=use_right: branch_step(call, step, use_right)
        )
        seen += [counts["reduce"], is_sharded(model), plain(grads(model))]
    return seen


@rows("11.4", "11.11")
def test_unused_and_tied_in_one_group(two: Pool) -> None:
    two.run(same, unused_and_tied)


def unused_and_tied(api: Api) -> Any:
    model = api.fully_shard(Twice())
    call = api.compile(model)
    losses = [train_step(call, step) for step in (0, 1)]
    return losses, grads(model), model.a.weight is model.b.weight, model.state_dict()


@rows("11.6", status="eager")
def test_zeros_for_unused(two: Pool) -> None:
    against_stock(two, eager_same, zeros_for_unused, "set_reduce_scatter_unused_params")


def zeros_for_unused(api: Api) -> Any:
    model = api.fully_shard(Twice())
    model.set_reduce_scatter_unused_params(True)
    train_step(model)
    return grads(model)


@rows("11.6", status="eager")
def test_zeros_for_unused_breaks_the_graph(two: Pool) -> None:
    two.run(zeros_for_unused_breaks_the_graph)


def zeros_for_unused_breaks_the_graph() -> None:
    model = compiled_fsdp.fully_shard(Twice())
    model.set_reduce_scatter_unused_params(True)
    assert raised(lambda: Api("compiled").compile(model)(batch())) == "Unsupported"
    torch._dynamo.reset()
    train_step(torch.compile(model, backend="compiled_fsdp_eager"))
    assert not model.unused.grad.to_local().any()


@rows("11.6", status="eager")
def test_ranks_use_different_parameters(two: Pool) -> None:
    against_stock(
        two, eager_same, ranks_use_different_parameters, "set_reduce_scatter_unused_params"
    )


def ranks_use_different_parameters(api: Api) -> Any:
    model = api.units(Branches(), reshard_after_forward=False)
    model.set_reduce_scatter_unused_params(True)
    branch_step(model, 0, use_right=torch.distributed.get_rank() == 1)
    return grads(model)


@rows("11.6", status="eager")
def test_zeros_only_for_what_was_gathered(two: Pool) -> None:
    against_stock(
        two, eager_same, zeros_only_for_what_was_gathered, "set_reduce_scatter_unused_params"
    )


def zeros_only_for_what_was_gathered(api: Api) -> Any:
    model = api.units(Branches(), "left", "right")
    model.set_reduce_scatter_unused_params(True)
    counts = communications(lambda: branch_step(model, 0, use_right=False))
    return counts["reduce"], grads(model)


@rows("11.8")
def test_ignored(two: Pool) -> None:
    two.run(same, ignored)


def ignored(api: Api) -> Any:
    model = net()
    weight = model[2].weight
    model[2].bias.requires_grad_(False)
    ignored_params = {weight, model[2].bias}
    api.units(model, "0", ignored_params=ignored_params)
    losses = [train_step(api.compile(model), step) for step in (0, 1)]
    managed = [getattr(m, "_is_fsdp_managed_module", False) for m in model.modules()]
    return (
        losses,
        model[2].weight is weight,
        is_sharded(model),
        grads(model),
        model.state_dict(),
        managed,
    )
