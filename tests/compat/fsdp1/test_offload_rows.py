"""Chapter 10 where there is no accelerator: ours with a device that `kit.offload` plays, beside
stock on the CPU without offload, which it does not have there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from kit.compare import check_equal, plain
from kit.offload import beside_host, negate
from kit.oracle import KINDS, batch, net, rows, train_step
from kit.oracle_fsdp1 import Api
from torch.distributed.fsdp import CPUOffload

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


def as_stock_without(observe: Callable[..., Any], kinds: tuple[str, ...] = KINDS) -> None:
    """Worker function: `observe` is given an `Api`, options, and a sign: that of what rests."""
    torch.manual_seed(0)
    expected = plain(observe(Api("stock"), {}, 1.0))
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with beside_host() as seen:
            options = {"cpu_offload": CPUOffload(offload_params=True)}
            found = plain(observe(Api(kind), options, -1.0))
        assert seen.num_begun
        check_equal(found, expected, f"{kind} offloaded against stock without", 0.0, 0.0)


def made(api: Api, options: dict[str, Any], sign: float) -> Any:
    model = net()
    for i in (0, 2):
        model[i] = api.wrap(model[i], **options)
    model = api.wrap(model, **options)
    if sign < 0:
        negate(model)
    return model


@rows("10.1")
def test_what_rests_on_the_host_of_a_played_device(two: Pool) -> None:
    two.run(as_stock_without, on_the_host)


def on_the_host(api: Api, options: dict[str, Any], sign: float) -> Any:
    model = made(api, options, sign)
    call = api.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(train_step(call, step))
        optimizer.step()
    return losses, [(n, sign * p.detach(), sign * p.grad) for n, p in model.named_parameters()]


@rows("10.2")
def test_no_sync_beside_a_played_device(two: Pool) -> None:
    two.run(as_stock_without, no_sync)


def no_sync(api: Api, options: dict[str, Any], sign: float) -> Any:
    """Meanwhile gradients are the device's: with the sign of what is there."""
    model = made(api, options, sign)
    call = api.compile(model)
    with model.no_sync():
        train_step(call, 0)
    kept = [p.grad.clone() for p in model.parameters()]
    train_step(call, 1)
    return kept, [sign * p.grad for p in model.parameters()]


@rows("10.3")
def test_clipping_beside_a_played_device(two: Pool) -> None:
    two.run(as_stock_without, clipping)


def clipping(api: Api, options: dict[str, Any], sign: float) -> Any:
    model = made(api, options, sign)
    train_step(api.compile(model), 0)
    norm = model.clip_grad_norm_(0.01)
    return norm, norm.device.type, [sign * p.grad for p in model.parameters()]


@rows("6.19", status="improved")
def test_accumulation_beside_a_played_device(two: Pool) -> None:
    """Adds, as without offload; stock replaces what is there."""
    two.run(as_stock_without, accumulation)


def accumulation(api: Api, options: dict[str, Any], sign: float) -> Any:
    model = made(api, options, sign)
    call = api.compile(model)
    for step in range(2):
        call(batch(step=step)).square().mean().backward()
    return [sign * p.grad for p in model.parameters()]
