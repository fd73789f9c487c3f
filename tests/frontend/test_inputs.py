"""What a call is given: where it finds tensors (on a device: `compat/fsdp2/test_device_rows`), and
what is cast.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from compiled_fsdp import fully_shard, register_fsdp_forward_method
from compiled_fsdp.frontend.state import State
from compiled_fsdp.torch_private.modules import cast_floating

META = torch.device("meta")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> str:
        return x.device.type


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = Inner()

    def forward(self, x: Tensor, **more: Any) -> list[str]:
        given = [value.device.type for each in more.values() for value in each]
        return [x.device.type, self.inner(torch.ones(2)), *given]

    def other(self, x: Tensor) -> list[str]:
        return self(x)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("backend", ["", "compiled_fsdp_eager"])
def test_the_outermost_call_moves_them(backend: str) -> None:
    """In containers too; what a forward gives to units inside of it stays where it is."""
    torch._dynamo.reset()
    model = Outer()
    fully_shard(model.inner)
    fully_shard(model)
    register_fsdp_forward_method(model, "other")
    calls: list[Any] = [model, model.other, model.inner]
    if backend:

        def around(x: Tensor, **more: Any) -> Any:
            return model(x, **more)

        calls = [torch.compile(call, backend=backend) for call in (model, model.other)]
        calls += [model.inner, torch.compile(around, backend=backend)]
    x = torch.ones(2)
    with torch.no_grad():
        assert calls[0](x, more=(x, x)) == ["cpu", "cpu", "cpu", "cpu"]
    torch._dynamo.reset()
    with torch.no_grad(), mock.patch.object(State, "_accelerator", return_value=META):
        assert calls[0](x, more=(x, x)) == ["meta", "cpu", "meta", "meta"]
        assert calls[1](x) == ["meta", "cpu"]
        assert calls[2](x) == "meta"
        for call in calls[3:]:
            assert call(x, more=(x,)) == ["meta", "cpu", "meta"]


@dataclass
class Batch:
    x: Tensor
    position: Any


class Pair(NamedTuple):
    x: Tensor
    position: Any


class Nested(OrderedDict[str, Any]):
    """As results of Hugging Face's models."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Rows(list[Any]):
    pass


class Side(enum.IntEnum):
    LEFT = 1


class Steps(nn.Module):
    """Its result depends on numbers that it is given by themselves and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Any, step: Any, more: dict[str, Any]) -> tuple[Any, Any]:
        return self.linear(batch.x) * batch.position + step, more["list"][0] + 1


def low(x: Tensor) -> Tensor:
    return x.bfloat16() if x.is_floating_point() else x


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("form", [Batch, Pair, lambda x, n: Nested(x=x, position=n)])
@pytest.mark.parametrize("kind", [int, float])
def test_a_number_that_changes_keeps_the_graph(form: Any, kind: Any) -> None:
    """Dynamo makes it symbolic at its second value."""
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(Steps(), mp_policy=policy)
    called: Any = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    for i in range(2, 5):
        number = kind(i)
        given = (form(torch.ones(2, 4), number), number, {"list": [number, None]})
        (found, one_more), (wanted, _) = called(*given), model(*given)
        assert one_more == number + 1
        assert torch.equal(found, wanted)
        assert found.dtype == torch.float32


class Table(dict[str, Any]):
    pass


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    "made",
    [
        lambda n: torch.Size([n, 2]),
        lambda n: slice(0, n),
        lambda n: Table(n=n),
        lambda n: defaultdict(int, n=n),
        lambda n: {n, "n"},
        lambda n: numpy.float64(n),
        lambda n: numpy.ones(n),
    ],
    ids=["Size", "slice", "Table", "defaultdict", "set", "float64", "ndarray"],
)
def test_what_holds_a_number_keeps_the_graph(made: Any) -> None:
    torch._dynamo.reset()
    model = fully_shard(Steps(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    called: Any = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    for i in range(2, 5):
        found, _ = called(Batch(torch.ones(2, 4), i), i, {"list": [i], "made": made(i)})
        assert found.dtype == torch.bfloat16


def test_what_is_cast_as_torch_casts_it() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    packed = nn.utils.rnn.pack_sequence([x])
    nested = [(x, 1), {"ids": ids, "none": None}, Pair(x, Side.LEFT), Batch(ids, [x, "text"])]
    others = [
        OrderedDict(x=x),
        defaultdict(list, x=x),
        {2, 3},
        Rows([x]),
        frozenset({4}),
        packed,
        nn.Linear,
        1j,
        object(),
        torch.Size([2]),
    ]
    for values in (x, ids, 3, 0.5, True, *nested, *others, nested):
        found, wanted = cast_floating(values, torch.bfloat16), _apply_to_tensors(low, values)
        assert type(found) is type(wanted)
        assert repr(found) == repr(wanted)
    assert cast_floating([Batch], torch.bfloat16) == [Batch]
