"""What `register_fsdp_forward_method` makes a forward of is called as one: what scripts do around
calls of the model holds around calls of its methods, eager and compiled, and inside one another.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.beside import WIDTH, Net, Side, beside
from torch import Tensor, nn

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Coder(nn.Module):
    """Ways in other than `forward`, which call each other; the root has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), nn.Linear(3, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.fails = False

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x * self.scale)
        return y

    def decode(self, z: Tensor) -> Tensor:
        y: Tensor = self.second(z) * self.scale
        return y

    def training_step(self, x: Tensor) -> Tensor:
        y = self(x)
        if self.fails:
            raise ValueError("a bad batch")
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def coder(side: Side, *methods: str, **options: Any) -> Coder:
    """Sharded, with these methods as forwards, or all."""
    model: Coder = side.shard(Coder(), "first", "second", **options)
    for name in methods or ("encode", "decode", "training_step"):
        if side.is_ours:
            compiled_fsdp.register_fsdp_forward_method(model, name)
    return model


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("a bad gradient")


class Event:
    """Parameters are new once it is awaited."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def wait(self, stream: object = None) -> None:
        self.step()


def freezes(model: Coder, step: int) -> None:
    model.first.requires_grad_(step % 2 == 0)
    model.scale.requires_grad_(step % 3 != 1)


def assigns(model: Coder, step: int) -> None:
    if step == 2:
        halved = {name: value * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(halved, assign=True)


def loads(model: Coder, step: int) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def writes(model: Coder, step: int) -> None:
    with torch.no_grad():
        model.scale.mul_(0.9)
        model.first.a.weight.clamp_(-0.3, 0.3)


def fails(model: Coder, step: int) -> None:
    model.fails = step == 1


HABITS = {habit.__name__: habit for habit in (freezes, assigns, loads, writes, fails)}
# In these steps backward raises, or the optimizer steps once the event is awaited.
LOOPS = ("fails in backward", "steps late")


def habits(side: Side, habit: str, way: str) -> None:
    model = coder(side)
    call = side.compile(getattr(model, way)) if way != "forward" else side.compile(model)
    entry: Any = getattr(model, way) if "eager" in side.kind and way != "forward" else call
    optimizer = side.sgd(model.parameters())
    for step in range(4):
        HABITS.get(habit, lambda *args: None)(model, step)
        if habit == "assigns":
            optimizer = side.sgd(model.parameters())
        try:
            loss = entry(side.batch(step)).square().mean()
            side.note("loss", loss)
            if habit == "fails in backward" and step == 1:
                loss = BadGradient.apply(loss)
            loss.backward()
        except ValueError as error:
            side.note("error", str(error))
            optimizer.zero_grad()
            continue
        if habit == "steps late" and side.is_ours:
            model.set_post_optim_event(Event(optimizer.step))  # type: ignore[operator]
        else:
            optimizer.step()
        with torch.no_grad():
            side.note("another way in", model.encode(side.batch(9)))
            side.note("inside forward", model(side.batch(9)))
            side.note("again", entry(side.batch(9)) if not model.fails else None)
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("way", ["training_step", "forward"])
@pytest.mark.parametrize("habit", [*HABITS, *LOOPS])
def test_habits(two: Pool, habit: str, way: str) -> None:
    two.run(beside, habits, habit, way)


def freed_after_forward(side: Side) -> None:
    """The methods that `forward` calls leave to it what is freed behind it."""
    model = coder(side, reshard_after_forward=True)
    side.train(side.compile(model), model)
    with torch.no_grad():
        side.note("evaluated", model(side.batch(9)))


def test_methods_inside_forward(two: Pool) -> None:
    two.run(beside, freed_after_forward)


def ten_methods(side: Side) -> None:
    """Each has frames of its own, so that ten are no more compilations of one than two are."""
    model = nn.ModuleList(Coder() for _ in range(10))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recompile_limit")
        for part in model:
            if side.is_ours:
                compiled_fsdp.fully_shard(part)
                compiled_fsdp.register_fsdp_forward_method(part, "decode")
            call = side.compile(part.decode)
            x = torch.ones(2, 3, requires_grad=True)
            loss = call(x).square().mean()
            side.note("loss", loss)
            loss.backward()


def test_many_methods(two: Pool) -> None:
    two.run(beside, ten_methods)


def test_what_is_checked(two: Pool) -> None:
    two.run(checked)


def checked() -> None:
    compiled = Side("compiled")
    for way in (lambda method: method, compiled.compile):
        model = Coder()
        if dist.get_rank() == 1:
            model.second = nn.Linear(3, WIDTH, bias=False)
        model = compiled.shard(model, "first", "second")
        compiled_fsdp.register_fsdp_forward_method(model, "encode")
        with pytest.raises(Exception, match="the ranks of a shard group have different models"):
            way(model.encode)(compiled.batch(0))


def test_an_eager_method_beside_a_graph(two: Pool) -> None:
    two.run(beside_a_graph)


def beside_a_graph() -> None:
    """Nobody asked for a graph of it: that it has none is no fallback."""
    side = Side("compiled")
    model = coder(side, "encode")
    compiled_fsdp.set_fallback("error")
    try:
        for is_recorded in (True, False, True):
            side.compile(model, fullgraph=True)(side.batch(0)).sum().backward()
            with nullcontext() if is_recorded else torch.no_grad():
                model.encode(side.batch(0))
    finally:
        compiled_fsdp.set_fallback("warn")
    assert "given up" not in str(compiled_fsdp.explain(model))
