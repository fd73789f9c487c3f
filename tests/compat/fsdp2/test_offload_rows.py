"""Chapter 13 where there is no accelerator: ours with a device that `kit.offload` plays beside
stock on the CPU, which has nothing to copy there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.compare import check_equal, plain
from kit.offload import Late, beside_host, negate
from kit.oracle import KINDS, Api, batch, net, rows, train_step
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from compiled_fsdp import CPUOffloadPolicy, fully_shard
from compiled_fsdp.units.flat import FlatBuffer
from compiled_fsdp.wire import copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


def as_stock_on_the_cpu(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function: `observe` is given an `Api`, and what turns values into what rests."""
    torch.manual_seed(0)
    expected = plain(observe(Api("stock"), _nothing, *args))
    for kind in KINDS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with beside_host() as seen:
            found = plain(observe(Api(kind), negate, *args))
        assert seen.num_begun
        check_equal(found, expected, f"{kind} offloaded against stock", 0.0, 0.0)


def _nothing(model: nn.Module) -> None:
    """Stock has no other memory."""


def steps(api: Api, model: Any, rest: Callable[[nn.Module], None]) -> list[Any]:
    """Losses, then gradients and parameters, of two steps of a model that was put to rest."""
    call = api.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(train_step(call, step))
        optimizer.step()
    rest(model)
    found = [(n, p.detach(), p.grad) for n, p in model.named_parameters()]
    rests = {p.device.type for p in model.parameters()} | {
        value.device.type
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return [losses, found, sorted(rests)]


@rows("13.1")
def test_what_rests_on_the_host_of_a_played_device(two: Pool) -> None:
    two.run(as_stock_on_the_cpu, on_the_host)


def on_the_host(api: Api, rest: Callable[[nn.Module], None]) -> Any:
    policy = api.CPUOffloadPolicy(pin_memory=not api.is_stock)
    model = api.units(net(), "0", "2", offload_policy=policy)
    rest(model)
    return steps(api, model, rest)


@rows("13.9")
def test_parameters_replaced_beside_a_played_device(two: Pool) -> None:
    two.run(as_stock_on_the_cpu, replaced)


def replaced(api: Api, rest: Callable[[nn.Module], None]) -> Any:
    """Loaded with `assign=True`, then cast; a buffer is where computation is."""
    policy = api.CPUOffloadPolicy(pin_memory=not api.is_stock)
    model = net()
    model[0].register_buffer("scale", torch.full((1,), 2.0))
    model = api.units(model, "0", "2", offload_policy=policy)
    with mock.patch.object(copies, "pinned", wraps=copies.pinned) as pins:
        given = {n: v.clone() for n, v in model.state_dict().items()}
        model.load_state_dict(given, assign=True)
        model.double()
    if not api.is_stock:
        assert pins.call_count >= 2 * 3, pins.call_count
    rest(model)
    model.float()
    return steps(api, model, rest), model[0].scale


@rows("13.4", status="eager")
def test_gradients_on_their_way_to_the_host_of_a_played_device(two: Pool) -> None:
    two.run(on_their_way)


def on_their_way() -> None:
    """Copies that are under way when backward comes to the model's input: only into pinned memory,
    where nothing is added to and nobody is called. Afterwards none is.
    """
    for pins, reads, expected in ((True, "", 3), (False, "", 0), (True, "hook", 2)):
        with beside_host():
            model = net(depth=3)
            for i in (0, 2, 4):
                fully_shard(model[i], offload_policy=CPUOffloadPolicy(pin_memory=pins))
            fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=pins))
            negate(model)
            seen: list[Tensor] = []
            if reads == "hook":
                weight = model[4].weight
                weight.register_post_accumulate_grad_hook(
                    lambda p, seen=seen: seen.append(p.grad.to_local().clone())
                )
            for expected_now in (expected, 0):  # the second adds to what is there
                counted: list[int] = []
                x = batch(requires_grad=True)
                x.register_hook(lambda _, counted=counted: counted.append(_gradients_under_way()))
                model(x).square().mean().backward()
                assert counted == [expected_now], (pins, reads, counted)
                assert not Late.under_way
            assert all(value.isfinite().all() for value in seen)
            assert len(seen) == (2 if reads else 0)


def _gradients_under_way() -> int:
    return sum(late.is_to_host for late in Late.under_way)


@rows("5.8", "13.8")
@pytest.mark.parametrize("pin_memory", [True, False])
def test_parameters_that_were_moved_off_the_host(fake_world: None, pin_memory: bool) -> None:
    """One rests on a fake accelerator, before the first forward and after it; stock's words need a
    real one.
    """
    with beside_host():
        model: Any = net()
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        fully_shard(model, offload_policy=policy, reshard_after_forward=True)
        for _ in range(2):
            param = model[2].weight
            before = param._local_tensor
            with FakeTensorMode():
                param._local_tensor = torch.empty(before.shape, device="cuda")
            with (
                mock.patch.object(FlatBuffer, "refresh"),  # which would read what is not there
                pytest.raises(
                    RuntimeError,
                    match=r"should be materialized on CPU.*\[\('2\.weight', device\(type='cuda'",
                ),
            ):
                model(torch.ones(4, 6))
            param._local_tensor = before
            model(torch.ones(4, 6))
