"""`Muon` and `update_whole`: the numbers of the unsharded model, whole matrices at one rank each,
exchanges under way while others are updated.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal, whole
from kit.harness import Options, batch_of, build, compiled, mesh_of, shard
from kit.models import Net, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compiled_fsdp import (
    DivergenceError,
    FullyShardedDataParallel,
    Muon,
    compile_step,
    fully_shard,
    overlap_optimizer,
    update_whole,
)
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.optim import exchange, muon, owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.pool import Pool

STEPS = 3
AT_OWNERS, EVERYWHERE = -1.0, 1e9  # latencies with which every matrix has an owner, or none has
ULP = 2.0**-7  # relative: torch's CPU kernel rounds `add_(x, alpha=)` of bf16 in two ways


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.ndim == 2]


def gradients(model: nn.Module, call: Callable[..., Any], name: str, step: int) -> dict[str, Any]:
    """One backward; copies of the whole gradients."""
    dtype = next(model.parameters()).dtype
    batch = [each.to(dtype) if each.is_floating_point() else each for each in batch_of(name, step)]
    loss_of(call(*batch)).backward()
    return {name: whole(p.grad) for name, p in matrices(model) if p.grad is not None}


def state_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    found = {name: whole(p) for name, p in matrices(model)}
    for name, p in matrices(model):
        if p in optimizer.state:
            found[f"{name}, momentum"] = whole(optimizer.state[p]["momentum_buffer"])
    return found


def check(
    apply: Callable[..., Any],
    call_of: Callable[[Any], Any],
    options: Options,
    latency: float = AT_OWNERS,
    dtype: torch.dtype = torch.float32,
    rtol: float = 0.0,
    **settings: Any,
) -> None:
    """The same gradients, sharded and unsharded; every bit of parameters and momentum."""
    model = shard(build(options.model).to(dtype), options, apply)
    plain = build(options.model).to(dtype)
    optimizer = Muon(matrices(model), bucket_bytes=600, **settings)
    kind = Muon if "ns_dtype" in settings else torch.optim.Muon
    reference = kind([p for _, p in matrices(plain)], **settings)
    call = call_of(model)
    with mock.patch.object(owners, "LATENCY", latency):
        for step in range(STEPS):
            found = gradients(model, call, options.model, step)
            for name, p in matrices(plain):
                p.grad = found.get(name)
            for each in (optimizer, reference):
                each.step()
            for p in model.parameters():  # those that no optimizer has too
                p.grad = None
            what = f"{options}, {settings}, step {step}"
            check_equal(
                state_of(optimizer, model), state_of(reference, plain), what, rtol, rtol / 8
            )


def as_it_is(model: Any) -> Any:
    return model


def check_all() -> None:
    for name in ("odd", "unused", "tied", "frozen"):
        check(fully_shard, as_it_is, Options(name), lr=0.05)
    check(fully_shard, compiled, Options("odd"), lr=0.05)
    check(stock_fully_shard, as_it_is, Options("odd"), lr=0.05)
    check(fully_shard, as_it_is, Options("odd"), latency=EVERYWHERE, lr=0.05)
    more = {"nesterov": False, "momentum": 0.9, "weight_decay": 0.3, "ns_steps": 3}
    check(fully_shard, as_it_is, Options("odd"), adjust_lr_fn="match_rms_adamw", **more)
    check(fully_shard, as_it_is, Options("odd"), ns_dtype=torch.float32)
    check(fully_shard, as_it_is, Options("odd"), lr=torch.tensor(0.05))
    check(fully_shard, as_it_is, Options("odd"), dtype=torch.bfloat16, rtol=ULP, lr=0.05)


def test_the_numbers_of_the_unsharded_model(two: Pool) -> None:
    two.run(check_all)


def check_four() -> None:
    check(fully_shard, as_it_is, Options("odd"), lr=0.05)
    check(fully_shard, as_it_is, Options("odd"), latency=EVERYWHERE, lr=0.05)
    for latency in (AT_OWNERS, EVERYWHERE):
        check(fully_shard, as_it_is, Options("odd", mesh="hsdp"), latency=latency, lr=0.05)


def test_four_ranks_and_replicas(four: Pool) -> None:
    four.run(check_four)


# -- what travels when


def check_overlap() -> None:
    """Two buckets are on their way while one is orthogonalized, and its results are awaited behind
    the next one: each rank orthogonalizes half of the matrices.
    """
    model = shard(build("equal_units"), Options("equal_units"), fully_shard)
    params = [p for _, p in matrices(model)]
    optimizer = Muon(params, bucket_bytes=1)
    said: list[str] = []
    start, wait, update = exchange.Exchange.__init__, exchange.Exchange.wait, muon.newton_schulz

    def noted(self: Any, *args: Any) -> None:
        self.what = args[-1].removeprefix("Muon ")
        said.append(f"start {self.what}")
        start(self, *args)

    def awaited(self: Any) -> Any:
        said.append(f"wait {self.what}")
        return wait(self)

    def updated(*args: Any) -> Any:
        said.append("update")
        return update(*args)

    gradients(model, model, "equal_units", 0)
    with (
        mock.patch.object(exchange.Exchange, "__init__", noted),
        mock.patch.object(exchange.Exchange, "wait", awaited),
        mock.patch.object(muon, "newton_schulz", updated),
        mock.patch.object(owners, "LATENCY", AT_OWNERS),
    ):
        optimizer.step()
    short = [re.sub(r" \(group 0, parameter (\d)\)", r" \1", each) for each in said]
    mine = [number % 2 == dist.get_rank() for number in range(4)]
    expected = [f"start to owners {number}" for number in range(3)]
    for number in range(4):
        expected += [f"wait to owners {number}", *["update"] * mine[number], f"start back {number}"]
        expected += ["start to owners 3"] if number == 0 else []
        expected += [f"wait back {number - 1}"] if number else []
    assert short == [*expected, "wait back 3"]


def test_buckets_travel_while_others_are_orthogonalized(two: Pool) -> None:
    two.run(check_overlap)


# -- inside of training


def two_optimizers(model: nn.Module, kind: Any = Muon) -> list[torch.optim.Optimizer]:
    """AdamW for what is no matrix, first."""
    held = {id(p) for _, p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in held]
    return [
        torch.optim.AdamW(others, lr=0.02),
        kind([p for _, p in matrices(model)], lr=0.05),
    ]


def steps(call: Any, optimizers: list[Any], name: str, after: Any = None) -> list[float]:
    losses = []
    for step in range(4):
        loss = loss_of(call(*batch_of(name, step)))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if after is not None:
            after()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def check_overlapped() -> None:
    """With `overlap_optimizer`: the same bits; gathers ahead start where the other optimizer has
    stepped before, and only then.
    """
    for kind in ("compiled", "eager"):
        for is_last in (True, False):
            results = []
            for overlaps in (False, True):
                torch._dynamo.reset()
                model = shard(build("odd"), Options("odd"), fully_shard)
                adamw, optimizer = two_optimizers(model)
                ahead: list[int] = []
                if overlaps:
                    overlap_optimizer(model, optimizer)
                call = compiled(model) if kind == "compiled" else model
                order = [adamw, optimizer] if is_last else [optimizer, adamw]
                losses = steps(call, order, "odd", lambda: ahead.append(num_ahead(model)))  # noqa: B023
                assert [bool(each) for each in ahead] == [overlaps and is_last] * 4, (kind, ahead)
                results.append([losses, [whole(p) for p in model.parameters()]])
            check_equal(results[1], results[0], f"{kind}, Muon last: {is_last}")


def num_ahead(model: nn.Module) -> int:
    states = states_below(model)
    eager = sum(bool(state.runtime.pending) for state in states)
    return eager + sum(len(flat.ahead) for state in states for flat in state.unit.flats)


def test_overlap_optimizer(two: Pool) -> None:
    two.run(check_overlapped)
