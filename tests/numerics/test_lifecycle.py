"""Before the first step: meta initialisation, conversion to another dtype; what a user does to
parameters in between.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.harness import Options, batch_of, build, shard
from kit.models import loss_of
from kit.pool import Pool
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import fully_shard

WAYS = ((stock_fully_shard, False), (fully_shard, False), (fully_shard, True))


def run_steps(
    model: nn.Module, compiled: bool, dtype: torch.dtype = torch.float32, count: int = 3
) -> list[Any]:
    call = (
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True) if compiled else model
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    seen: list[Any] = []
    for number in range(count):
        loss = loss_of(call(batch_of("odd", number)[0].to(dtype)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, *(p.to_local().clone() for p in model.parameters())]


def same(results: list[list[Any]]) -> bool:
    pairs = [(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("mesh_size", [2, 4])
def test_meta_init(request: pytest.FixtureRequest, mesh_size: int) -> None:
    pool: Pool = request.getfixturevalue({2: "two", 4: "four"}[mesh_size])
    pool.run(meta_init)


def meta_init() -> None:
    results = []
    mesh = "1d" if torch.distributed.get_world_size() == 2 else "hsdp"
    for apply, compiled in WAYS:
        with torch.device("meta"):
            model = build("odd")
        shard(model, Options("odd", mesh=mesh), apply)
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        with torch.no_grad():
            for p in (
                model.parameters()
            ):  # by shard: the same on every way, whatever DTensor's random numbers do
                torch.nn.init.normal_(p.to_local(), std=0.4)
        results.append(run_steps(model, compiled))
    assert len(set(results[0][:3])) == 3
    assert same(results)


def test_reset_parameters_after_to_empty(two: Pool) -> None:
    two.run(reset_parameters)


def reset_parameters() -> None:
    results = []
    for apply, compiled in WAYS:
        with torch.device("meta"):
            model = build("odd")
        shard(model, Options("odd"), apply)
        model.to_empty(device="cpu")
        torch.manual_seed(5)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        results.append(run_steps(model, compiled))
    assert same(results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_to_dtype(two: Pool, dtype: torch.dtype) -> None:
    two.run(converted, dtype)


def converted(dtype: torch.dtype) -> None:
    results = []
    for apply, compiled in WAYS:
        model = shard(build("odd"), Options("odd"), apply).to(dtype)
        results.append(run_steps(model, compiled, dtype))
        assert all(p.dtype == dtype for p in model.parameters())
    assert same(results)


def test_parameters_changed_by_hand(two: Pool) -> None:
    two.run(changed_by_hand)


def changed_by_hand() -> None:
    """Writes to the sharded parameters between steps, also through `.data`, reach the next
    forward.
    """
    results = []
    for apply, compiled in WAYS:
        model = shard(build("odd"), Options("odd"), apply)
        first = run_steps(model, compiled, count=2)[:2]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
                p.data.add_(0.01)
                p.to_local().sub_(0.005)
        results.append([*first, *run_steps(model, compiled, count=2)])
    assert same(results)


def test_freeze_between_steps(two: Pool) -> None:
    two.run(freeze_between)


def freeze_between() -> None:
    """`requires_grad_` on a sharded parameter counts from the next forward on (row 11.2)."""
    for apply, compiled in WAYS:
        model = shard(build("odd"), Options("odd"), apply)
        run_steps(model, compiled, count=1)
        model.layers[1].weight.requires_grad_(False)
        call = (
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
            if compiled
            else model
        )
        loss_of(call(*batch_of("odd", 1))).backward()
        assert model.layers[1].weight.grad is None, (apply.__module__, compiled)
        assert model.layers[1].bias.grad is not None
        model.layers[1].weight.requires_grad_(True)
        model.zero_grad()
        loss_of(call(*batch_of("odd", 2))).backward()
        assert model.layers[1].weight.grad is not None, (apply.__module__, compiled)


def test_graph_breaks_are_survived(two: Pool) -> None:
    two.run(graph_breaks)


def graph_breaks() -> None:
    """Without fullgraph, a break inside the model leaves parts compiled and parts eager."""
    grads = []
    for apply, compiled in WAYS:
        model = shard(build("odd"), Options("odd"), apply)
        inner = model.layers[1].forward

        def broken(x: torch.Tensor, inner: Any = inner) -> torch.Tensor:
            torch._dynamo.graph_break()
            return inner(x)

        model.layers[1].forward = broken
        call = torch.compile(model, backend="compiled_fsdp_eager") if compiled else model
        loss_of(call(*batch_of("odd", 0))).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    assert same(grads)


def test_one_block_compiled(two: Pool) -> None:
    two.run(block_compiled)


def block_compiled() -> None:
    """Compiling single blocks of a sharded model (`model.layers[1].compile()`), the rest eager."""
    grads = []
    for apply, compiled in WAYS:
        model = shard(build("odd"), Options("odd"), apply)
        if compiled:
            model.layers[1].compile(backend="compiled_fsdp_eager")
        for number in range(2):
            loss_of(model(*batch_of("odd", number))).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    assert same(grads)
