"""Inductor does not compute the values of our graphs again: they are what it would compute."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.graphs import uncached
from torch import nn
from torch._inductor.fx_utils import FakeTensorUpdater

from compiled_fsdp import fully_shard, pipeline, planned
from compiled_fsdp.torch_private.known_values import watch_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule, Node

    from compiled_fsdp import Plan

watch_values()
updater: Any = FakeTensorUpdater
WIDTH = 16


class Layer(nn.Module):
    """Splits, reshapes, transposes and casts what it computes with parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.both(x * self.scale).chunk(2, dim=-1)
        shape = a.shape
        turned = a.reshape(*shape[:-1], 4, 4).transpose(-1, -2).reshape(shape)
        return x + self.out(torch.tanh(turned) * b.double().to(x.dtype))


def looks(gm: GraphModule) -> list[Any]:
    """Shapes, strides and dtypes of all nodes, and which of them lie in one storage."""
    together: dict[int, list[str]] = defaultdict(list)
    found: list[Any] = []
    for node in gm.graph.nodes:
        for value in tensors(node):
            together[value.untyped_storage()._cdata].append(node.name)
            # as texts, since symbols would have to be guarded to be compared
            place = map(str, (value.shape, value.stride(), value.storage_offset()))
            found.append((node.name, *place, value.dtype, value.device))
    return [*found, *sorted(together.values())]


def tensors(node: Node) -> list[torch.Tensor]:
    value = None if node.op == "output" else node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


@pytest.fixture
def asked() -> Iterator[list[bool]]:
    """Of each update that Inductor asks for: whether it was left out. The values of those that were
    are compared with what it would have made.
    """
    torch._dynamo.reset()
    found: list[bool] = []
    update = updater.incremental_update

    def compared(self: Any) -> int:
        gm = self.fsdp_of
        before = [(node, node.meta.get("val")) for node in gm.graph.nodes]
        number: int = update(self)
        same = all(node.meta.get("val") is value for node, value in before)
        is_left_out = number == 0 and same and len(before) == len(gm.graph.nodes)
        if is_left_out:
            expected = looks(gm)
            update.__wrapped__(self)
            assert looks(gm) == expected
            for node, value in before:
                node.meta.pop("val", None)
                node.meta |= {} if value is None else {"val": value}
        found.append(is_left_out)
        return number

    with mock.patch.object(updater, "incremental_update", compared), uncached():
        yield found


def train(num_layers: int = 2, kind: type[nn.Module] = Layer, **options: Any) -> None:
    net = nn.Sequential(*(kind() for _ in range(num_layers)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    compiled = torch.compile(net, fullgraph=True, **options)
    compiled(torch.ones(3, WIDTH)).sum().backward()


# Of the three updates of a graph, before our passes, behind them, and where Inductor writes in
# place, the first is needed where torch's passes have changed something.


@pytest.mark.usefixtures("fake_world")
def test_left_out(asked: list[bool]) -> None:
    train()
    assert len(asked) == 6
    assert all(asked[1::3] + asked[2::3])


@pytest.mark.usefixtures("fake_world")
def test_left_out_with_units(asked: list[bool]) -> None:
    """Which are graphs that are called, and have updates of their own."""
    with planned(regions="units"):
        train(3)  # fewer are no graph of their own
    assert any(asked)


@pytest.mark.usefixtures("fake_world")
def test_not_with_passes_of_a_user(asked: list[bool]) -> None:
    def my_pass(gm: GraphModule, plan: Plan) -> None:
        pass

    with pipeline(my_pass, before="verify"):
        train()
    assert not any(asked[1::3])


@pytest.mark.usefixtures("fake_world")
def test_left_out_with_symbols(asked: list[bool]) -> None:
    train(dynamic=True)
    assert len(asked) == 6
    assert all(asked[1::3] + asked[2::3])


class Routed(Layer):
    """Its lower half sees some rows only, which ones its input says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = (x.sum(-1) > 0).sum().item()
        torch._check(number >= 0)
        torch._check(number <= 3)
        chosen = super().forward(x[:number])
        return torch.cat([chosen, x[number:]])


@pytest.mark.usefixtures("fake_world")
def test_left_out_with_sizes_that_only_data_decides(asked: list[bool]) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        train(kind=Routed)
    assert len(asked) == 6
    assert all(asked[1::3])  # in backward torch changes something behind them
