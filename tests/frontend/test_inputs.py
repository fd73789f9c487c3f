"""Where a call finds the tensors that it is given; on a device: `compat/fsdp2/test_device_rows`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from compiled_fsdp import fully_shard, register_fsdp_forward_method
from compiled_fsdp.frontend.state import State

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
