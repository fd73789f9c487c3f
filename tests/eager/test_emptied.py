"""What reads a gathered parameter's memory behind its unit's forward is named, before it does; so
are hooks that a forward registers on its inputs.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.harness import mesh_of
from torch import Tensor, nn

from compiled_fsdp import FullyShardedDataParallel, errors, fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

EMPTIED = "whose memory is emptied behind it"


class Layer(nn.Linear):
    """how: what becomes of the gathered weight.

    returned, cached, copied: it, a view of it, or a copy of it, for somebody else.
    instead, beside: a parameter of the same memory takes its place, or is registered too.
    """

    def __init__(self, how: str) -> None:
        super().__init__(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        if self.how == "cached":
            self.cache = weight.detach()[1:]
        elif self.how == "copied":
            self.cache = weight.detach().clone()
        elif self.how == "instead":
            del self.weight
            self.weight = nn.Parameter(weight.detach())
        elif self.how == "beside":
            self.twin = nn.Parameter(weight.detach())
        y = nn.functional.linear(x, weight, self.bias)
        return {"y": y, "weight": weight} if self.how == "returned" else {"y": y}


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = Layer(how), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)["y"])


def said_of(how: str, backend: str | None, kind: str, keeps: bool) -> list[str]:
    """What a step warns of."""
    torch._dynamo.reset()
    errors._said.clear()
    model: nn.Module = Model(how)
    if kind != "fully_shard":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Layer),
            use_orig_params=kind == "fsdp1",
            device_id=torch.device("cpu"),
        )
    else:
        for module in (model.first, model.last, model):
            fully_shard(module, mesh=mesh_of(2), reshard_after_forward=not keeps)
    call = torch.compile(model, backend=backend) if backend else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call(torch.ones(2, 6)).sum().backward()
    return [str(entry.message) for entry in caught]


@pytest.mark.parametrize(
    ("how", "what", "kind"),
    [
        ("returned", "returns a", "fully_shard"),
        ("cached", "keeps, as cache", "fully_shard"),
        ("cached", "keeps, as cache", "fsdp1"),
        ("cached", "keeps, as cache", "fsdp1, flat"),
    ],
)
def test_views_that_outlive_forward(two: Pool, how: str, what: str, kind: str) -> None:
    for said in two.run(said_of, how, None, kind, False):
        (text,) = [text for text in said if EMPTIED in text]
        assert what in text
        assert "first" in text


@pytest.mark.parametrize("how", ["returned", "cached", "copied"])
def test_what_stays_is_nothing_to_say(two: Pool, how: str) -> None:
    """Copies, parameters that stay gathered, and what a graph has gathered."""
    ways = [(None, False)] if how == "copied" else [(None, True), ("compiled_fsdp_eager", False)]
    for backend, keeps in ways:
        for kind in ("fully_shard", "fsdp1, flat") if how == "copied" else ("fully_shard",):
            for said in two.run(said_of, how, backend, kind, keeps):
                assert not [text for text in said if EMPTIED in text]


class Hooked(nn.Linear):
    """registers: on its input, which it returns as it is otherwise."""

    registers = False

    def forward(self, x: Tensor) -> Tensor:
        if self.registers:
            x.register_hook(torch.neg)
        return super().forward(x) if self.registers else x


def said_of_hooks(registers: bool) -> list[str]:
    """What steps warn of; the second of two layers in one unit gets, and returns, the first one's
    input, with our own hooks.
    """
    errors._said.clear()
    model = nn.Sequential(Hooked(6, 6), Hooked(6, 6), nn.Linear(6, 6))
    model[1].registers = registers
    fully_shard([model[0], model[1]], mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    return [str(entry.message) for entry in caught if "hook on its input" in str(entry.message)]


@pytest.mark.parametrize("registers", [False, True])
def test_hooks_on_inputs(two: Pool, registers: bool) -> None:
    for said in two.run(said_of_hooks, registers):
        assert len(said) == registers


def refused(how: str, backend: str | None, kind: str) -> None:
    with pytest.raises(RuntimeError, match=r"is to be a Parameter that has the memory of"):
        said_of(how, backend, kind, False)


@pytest.mark.parametrize("backend", [None, "compiled_fsdp_eager"])
@pytest.mark.parametrize(
    ("how", "kind"), [("instead", "fully_shard"), ("beside", "fully_shard"), ("beside", "fsdp1")]
)
def test_parameters_of_that_memory_are_refused(
    two: Pool, how: str, backend: str | None, kind: str
) -> None:
    two.run(refused, how, backend, kind)
