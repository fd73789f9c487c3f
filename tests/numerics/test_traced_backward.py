"""`loss.backward()` inside of a compiled function (`torch._dynamo.config.trace_autograd_ops`): one
graph with its forward, the numbers of the loop, or an error that names `compile_step`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.harness import SLOW, quiet
from kit.models import Block
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from compiled_fsdp import FullyShardedDataParallel, explain, fully_shard, overlap_optimizer, planned
from compiled_fsdp.torch_private.dynamo import TRACES_TO_DTENSORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

needs_traces = pytest.mark.skipif(
    not TRACES_TO_DTENSORS, reason="this torch traces no backward to a DTensor"
)


def build(num_blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(6, 8) for _ in range(num_blocks)))


def shard(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def wrap(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )


def batch(number: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


# -- what becomes one graph, and what does not


def once(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def forgetting(model: Any, x: Tensor) -> Tensor:
    for p in model.parameters():
        p.grad = None
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def looking(model: Any, x: Tensor) -> Tensor:
    once(model, x)
    grads = [p.grad.to_local().square().sum() for p in model.parameters()]
    return torch.stack(grads).sum()


def twice(model: Any, x: Tensor) -> Tensor:
    return once(model, x[:2]) + once(model, x[2:])


def scaled(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward(torch.tensor(2.0))
    return loss.detach()


def beside(model: Any, x: Tensor) -> Tensor:
    """Trains a layer that nobody has sharded, too."""
    loss: Tensor = model.__dict__["beside"](model(x)).square().mean()
    loss.backward()
    return loss.detach()


def unsynced(model: Any, x: Tensor) -> Tensor:
    model.set_requires_gradient_sync(False)
    loss = once(model, x)
    model.set_requires_gradient_sync(True)
    return loss + once(model, x)


# fmt: off
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., nn.Module], str]] = {
    # what becomes one graph: all of it (with fullgraph=True), forward and backward, or forward
    "once":       (once,       shard, "all"),
    "fsdp1":      (once,       wrap,  "all"),
    "looking":    (looking,    shard, "both"),
    "forgetting": (forgetting, shard, "forward"),
    "twice":      (twice,      shard, "both"),  # each call of once()
    "scaled":     (scaled,     shard, "forward"),
    "beside":     (beside,     shard, "forward"),
    "unsynced":   (unsynced,   shard, "forward"),
}
# fmt: on


def values_of(model: nn.Module, function: Callable[..., Tensor]) -> list[Any]:
    """Of two calls, whose gradients add up: what they return, and what the parameters have."""
    torch.manual_seed(1)
    model.__dict__["beside"] = nn.Linear(6, 2)
    found: list[Any] = []
    for number in range(2):
        found.append(function(model, batch(number)))
        for p in (*model.parameters(), *model.__dict__["beside"].parameters()):
            grad = p.grad
            found.append(None if grad is None else getattr(grad, "_local_tensor", grad).clone())
    return found


def compare(name: str) -> None:
    function, distribute, captured = FUNCTIONS[name]
    wanted = values_of(distribute(build(1)), function)
    assert any(value is not None and bool(value.any()) for value in wanted)
    torch._dynamo.reset()
    counters.clear()
    model = distribute(build(1))
    with torch._dynamo.config.patch(trace_autograd_ops=True), quiet():
        call = torch.compile(function, backend="compiled_fsdp_eager", fullgraph=captured == "all")
        found = values_of(model, call)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name
    has_step = any(" step: " in line for line in str(explain(model)).splitlines())
    assert has_step == (captured != "forward"), f"{name}: {explain(model)}"


ALWAYS = ("once", "looking", "forgetting", "beside")


def compare_each(names: tuple[str, ...]) -> None:
    for name in names:
        compare(name)


@needs_traces
def test_numbers_of_the_loop(two: Pool) -> None:
    two.run(compare_each, ALWAYS, timeout=SLOW)


@needs_traces
def test_more_numbers_of_the_loop(two: Pool) -> None:
    two.run(compare_each, tuple(name for name in FUNCTIONS if name not in ALWAYS), timeout=SLOW)


def other_backend() -> str:
    """Autograd's own backward has to run there."""
    model = shard(build(1))
    with torch._dynamo.config.patch(trace_autograd_ops=True), quiet():
        call = torch.compile(once, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="compile_step") as caught:
            call(model, batch(0))
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


def needs_autograds_backward() -> None:
    """What is done where a backward that autograd runs reaches a unit, or ends."""
    for why, options in {"overlap_optimizer": {}, "checksums": {"check": "checksums"}}.items():
        torch._dynamo.reset()
        patch = torch._dynamo.config.patch(trace_autograd_ops=True)
        with planned(**options), patch, quiet():
            model: Any = shard(build(1))
            if why == "overlap_optimizer":
                overlap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
            call = torch.compile(once, backend="compiled_fsdp_eager", fullgraph=True)
            with pytest.raises(Exception, match=rf"(?s)arrive nowhere: .*{why}"):
                call(model, batch(0))
        assert all(p.grad is None for p in model.parameters())


@needs_traces
def test_what_needs_a_backward_of_autograds_is_named(two: Pool) -> None:
    two.run(needs_autograds_backward)


@needs_traces
def test_another_backend_is_named(two: Pool) -> None:
    assert "the backend aot_eager is none of" in two.run(other_backend)[0]


@pytest.mark.skipif(
    TRACES_TO_DTENSORS or not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this torch traces no backward, or also to a DTensor",
)
def test_warned_before_torch_fails(two: Pool) -> None:
    two.run(fail_with_a_warning)


def fail_with_a_warning() -> None:
    """Torch 2.11: Dynamo ends in an AssertionError without a text."""
    patch = torch._dynamo.config.patch(trace_autograd_ops=True)
    with (
        patch,
        pytest.warns(UserWarning, match="Call loss.backward"),
        pytest.raises(AssertionError),
    ):
        torch.compile(once, backend="compiled_fsdp_eager")(shard(build()), batch(0))


# -- a whole step, optimizer included


def whole_step(x: Tensor, model: Any, optimizer: Any, *, spelled: str) -> Tensor:
    """A training step, with its gradients by one of torch's ways to ask for them."""
    loss: Tensor = model(x).square().mean()
    if spelled == "backward":
        loss.backward()
    elif spelled == "autograd.backward":
        torch.autograd.backward(loss)
    else:
        params = list(model.parameters())
        grads = torch.autograd.grad(loss, params, allow_unused=spelled == "grad, unused")
        if spelled == "grad, unused":
            return loss.detach()
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
    optimizer.step()
    return loss.detach()


SPELLED = {
    ("backward", True): "raised",
    ("backward", False): "trained",
    ("autograd.backward", True): "raised",
    ("grad", False): "raised",
    ("grad, unused", False): "raised",
}


def step_inside() -> dict[tuple[str, bool], str]:
    """What each spelling of a step inside of a compiled function comes to, with `fullgraph` or
    without: the loop's numbers, or an error, before which `compile_step` was named.
    """
    x, found = torch.ones(4, 6), {}
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for spelled, fullgraph in SPELLED:
            models = [shard(build(1)) for _ in range(2)]
            pair = [(m, torch.optim.SGD(m.parameters(), lr=0.5)) for m in models]
            call = torch.compile(whole_step, backend="compiled_fsdp_eager", fullgraph=fullgraph)
            try:
                call(x, *pair[1], spelled=spelled)
            except Exception as error:  # noqa: BLE001  # of any class of Dynamo's
                text = "\n".join([str(error), *(str(each.message) for each in caught)])
                assert "compile_step" in text, text
                found[spelled, fullgraph] = "raised"
                continue
            whole_step(x, *pair[0], spelled=spelled)
            params = zip(*(m.parameters() for m in models), strict=True)
            assert all(torch.equal(p.to_local(), q.to_local()) for p, q in params)
            found[spelled, fullgraph] = "trained"
    return found


@needs_traces
def test_step_inside_the_compiled_function(two: Pool) -> None:
    assert two.run(step_inside)[0] == SPELLED
