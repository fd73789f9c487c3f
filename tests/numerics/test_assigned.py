"""Parameters that a script registers, exchanges, removes and hides, between calls and inside of a
forward, are read as Python reads them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import Net, Side, beside
from kit.oracle import each, message
from torch import Tensor, nn

if TYPE_CHECKING:
    from kit.oracle import Api
    from kit.pool import Pool

UNITS = ((), ("a", "b"))


# -- exchanged between calls: a weight may have no module for a moment, and units lend to each other


def exchanged(side: Side, units: tuple[str, ...]) -> None:
    model = side.shard(Net(), *units)

    def exchange(step: int) -> None:
        if step % 2:
            model.a.weight, model.b.weight = model.b.weight, model.a.weight

    side.train(side.compile(model), model, 4, exchange)


def rotated(side: Side, units: tuple[str, ...]) -> None:
    model = Net()
    model.d = nn.Linear(6, 6)
    model.c = nn.Sequential(model.d, nn.Tanh(), model.c)
    side.shard(model, *units)

    def rotate(step: int) -> None:
        first = model.a.weight
        model.a.weight, model.b.weight = model.b.weight, model.d.weight
        model.d.weight = first

    side.train(side.compile(model), model, 4, rotate)


@pytest.mark.parametrize("units", UNITS, ids=["one unit", "three units"])
@pytest.mark.parametrize("script", [exchanged, rotated])
def test_exchanged_between_calls(two: Pool, script: Any, units: tuple[str, ...]) -> None:
    two.run(beside, script, units)


# -- in forward


class Exchanging(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.a.weight, self.b.weight = self.b.weight, self.a.weight
        return super().forward(x)


class Tying(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight = self.a.weight
        return super().forward(x)


class TyingLate(Net):
    """A weight that the same forward has read before."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(x).tanh()
        self.num_calls += 1
        if self.num_calls > 1:
            self.b.weight = self.a.weight
        return super().forward(x)


class TyingByName(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.b.register_parameter("weight", self.a.weight)
        return super().forward(x)


class TyingInDict(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.b._parameters["weight"] = self.a._parameters["weight"]
        return super().forward(x)


class TyingForAWhile(Net):
    def forward(self, x: Tensor) -> Tensor:
        own = self.b.weight
        self.b.weight = self.a.weight
        tied = super().forward(x)
        self.b.weight = own
        return tied + super().forward(x)


class Popping(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.b.weight
        own = self.b._parameters.pop("weight")
        self.b.weight = weight * 2
        y = super().forward(x)
        del self.b.weight
        self.b._parameters["weight"] = own
        return y


class Deleting(Net):
    def forward(self, x: Tensor) -> Tensor:
        own = self.b.weight
        del self.b.weight
        self.b.weight = own * 2
        y = super().forward(x)
        del self.b.weight
        self.b.weight = own
        return y


class Hiding(Net):
    """As for `object.__setattr__`, what is in the `__dict__` comes first."""

    def forward(self, x: Tensor) -> Tensor:
        self.b.__dict__["weight"] = self.a.weight * 0.5
        y = super().forward(x)
        del self.b.__dict__["weight"]
        return y


class HidingByObject(Net):
    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self.b, "weight", self.a.weight * 0.5)
        y = super().forward(x)
        object.__delattr__(self.b, "weight")
        return y


IN_FORWARD = (
    *(Exchanging, Tying, TyingLate, TyingByName, TyingInDict, TyingForAWhile),
    *(Popping, Deleting, Hiding, HidingByObject),
)


def in_forward(side: Side, kind: Any) -> None:
    model = side.shard(kind())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # breaks are announced
        side.train(side.compile(model), model)


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_in_forward(two: Pool, kind: Any) -> None:
    two.run(beside, in_forward, kind)


# -- parameters that share memory


def shared(api: Api) -> None:
    model = api.units(Net())
    model.b.weight = nn.Parameter(model.a.weight.detach())
    text = message(lambda: api.compile(model)(torch.ones(2, 6)))
    assert "b.weight was assigned a Parameter that has the memory of a.weight" in text


def test_memory_of_another_is_refused(two: Pool) -> None:
    two.run(each, shared)


def crosswise(side: Side) -> None:
    """Tensors that lie in the buffer already, in the places of each other."""
    model = side.shard(Net())
    state = dict(model.named_parameters())
    state["a.weight"], state["b.weight"] = state["b.weight"], state["a.weight"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.load_state_dict({k: p.detach() for k, p in state.items()}, assign=True)
    if side.kind == "eager" and torch.distributed.get_rank() == 0:  # the second time it is known
        (text,) = [str(warning.message) for warning in said]
        assert "gave a.weight the memory of the sharded parameter b.weight" in text
    side.train(side.compile(model), model)


def test_loaded_crosswise(two: Pool) -> None:
    two.run(beside, crosswise)


# -- a compiled unit inside of what is sharded afterwards


def compiled_before(side: Side) -> None:
    model = Net()
    for name in ("a", "b"):
        setattr(model, name, side.compile(side.shard(model.get_submodule(name))))
    side.train(side.compile(side.shard(model)), model.c)


def test_units_that_were_compiled_before_the_root_is_sharded(two: Pool) -> None:
    two.run(beside, compiled_before)
