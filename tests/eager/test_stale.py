"""Eager mode computes with what the parameters are when a forward begins, whoever wrote to them, or
says that it cannot.
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.harness import mesh_of, train
from kit.offload import Late, beside_host
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import CPUOffloadPolicy, fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def plain(target: list[Any], online: list[Any]) -> None:
    with torch.no_grad():
        for a, b in zip(target, online, strict=True):
            a.mul_(0.5).add_(b, alpha=0.5)


def data(target: list[Any], online: list[Any]) -> None:
    for a, b in zip(target, online, strict=True):
        a.data.mul_(0.5).add_(b.data, alpha=0.5)


def foreach(target: list[Any], online: list[Any]) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(target, online, 0.5)


class Byol(nn.Module):
    """An encoder, and a moving average of it that forward updates before it runs, in the given
    spelling.
    """

    def __init__(self, update: Callable[..., None], *, frozen: bool) -> None:
        super().__init__()
        self.update = update
        self.online = net()
        self.target = copy.deepcopy(self.online).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        predicted = self.online(x)
        self.update(list(self.target.parameters()), list(self.online.parameters()))
        with torch.no_grad():
            wanted = self.target(x + 1)
        return (predicted - wanted).square().mean()


class Clamped(nn.Module):
    """Writes to a trained layer through `.data` in forward, before the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.second.weight.data.mul_(0.5)
        return self.second(hidden)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


def shard(model: Any, *modules: nn.Module) -> Any:
    for module in (*modules, model):
        fully_shard(module, mesh=mesh_of("1d"))
    return model


def losses_of(model: Any, trained: nn.Module, **options: bool) -> list[float]:
    """Of four steps."""
    batches = [
        (torch.randn(3, 4, generator=torch.Generator().manual_seed(step)),) for step in range(4)
    ]
    return train(model, torch.optim.AdamW(trained.parameters(), lr=0.05, **options), batches)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kept_after_backward(two: Pool, name: str) -> None:
    two.run(kept_after_backward, OPTIMIZERS[name])


def kept_after_backward(options: dict[str, bool]) -> None:
    """An optimizer's step makes what was kept stale, also where it writes by ops that no version
    counts.
    """
    model, reference = seeded(net), seeded(net)
    shard(model, model[0], model[2]).set_reshard_after_backward(False)
    assert losses_of(model, model, **options) == pytest.approx(
        losses_of(reference, reference, **options), rel=1e-5
    )


def tied() -> nn.Sequential:
    """The first layer reads the last one's weight, before that runs itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].weight = model[2].weight
    return model


def test_kept_by_the_unit_of_a_tied_parameter(two: Pool) -> None:
    two.run(kept_by_another)


def kept_by_another() -> None:
    """Stale there, too, for whoever reads it."""
    model, reference = seeded(tied), seeded(tied)
    shard(model, model[2]).set_reshard_after_backward(False)
    found = losses_of(model, model)
    assert found == pytest.approx(losses_of(reference, reference), rel=1e-5)


def test_kept_and_written(two: Pool) -> None:
    two.run(kept_and_written)


def kept_and_written() -> None:
    """A user's own step through `.data` is an error, not a training on old weights."""
    model = seeded(net)
    params = list(shard(model, model[0], model[2]).parameters())
    model.set_reshard_after_backward(False)
    model(torch.ones(2, 4)).sum().backward()
    for param in params:
        param.data.sub_(param.grad.data)
    with pytest.raises(
        RuntimeError,
        match=r"parameters of 0 were written to through .data.* while the full parameters were",
    ):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    for module in (model[0], model[2], model):
        module.reshard()
    model(torch.ones(2, 4))


@pytest.mark.parametrize("update", [plain, data, foreach], ids=lambda update: update.__name__)
@pytest.mark.parametrize("frozen", [True, False])
def test_momentum_encoder(two: Pool, update: Any, frozen: bool) -> None:
    two.run(momentum_encoder, update, frozen)


def momentum_encoder(update: Any, frozen: bool) -> None:
    model, reference = (seeded(lambda: Byol(update, frozen=frozen)) for _ in range(2))
    shard(model, *(layer for part in (model.online, model.target) for layer in (part[0], part[2])))
    assert losses_of(model, model.online) == pytest.approx(
        losses_of(reference, reference.online), rel=1e-5
    )


def test_written_in_forward(two: Pool) -> None:
    two.run(written_in_forward)


def written_in_forward() -> None:
    model = seeded(Clamped)
    shard(model, model.first, model.second)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="after the gather for their forward was started"):
        model(torch.ones(2, 4))
    model.reset_iter_state()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_late_wait(two: Pool, is_compiled: bool) -> None:
    two.run(late_wait, is_compiled)


def late_wait(is_compiled: bool) -> None:
    """A handle whose unit has run its forward meanwhile, be it in a graph, changes nothing."""
    model = seeded(net)
    shard(model, model[0], model[2])
    call = torch.compile(model, backend="compiled_fsdp_eager") if is_compiled else model
    handle = model[0].unshard(async_op=True)
    loss = call(torch.ones(2, 4)).sum()
    handle.wait()
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    other = model[0].unshard(async_op=True)
    call(torch.ones(2, 4)).sum().backward()
    other.wait()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert all(
        param.grad is not None for group in optimizer.param_groups for param in group["params"]
    )


class Halving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(x)


def test_a_write_that_is_lost_is_announced_in_the_first_forwards(two: Pool) -> None:
    """Through `.data`, which no version counts, and without COMPILED_FSDP_VERIFY."""
    two.run(lost)


def lost() -> None:
    for kind in (Halving, nn.Linear):
        model = nn.Sequential(kind(4, 4), nn.Linear(4, 4))
        shard(model, model[0])
        with (
            mock.patch.dict(os.environ, {"COMPILED_FSDP_VERIFY": ""}),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            model(torch.ones(2, 4)).sum().backward()
        said = [str(w.message) for w in caught if "is written to in place" in str(w.message)]
        assert bool(said) is (kind is Halving), said


def test_what_unshard_gathered_is_dropped_by_compiled_calls(two: Pool) -> None:
    """As an eager forward does: graphs gather for themselves, and writes to it are lost."""
    two.run(unsharded_before_compiled)


def unsharded_before_compiled() -> None:
    torch.manual_seed(0)
    model = net()
    model[0].requires_grad_(requires_grad=False)
    shard(model, model[0], model[2])
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    x = torch.ones(2, 4)
    expected = call(x)
    expected.sum().backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for is_trained in (True, False):
            model[0].unshard()
            with torch.no_grad():
                model[0].weight.mul_(2.0)
            with torch.set_grad_enabled(is_trained):
                found = call(x)
            assert torch.equal(found, expected)
            assert isinstance(model[0].weight, DTensor)
    assert any("is written to in place" in str(each.message) for each in said)


def test_no_copy_for_a_forward_that_may_not_come(two: Pool) -> None:
    """Behind several forwards without a backward nothing is under way from the host."""
    two.run(copies_after_forwards)


def copies_after_forwards() -> None:
    model = net()
    with beside_host() as copies, torch.no_grad():
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh_of("1d"), offload_policy=CPUOffloadPolicy())
        for _ in range(3):
            model(torch.ones(2, 4))
            assert not Late.under_way
    assert copies.num_begun == 3 * 2
