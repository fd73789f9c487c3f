"""`torch.compile(optimizer.step)`: nothing of ours breaks it, and what happens at a step happens at
a compiled one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.harness import Options, batch_of, build, local, make, optimizer_of, shard
from kit.models import loss_of
from torch import nn
from torch._dynamo.utils import counters
from torch.optim import optimizer as torch_optimizer

import compiled_fsdp
from compiled_fsdp import fully_shard
from compiled_fsdp.eager.resident import _there
from compiled_fsdp.eager.tree import TREES
from compiled_fsdp.frontend import first_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


def graphs_of(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """What Dynamo counts over three compiled steps of a model that nobody shards."""
    torch._dynamo.reset()
    counters.clear()
    layer = nn.Linear(4, 4)
    optimizer = kind(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        layer(torch.ones(2, 4)).sum().backward()
        step()
        optimizer.zero_grad()
    return {name: dict(counters[name]) for name in ("stats", "graph_break", "frames")}


def without_ours(name: str) -> Any:
    """Torch has a hook of its own there."""
    hooks = getattr(torch_optimizer, name)
    others = {
        key: hook for key, hook in hooks.items() if not hook.__module__.startswith("compiled_fsdp")
    }
    assert len(others) < len(hooks)
    return mock.patch.object(torch_optimizer, name, OrderedDict(others))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_other_peoples_optimizers_are_traced_as_without_us(
    kind: type[torch.optim.Optimizer],
) -> None:
    first_call.check_optimizers()
    ours = graphs_of(kind)
    with without_ours("_global_optimizer_pre_hooks"), without_ours("_global_optimizer_post_hooks"):
        without = graphs_of(kind)
    torch._dynamo.reset()
    assert ours.pop("frames")["total"] <= without.pop("frames")["total"]
    assert ours == without


def trained(
    kind: str, optimizer_name: str, compile_step: Callable[[Any], Any]
) -> tuple[list[float], list[Any]]:
    """Losses and shards of five steps."""
    torch._dynamo.reset()
    model, call, _ = make(kind, Options("branches"))
    optimizer = optimizer_of(optimizer_name, model.parameters())
    step = compile_step(optimizer)
    losses = []
    for number in range(5):
        loss = loss_of(call(*batch_of("branches", number)))
        loss.backward()
        losses.append(loss.item())
        step()
        optimizer.zero_grad()
    return losses, [local(p) for p in model.parameters()]


def by_itself(optimizer: torch.optim.Optimizer) -> Any:
    return torch.compile(optimizer.step, backend="aot_eager")


def in_a_function(optimizer: torch.optim.Optimizer) -> Any:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(step, backend="aot_eager")


def check_numbers(optimizer_name: str, compile_step: Callable[[Any], Any]) -> None:
    losses, params = trained("stock", optimizer_name, compile_step)
    for kind in ("eager", "compiled"):
        ours, own_params = trained(kind, optimizer_name, compile_step)
        assert ours == losses, f"{kind}: {ours} and {losses}"
        assert all(torch.equal(a, b) for a, b in zip(own_params, params, strict=True))
    steps = [tree.clock.count for tree in TREES if tree.members]
    assert 4 in steps, (
        f"the steps were not noticed: {steps}"
    )  # the fifth would be by the next forward


@pytest.mark.parametrize(
    ("optimizer_name", "compile_step"), [("sgd", in_a_function), ("adamw", by_itself)]
)
def test_compiled_steps_of_sharded_parameters(
    two: Pool, optimizer_name: str, compile_step: Callable[[Any], Any]
) -> None:
    two.run(check_numbers, optimizer_name, compile_step)


def resident(is_step_compiled: bool) -> list[float]:
    model = shard(build("branches"), Options("branches", reshard=False), fully_shard)
    model.set_reshard_after_backward(False)
    call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = optimizer_of("sgd", model.parameters())
    step = by_itself(optimizer) if is_step_compiled else optimizer.step
    losses = []
    for number in range(4):
        loss = loss_of(call(*batch_of("branches", number)))
        loss.backward()
        assert _there
        losses.append(loss.item())
        step()
        optimizer.zero_grad()
    return losses


def same_with_residents() -> None:
    """Up to rounding: Dynamo 2.11 traces `add_(x, alpha=a)` as `add_(x * a)`, with whichever
    backend.
    """
    assert resident(True) == pytest.approx(resident(False), rel=1e-5)


def test_full_parameters_that_stay_are_dropped(two: Pool) -> None:
    two.run(same_with_residents)


def stale() -> str:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    step = torch.compile(optimizer.step, backend="eager")
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_optimizer_from_before_sharding_is_found(two: Pool) -> None:
    for text in two.run(stale):
        assert "SGD.step: fully_shard replaced 2 of its parameters" in text


def explained() -> int:
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = by_itself(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    step()
    compiled_fsdp.explain(model)  # the plan is for graphs
    return model._get_fsdp_state().runtime.tree.clock.count


def test_explain_knows_of_a_compiled_step(two: Pool) -> None:
    assert two.run(explained) == [1, 1]
