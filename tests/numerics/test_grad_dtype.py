"""Gradients that are kept in another dtype than their parameters (`grad_dtype`): beside the
unsharded model, under Inductor, in whole steps, with overlap; and where they cannot be.

What stock makes of it since torch 2.15 is compared bit for bit in
`compat/fsdp2/test_since_2_15_rows.py`; pairs with other features are in `pairs/`.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.oracle import message
from kit.pool import Pool
from torch import Tensor, nn

import compiled_fsdp
from compiled_fsdp import compile_step, errors, explain, fully_shard, overlap_optimizer

LOW, FULL = torch.bfloat16, torch.float32
BACKENDS = ("", "compiled_fsdp_eager", "inductor")


def net(dtype: torch.dtype = LOW, kept: torch.dtype = FULL) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)
    model = nn.Sequential(*layers).to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = kept
    return model


def sharded(model: nn.Sequential) -> Any:
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def batch(step: int, rank: int, dtype: torch.dtype = LOW) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator).to(dtype)


def loss_fn(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def full(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", BACKENDS)
def test_as_unsharded(two: Pool, backend: str) -> None:
    two.run(as_unsharded, backend)


def as_unsharded(backend: str) -> None:
    """The mean of the ranks' gradients, each rounded to bf16 as its kernel leaves it, is kept in
    fp32: it has bits that bf16 has not.
    """
    plain, model = net(), sharded(net())
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    loss_fn(call, batch(0, dist.get_rank())).backward()
    each: list[list[Tensor]] = []
    for rank in range(2):
        plain.zero_grad()
        loss_fn(plain, batch(0, rank)).backward()
        each.append([p.grad for p in plain.parameters()])  # type: ignore[misc]
    # Inductor keeps more bits between the operations that it fuses.
    rtol, atol = (1.6e-2, 1e-3) if backend == "inductor" else (0.0, 0.0)
    for parameter, *grads in zip(model.parameters(), *each, strict=True):
        mean = (grads[0] + grads[1]) / 2
        found = parameter.grad.full_tensor()
        assert found.dtype == mean.dtype == FULL
        torch.testing.assert_close(found, mean, rtol=rtol, atol=atol)
        assert not torch.equal(found, found.to(LOW).float())
    unit = explain(model).units[0]
    assert [p.grad_dtype for p in unit.params] == ["float32"] * 2
    assert "bfloat16, 16 bytes" not in str(explain(model))
    assert "[9] bfloat16, 18 bytes, its gradient in float32" in str(explain(model))


def test_a_step(two: Pool) -> None:
    two.run(a_step)


def a_step() -> None:
    """The loop, its graph, overlap and whole steps: the same bits."""
    rank, clip = dist.get_rank(), 0.05

    def loop(backend: str = "", overlaps: bool | None = None, dtype: Any = LOW) -> list[Tensor]:
        torch._dynamo.reset()
        model = sharded(net(dtype))
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype == torch.float16)
        if overlaps is not None:
            overlap_optimizer(model, optimizer, in_backward=overlaps)
        call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        for step in range(3):
            scaler.scale(loss_fn(call, batch(step, rank, dtype))).backward()
            if dtype == torch.float16:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return full(model)

    expected = loop()
    graph = "compiled_fsdp_eager"
    for backend, overlaps in (
        ("", False),
        ("", True),
        (graph, None),
        (graph, False),
        (graph, True),
    ):
        assert all(map(torch.equal, loop(backend, overlaps), expected)), (backend, overlaps)

    def whole(dtype: Any = LOW, **options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model = sharded(net(dtype))
        step = compile_step(model, sgd(model), loss_fn, backend=graph, **options)
        for number in range(3):
            step(batch(number, rank, dtype))
        return full(model)

    assert all(map(torch.equal, whole(), expected))
    # A GradScaler unscales no fp16 gradients; of fp16 parameters these are fp32.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found = whole(torch.float16, scaler=scaler, clip=clip)
    assert all(map(torch.equal, found, loop(dtype=torch.float16)))


@pytest.mark.usefixtures("fake_world")
def test_copies_keep_it() -> None:
    """`copy.deepcopy` of parameters that have a gradient; torch's own forgets the dtype, and
    raises.
    """
    model = sharded(net())
    loss_fn(model, batch(0, 0)).backward()
    for parameter in model.parameters():
        made = copy.deepcopy(parameter)
        assert made.grad_dtype == made.grad.dtype == FULL
    torch.save([*model.parameters()], io.BytesIO())


@pytest.mark.usefixtures("fake_world")
def test_casts_keep_it() -> None:
    """Gradients that are there when parameters are cast keep their bits, as in stock; so does a
    `grad_dtype` that was set on the sharded parameters.
    """
    model = sharded(net())
    for step in range(2):  # whose sum has bits that no half has
        loss_fn(model, batch(step, 0)).backward()
    before = [p.grad.to_local().clone() for p in model.parameters()]
    model.to(torch.float16)
    after = [p.grad.to_local() for p in model.parameters()]
    assert all(map(torch.equal, after, before))
    assert not all(torch.equal(grad, grad.half().float()) for grad in before)
    model = sharded(net(kept=LOW))
    for parameter in model.parameters():
        parameter.grad_dtype = FULL
    model.to(torch.float16)
    loss_fn(model, batch(0, 0, torch.float16)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {FULL}


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_set_too_late(backend: str) -> None:
    torch._dynamo.reset()
    model = sharded(net(kept=LOW))
    call = torch.compile(model, backend=backend) if backend else model
    loss_fn(call, batch(0, 0)).backward()
    model.zero_grad()
    model[2].weight.grad_dtype = FULL
    told = message(lambda: loss_fn(call, batch(1, 0)).backward())
    assert told == (
        "backward: grad_dtype of the sharded parameter 2.weight was set to torch.float32 after the "
        "first forward, and its gradient was reduced in torch.bfloat16, which torch does not put "
        "there. Set grad_dtype before fully_shard, or before the first forward"
    )


@pytest.mark.usefixtures("fake_world")
def test_ignored_parameters_in_a_whole_step() -> None:
    """A gradient of a leaf is rounded by torch's compiler, and put where its dtype is asked for."""
    model = net()
    ignored = {*model[4].parameters()}
    fully_shard(model, ignored_params=ignored)
    step = compile_step(model, sgd(model), loss_fn, backend="compiled_fsdp_eager", keep_grads=True)
    step(batch(0, 0))
    assert {p.grad.dtype for p in ignored if p.grad is not None} == {FULL}


@pytest.mark.usefixtures("fake_world")
def test_a_graph_without_our_passes() -> None:
    errors._said.clear()
    model = sharded(net())
    with pytest.warns(UserWarning, match="rounds the gradient of .* to torch.bfloat16 on its way"):
        loss_fn(torch.compile(model, backend="aot_eager"), batch(0, 0)).backward()


@pytest.mark.usefixtures("fake_world")
def test_fsdp1() -> None:
    """Its flat parameters have none: torch's ignores it, or fails in the first backward."""
    errors._said.clear()
    options: Any = {"device_id": torch.device("cpu")}
    with pytest.warns(UserWarning, match="Linear.weight of torch.bfloat16: torch.float32"):
        compiled_fsdp.FullyShardedDataParallel(net(), **options)
    told = message(
        lambda: compiled_fsdp.FullyShardedDataParallel(net(), use_orig_params=True, **options)
    )
    assert "with use_orig_params=True backward could not put them there. Use fully_shard" in told
