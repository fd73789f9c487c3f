"""Chapters 6, 9, 10, 14, 15 and 16: the runtime's rules, precision, debug levels, environment
variables, the gradient scaler.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import plain
from kit.oracle_fsdp1 import (
    Api,
    Block,
    batch,
    each,
    eager_same,
    full,
    grads,
    loss_of,
    net,
    outcome,
    rows,
    same,
    train_step,
    warned,
)
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.optim import _apply_optimizer_in_backward

from compiled_fsdp.eager.runtime import Runtime
from compiled_fsdp.sharded_grad_scaler import ShardedGradScaler
from compiled_fsdp.wire import gloo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.pool import Pool

BF16 = torch.bfloat16


@rows("6.1", "6.3", "6.4", "6.5", "6.31")
def test_lazy_init(two: Pool) -> None:
    two.run(eager_same, lazy_init)


def lazy_init(api: Api) -> Any:
    found: list[Any] = []
    firsts: dict[str, Any] = {
        "forward": lambda m: m(batch()).shape,
        "no_sync": lambda m: m.no_sync().__enter__(),
        "clip": lambda m: m.clip_grad_norm_(1.0),
        "summon": lambda m: len(full(api, m)),
        "state": lambda m: len(m.state_dict()),
        "check": lambda m: m.check_is_root(),
        "modules": lambda m: len(api.FSDP.fsdp_modules(m, root_only=True)),
        "plain modules": lambda m: len(api.FSDP.fsdp_modules(m)),
    }
    for name, first in firsts.items():
        model = api.blocks()
        with warned():
            found.append(
                [
                    name,
                    model._is_root,
                    outcome(lambda m=model, f=first: f(m)),
                    model._is_root,
                    model[1]._is_root,
                ]
            )
    model = api.blocks()
    model[1](torch.randn(2, 5))
    found.append(outcome(lambda: model(batch()))[0])
    mixed = net()
    mixed[1] = api.wrap(mixed[1], use_orig_params=True)
    found.append(outcome(lambda: api.wrap(mixed)(batch())))
    mixed = net()
    mixed[1] = api.wrap(mixed[1], limit_all_gathers=False)
    found.append(outcome(lambda: api.wrap(mixed)(batch())))
    moved = api.wrap(net()).to("meta")
    found.append(outcome(lambda: moved(batch()))[0])
    model = api.blocks()
    model[0].register_forward_pre_hook(lambda *_: model.no_sync().__enter__())
    found.append(outcome(lambda: model(batch())))
    return found


@rows("6.2", "10.4")
def test_cpu_offload(two: Pool) -> None:
    two.run(eager_same, cpu_offload)


def cpu_offload(api: Api) -> Any:
    model = api.wrap(net(), cpu_offload=CPUOffload(offload_params=True))
    return outcome(lambda: model(batch()))[0]


@contextmanager
def gathers(api: Api) -> Iterator[list[str]]:
    """The parameters of each gather that this rank starts inside, in order."""
    seen: list[str] = []
    owner, name = (
        (FlatParamHandle, "_all_gather_flat_param") if api.is_stock else (Runtime, "start_gathers")
    )
    original = getattr(owner, name)

    def note(self: Any, *args: Any) -> Any:
        flat = self.flat_param if api.is_stock else self.unit.wrapper._flat_param
        if flat is not None:
            seen.append(f"{tuple(flat._unpadded_unsharded_size)}")
        return original(self, *args)

    with mock.patch.object(owner, name, note):
        yield seen


class Sized(nn.Module):
    """Three layers of different sizes, as units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 10), nn.Linear(10, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def sized(api: Api, **options: Any) -> Any:
    model = Sized()
    for i in range(4):
        model.layers[i] = api.wrap(model.layers[i], **options)
    return api.wrap(model, **options)


@rows("6.21", "6.24", "6.8", "6.14", status="eager")
def test_order_of_gathers(two: Pool) -> None:
    two.run(order_rows)


def order_rows() -> None:
    for prefetch in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        for forward in (False, True):
            same(
                lambda api, p=prefetch, f=forward: order_of_gathers(
                    api, backward_prefetch=p, forward_prefetch=f
                ),
                kinds=("eager",),
            )


def order_of_gathers(api: Api, **options: Any) -> Any:
    model = sized(api, **options)
    train_step(model)
    model.zero_grad()
    with gathers(api) as seen:
        train_step(model, 1)
    return seen


@rows("6.20", status="improved")
def test_limit_of_gathers(two: Pool) -> None:
    """Never more units are gathered at once than in stock. The CPU need not wait for that: gathers
    are allocated on the stream that computes, which reuses what it has freed
    (`tests/numerics/test_cuda.py`, not run on a device yet).
    """
    two.run(limits)


def limits() -> None:
    for limit in (True, False):
        for forward in (False, True):
            options = {"limit_all_gathers": limit, "forward_prefetch": forward}
            ours, stocks = (gathered_at_once(Api(kind), **options) for kind in ("eager", "stock"))
            assert (max(ours), max(stocks)) == ((2, 3) if forward else (2, 2)), (ours, stocks)


def gathered_at_once(api: Api, **options: Any) -> list[int]:
    """How many units are gathered, or being gathered, after each change of that."""
    model = sized(api, **options)
    train_step(model)
    model.zero_grad()
    counts: list[int] = []
    whole: set[int] = set()
    owner, start, end = (
        (FlatParamHandle, "_all_gather_flat_param", "_free_unsharded_flat_param")
        if api.is_stock
        else (Runtime, "start_gathers", "reshard")
    )

    def then(original: Any, change: Any) -> Any:
        def call(self: Any, *args: Any, **how: Any) -> Any:
            result = original(self, *args, **how)
            is_with_params = api.is_stock or self.unit.wrapper._flat_param is not None
            if is_with_params and (api.is_stock or change == whole.add or not self.is_unsharded):
                change(id(self))
                counts.append(len(whole))
            return result

        return call

    with (
        mock.patch.object(owner, start, then(getattr(owner, start), whole.add)),
        mock.patch.object(owner, end, then(getattr(owner, end), whole.discard)),
    ):
        train_step(model, 1)
    return [count for count, before in zip(counts, [0, *counts], strict=False) if count != before]


@rows("6.7", "9.9", "9.10", "9.12", "9.13", "9.8")
def test_casts(two: Pool) -> None:
    two.run(same, casts)


class Seen(nn.Module):
    """Notes dtypes of its inputs and its buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.inner = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.long))

    def forward(
        self, x: torch.Tensor, *, more: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        dtypes = (x.dtype, more["y"].dtype, more["n"].dtype, self.scale.dtype, self.count.dtype)
        y = self.layer(x.to(self.layer.weight.dtype))
        return self.inner(y), dtypes


def casts(api: Api) -> Any:
    found: list[Any] = []
    for root in (True, False):
        for own in (not root,):
            policy = MixedPrecision(
                BF16,
                buffer_dtype=torch.float16,
                cast_forward_inputs=own,
                cast_root_forward_inputs=root,
            )
            model = Seen()
            model.inner = api.wrap(model.inner, use_orig_params=True, mixed_precision=policy)
            model = api.wrap(model, use_orig_params=True, mixed_precision=policy)
            more = {"y": torch.ones(2), "n": torch.ones(2, dtype=torch.long)}
            out, dtypes = api.compile(model)(
                torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), more=more
            )
            out.float().sum().backward()
            found += [out.detach(), dtypes, grads(model), [b.dtype for b in model.buffers()]]
    empty = api.wrap(nn.Tanh(), mixed_precision=MixedPrecision(BF16))
    found.append(empty(torch.ones(2)).dtype)
    outer = api.wrap(
        nn.Sequential(
            api.wrap(nn.Tanh(), mixed_precision=MixedPrecision(BF16, cast_forward_inputs=True))
        )
    )
    return found, outer(torch.ones(2)).dtype


@rows("9.11")
def test_root_that_casts_as_any(two: Pool) -> None:
    two.run(same, root_that_casts)


def root_that_casts(api: Api) -> Any:
    policy = MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    model = api.wrap(nn.Linear(3, 2), mixed_precision=policy, use_orig_params=True)
    return api.compile(model)(torch.ones(2, 3)).dtype


@contextmanager
def environment(name: str) -> Iterator[None]:
    """A variable that is set while models are made."""
    import os

    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@rows("9.14", "15.3")
def test_full_precision_in_eval(two: Pool) -> None:
    two.run(same, full_precision_in_eval)


def full_precision_in_eval(api: Api) -> Any:
    with environment("FSDP_USE_FULL_PREC_IN_EVAL"):
        model = api.wrap(
            Seen(),
            use_orig_params=True,
            mixed_precision=MixedPrecision(BF16, buffer_dtype=torch.float16),
        )
    call, found = api.compile(model), []
    more = {"y": torch.ones(2), "n": torch.ones(2, dtype=torch.long)}
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for training in (True, False, True):
        model.train(training)
        model.zero_grad()
        with torch.set_grad_enabled(training):
            out, dtypes = call(x, more=more)
        found += [out.detach(), dtypes]
        if training:
            out.float().sum().backward()
            found.append(plain(grads(model)))
    return found


@rows("15.1", "15.2")
def test_environment(two: Pool) -> None:
    two.run(same, environment_rows)


class Strict(nn.Linear):
    """Watches what is assigned to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and getattr(self, "is_closed", False):
            raise AssertionError("assigned")
        super().__setattr__(name, value)


def environment_rows(api: Api) -> Any:
    found = []
    strict = Strict(3, 2)
    strict.is_closed = True
    with environment("FSDP_USE_UNSAFE_SETATTR"):
        model = api.wrap(strict, use_orig_params=True)
    found.append(train_step(api.compile(model)))
    with environment("FSDP_SKIP_WRITEBACK_CHECK"):
        model = api.wrap(net(), use_orig_params=True)
    before = train_step(api.compile(model))
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    return found, before, train_step(api.compile(model))


@rows("15.4", "15.5", status="improved")
def test_ablation(two: Pool) -> None:
    """Works, in a graph too; on torch 2.13 stock asks a fake group for what it does not have."""
    two.run(each, ablation)


def ablation(api: Api) -> None:
    """What is faked sends nothing, the other kind as ever."""
    for name, faked in (
        ("FSDP_USE_FAKE_ALL_GATHER", "all_gather"),
        ("FSDP_USE_FAKE_REDUCE", "all_to_all"),
    ):
        with environment(name):
            model = api.wrap(net(), use_orig_params=True)
        with mock.patch.object(gloo, "_exchange", wraps=gloo._exchange) as exchange:
            train_step(api.compile(model))
        assert {call.args[0] for call in exchange.call_args_list} == {
            "all_gather",
            "all_to_all",
        } - {faked}


@rows("6.17", status="eager")
def test_second_order(two: Pool) -> None:
    two.run(eager_same, second_order)


def second_order(api: Api) -> Any:
    model = api.wrap(net(), use_orig_params=True)
    return outcome(lambda: loss_of(model).backward(create_graph=True))[0]


@rows("6.26", status="eager")
def test_submodule_alone(two: Pool) -> None:
    two.run(eager_same, submodule_alone)


def submodule_alone(api: Api) -> Any:
    model = api.wrap(net(), use_orig_params=True)
    return outcome(lambda: model.module[0](batch()))[0]


@rows("6.29")
def test_optimizer_in_backward(two: Pool) -> None:
    two.run(same, optimizer_in_backward)


def optimizer_in_backward(api: Api) -> Any:
    flat, model = net(), net()
    for m in (flat, model):
        _apply_optimizer_in_backward(torch.optim.SGD, m.parameters(), {"lr": 0.1})
    flat_model = api.wrap(flat)
    _apply_optimizer_in_backward(torch.optim.SGD, flat_model.parameters(), {"lr": 0.1})
    sharded = api.blocks(model, use_orig_params=True)
    losses = [train_step(api.compile(sharded), step) for step in range(2)]
    return outcome(lambda: flat_model(batch()))[0], losses, full(api, sharded), grads(sharded)


@contextmanager
def level(value: dist.DebugLevel) -> Iterator[None]:
    """Torch's debug level."""
    before = dist.get_debug_level()
    dist.set_debug_level(value)
    try:
        yield
    finally:
        dist.set_debug_level(before)


class Either(nn.Module):
    """Two blocks in either order."""

    def __init__(self, api: Api) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.a, self.b = nn.Linear(3, 5), api.wrap(Block(5)), api.wrap(Block(5))

    def forward(self, x: torch.Tensor, is_swapped: bool = False) -> torch.Tensor:
        x = self.first(x)
        return self.a(self.b(x)) if is_swapped else self.b(self.a(x))


@rows("14.1", "14.2", "14.3", status="eager")
def test_order_checks(two: Pool) -> None:
    two.run(eager_same, order_checks)


def order_checks(api: Api) -> Any:
    found: list[Any] = []
    with level(dist.DebugLevel.DETAIL):
        model = api.wrap(Either(api))
        found.append(outcome(lambda: model(batch(), dist.get_rank() == 1))[0])
        model = api.wrap(Either(api))
        with warned() as given:
            for swapped in (False, True, True):
                model(batch(), swapped).sum().backward()
        found.append([text for text in given if "order" in text])
        model = api.wrap(Either(api)).eval()
        with warned() as given:
            for swapped in (False, True):
                model(batch(), swapped)
        found.append(given)
    model = api.wrap(Either(api))
    with warned() as given:
        for swapped in (False, True):
            model(batch(), swapped).sum().backward()
    return found, given


@rows("14.4", status="eager")
def test_level_info(two: Pool) -> None:
    two.run(eager_same, level_info)


def level_info(api: Api) -> Any:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "post-backward" in record.getMessage():
                lines.append(record.getMessage())

    logger = logging.getLogger("torch.distributed.fsdp._runtime_utils")
    logger.addHandler(handler := Keep())
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with level(dist.DebugLevel.INFO):
            model = api.wrap(net(), use_orig_params=True)
            train_step(model)
            for p in model.parameters():
                p.data = p.data.clone()
            with warned() as given:
                train_step(model, 1)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines, sorted(set(given))


@rows("16.2", "16.3", "16.4", "16.5", "16.7", "16.8", "16.9", "16.10")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_scaler(two: Pool, use_orig_params: bool) -> None:
    two.run(same, scaler, use_orig_params)


def scaler(api: Api, use_orig_params: bool) -> Any:
    model = api.wrap(net(), use_orig_params=use_orig_params)
    call, optimizer = api.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scale = ShardedGradScaler(device="cpu", init_scale=16.0, growth_interval=2)
    found: list[Any] = []
    for step in range(5):
        loss = loss_of(call, step)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        found.append(outcome(lambda: scale.unscale_(optimizer))[0])
        found.append(plain(grads(model)) if step != 2 else None)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        found += [scale.get_scale(), full(api, model)]
    found += [
        outcome(lambda: scale.scale(3)),
        plain(list(scale.scale([torch.ones(1), torch.ones(2)]))),
        outcome(scale.update)[0],
    ]
    scale.update(4.0)
    found.append(scale.get_scale())
    found += [
        outcome(lambda: scale.update(torch.ones(2)))[0],
        outcome(lambda: scale.update(torch.ones((), requires_grad=True)))[0],
    ]
    off = ShardedGradScaler(device="cpu", enabled=False)
    found += [
        off.scale(torch.ones(2)),
        outcome(lambda: off.unscale_(optimizer)),
        outcome(off.update),
    ]
    with warned() as given:
        found.append(ShardedGradScaler().is_enabled())
    return found, given
