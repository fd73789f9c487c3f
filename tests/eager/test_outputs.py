"""How what a loss is computed from leaves a forward: in whatever container or object, or past the
outputs. Units are gathered for backward, and their gradients reduced, all the same.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import WIDTH, Net, Side, beside
from kit.oracle import KINDS
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Plain:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Slotted:
    __slots__ = ("missing", "y")

    def __init__(self, y: Tensor) -> None:
        self.y = y


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


@dataclass
class Output:
    y: Tensor
    past: Any = None


Pair = namedtuple("Pair", "y z")


class OwnPair(Pair):
    pass


def mixture(y: Tensor) -> MixtureSameFamily:
    means = torch.stack([y, -y], -1)
    parts = Independent(Normal(means.transpose(-1, -2), torch.ones(2, y.shape[-1])), 1)
    return MixtureSameFamily(Categorical(logits=means.mean(-2)), parts)


def looped(y: Tensor) -> Plain:
    held = Plain(y)
    held.itself = held  # type: ignore[attr-defined]
    return held


# What a forward returns, and how the loss finds what it is computed from.
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"y": [y, None, 3]}, lambda found: found["y"][0]),
    "own dict": (lambda y: OwnDict(y=y), lambda found: found["y"]),
    "own list": (lambda y: OwnList([y]), lambda found: found[0]),
    "ordered": (lambda y: OrderedDict(y=y), lambda found: found["y"]),
    "dataclass": (lambda y: Output(y), lambda found: found.y),
    "own in dataclass": (lambda y: Output(y.detach(), OwnDict(y=y)), lambda found: found.past["y"]),
    "named tuple": (lambda y: Pair(y, None), lambda found: found.y),
    "of a named tuple": (lambda y: OwnPair(y, None), lambda found: found.y),
    "packed": (lambda y: PackedSequence(y, torch.tensor([4])), lambda found: found.data),
    "object": (Plain, lambda found: found.y),
    "loop": (looped, lambda found: found.y),
    "slots": (Slotted, lambda found: found.y),
    "namespace": (lambda y: SimpleNamespace(a={"y": y}), lambda found: found.a["y"]),
    "distribution": (lambda y: Normal(y, y.exp()), lambda found: found.log_prob(torch.ones(()))),
    "mixture": (mixture, lambda found: found.log_prob(torch.ones(3))),
}


class Wrapped(nn.Module):
    """The part, whose output stands in something."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.part, self.way = Net(), WAYS[way][0]

    def forward(self, x: Tensor) -> Any:
        return self.way(self.part(x))


class Outer(nn.Module):
    """A unit inside of which one returns something."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.find = Wrapped(way), WAYS[way][1]
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.find(self.inner(self.first(x)))


def returned(side: Side, way: str) -> None:
    """By the outermost unit, alone and with units inside; by a unit inside, which is freed."""
    for units in ((), ("part.b",)):
        model = side.shard(Wrapped(way), *units)
        call = side.compile(model)
        side.train(lambda x, call=call: WAYS[way][1](call(x)), model)
    model = side.shard(Outer(way), "inner")
    side.train(side.compile(model), model)


def alone(script: Callable[..., None], kind: str, *args: Any) -> None:
    beside(script, *args, kinds=(kind,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_holds_an_output(two: Pool, way: str, kind: str) -> None:
    two.run(alone, returned, kind, way)


class Leaves(Net):
    """Leaves its loss elsewhere, and returns what needs no gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.way == "function":
            return lambda: y
        self.left = y
        return None if self.way == "nothing" else y.detach()


def left(side: Side, way: str) -> None:
    for units in ((), ("a", "b")):
        model = side.shard(Leaves(way), *units)
        call = side.compile(model)

        def run(x: Tensor, model: Any = model, call: Any = call) -> Any:
            found = call(x)
            return found() if way == "function" else model.left

        side.train(run, model)


@pytest.mark.parametrize("way", ["function", "nothing", "detached"])
def test_past_the_outputs(two: Pool, way: str) -> None:
    two.run(beside, left, way)


def of_fsdp1(side: Side) -> None:
    model = side.wrap(Wrapped("object"), "part")
    side.train(lambda x: model(x).y, model)


def test_fsdp1(two: Pool) -> None:
    two.run(beside, of_fsdp1)


# -- a hook that forward puts on what it returns, with a backward of its own inside


class Implicit(nn.Module):
    """A fixed point, differentiated as one by a hook on what forward returns (deep equilibrium
    models).
    """

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.3))
        self.is_view = is_view

    def once(self, z: Tensor, x: Tensor) -> Tensor:
        return (self.layer(z).tanh() * self.scale + x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = self.once(z, x)
        z = self.once(z, x)
        at = z.detach().clone().requires_grad_()
        there = self.once(at, x)

        def implicit(grad: Tensor) -> Tensor:
            solved = grad
            for _ in range(3):
                (back,) = torch.autograd.grad(there, at, solved.view_as(at), retain_graph=True)
                solved = grad + back.view_as(grad)
            return solved

        z = z.view(-1, 2) if self.is_view else z
        z.register_hook(implicit)
        return z


def implicit(side: Side, is_wrapped: bool, is_view: bool) -> None:
    deeper = () if is_wrapped else (("0.layer", "0", "1.layer", "1"), ("1.layer",))
    for units in (("0", "1"), *deeper):
        model: nn.Module = nn.Sequential(Implicit(is_view=False), Implicit(is_view))
        model = side.wrap(model, *units) if is_wrapped else side.shard(model, *units)
        side.train(model, model)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_hook_runs_a_backward_inside_of_its_unit(
    two: Pool, is_wrapped: bool, is_view: bool
) -> None:
    two.run(alone, implicit, "eager", is_wrapped, is_view)
