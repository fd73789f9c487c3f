"""CPU offload: what rests on the host, and a device that `kit.offload` plays, compute bit for bit
what they compute without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal, plain
from kit.harness import SLOW
from kit.offload import beside_host, negate
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from compiled_fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    overlap_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

BACKENDS = {"compiled": "compiled_fsdp_eager", "inductor": "inductor"}
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Parameters of odd sizes, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(13, 13), nn.Linear(13, 13)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def net(num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_layers)], nn.Linear(13, 3))


def two_front_ends(
    kind: str, offload: bool | None, reshard: bool | None, num_layers: int
) -> nn.Module:
    model = net(num_layers)
    if kind == "fsdp2":
        given = {} if offload is None else {"offload_policy": CPUOffloadPolicy(pin_memory=offload)}
        model[1].b.bias.requires_grad_(False)
        for unit in (*model[:num_layers], model):
            fully_shard(unit, reshard_after_forward=reshard, mp_policy=LOW, **given)
        return model
    strategy = ShardingStrategy.SHARD_GRAD_OP if reshard is False else ShardingStrategy.FULL_SHARD
    strategy = ShardingStrategy.NO_SHARD if kind == "fsdp1 whole" else strategy
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(LOW.param_dtype, LOW.reduce_dtype),
        cpu_offload=None if offload is None else CPUOffload(offload_params=True),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def steps(
    model: nn.Module, call: Callable[..., Tensor], *, is_offloaded: bool, num_backwards: int = 1
) -> list[Any]:
    """What three steps compute, and what is left of them."""
    if is_offloaded:
        negate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: list[Any] = []
    for _ in range(3):
        for _ in range(num_backwards):
            loss = call(torch.randn(4, 13, generator=generator)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found.append({n: _sign(p.grad, is_offloaded) for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(call(torch.ones(4, 13)))
    found.append({n: _sign(p.detach(), is_offloaded) for n, p in model.named_parameters()})
    return found


def _sign(value: Tensor | None, is_offloaded: bool) -> Tensor | None:
    return -value if is_offloaded and value is not None else value


def offloaded_as_without(
    front: str, mode: str, offload: bool, num_backwards: int = 1, reshard: bool | None = None
) -> None:
    found = []
    for is_offloaded in (False, True):
        torch._dynamo.reset()
        with beside_host() as copies:
            num_layers = 4 if mode == "eager" else 2
            given = offload if is_offloaded else None
            model = two_front_ends(front, given, reshard, num_layers)
            call: Any = model
            if mode in BACKENDS:
                call = torch.compile(model, backend=BACKENDS[mode], fullgraph=True)
            found.append(
                plain(steps(model, call, is_offloaded=is_offloaded, num_backwards=num_backwards))
            )
        assert bool(copies.num_begun) == is_offloaded
    check_equal(found[1], found[0], f"{front} {mode} offloaded", 0.0, 0.0)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_fully_shard(two: Pool, mode: str, offload: bool) -> None:
    two.run(offloaded_as_without, "fsdp2", mode, offload)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_parameters_that_stay(two: Pool, mode: str) -> None:
    two.run(offloaded_as_without, "fsdp2", mode, True, 2, False)


def test_inductor(two: Pool) -> None:
    two.run(offloaded_as_without, "fsdp2", "inductor", True, timeout=SLOW)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("front", ["fsdp1", "fsdp1 whole"])
def test_wrapper(two: Pool, front: str, mode: str) -> None:
    two.run(offloaded_as_without, front, mode, True)


def test_accumulation_in_the_wrapper(two: Pool) -> None:
    """Stock replaces what is there (row 6.19); ours adds to it."""
    two.run(offloaded_as_without, "fsdp1", "eager", True, 2, False)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_overlapped_optimizer(two: Pool, mode: str) -> None:
    two.run(overlapped, mode)


def overlapped(mode: str) -> None:
    """A step inside backward, of what has come to the host by then."""
    found = []
    for is_offloaded in (False, True):
        torch._dynamo.reset()
        with beside_host():
            model = two_front_ends("fsdp2", True if is_offloaded else None, None, 2)
            if is_offloaded:
                negate(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            overlap_optimizer(model, optimizer, in_backward=True)
            call: Any = model
            if mode in BACKENDS:
                call = torch.compile(model, backend=BACKENDS[mode], fullgraph=True)
            losses = []
            for step in range(3):
                loss = call(torch.full((4, 13), 1.0 + step)).square().mean()
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            params = [_sign(p.detach(), is_offloaded) for p in model.parameters()]
            found.append(plain([losses, params]))
    check_equal(found[1], found[0], f"{mode} offloaded, stepped in backward", 0.0, 0.0)
