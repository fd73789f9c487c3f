"""A module inside of a unit that is cast, or emptied, by itself, between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import check_equal, plain
from torch import nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).square().sum()  # type: ignore[no-any-return]


def rounded(model: Any, call: Any) -> None:
    model.head.bfloat16().float()


def rounded_in_two_calls(model: Any, call: Any) -> None:
    model.layer[0].bfloat16()
    model.layer[2].bfloat16()
    model.layer[0].float()
    model.layer[2].float()


def made_anew(model: Any, call: Any) -> None:
    model.layer[0].to_empty(device="cpu")
    with torch.no_grad():
        for p in model.layer[0].parameters():
            p.fill_(0.1)


def rounded_while_gathered(model: Any, call: Any) -> None:
    """The outermost unit stays gathered after an evaluation."""
    with torch.no_grad():
        call(torch.ones(2, 4))
    model.head.bfloat16().float()


CHANGES = (rounded, rounded_in_two_calls, made_anew, rounded_while_gathered)


def train(kind: str, change: Callable[[Any, Any], None]) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Net()
    if kind != "unsharded":
        fully_shard(model.layer)
        fully_shard(model)
    call = model
    if kind == "compiled":
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(4):
        loss = call(torch.full((2, 4), 1.0 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 1:
            change(model, call)
    params = model.parameters()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    return plain([losses, [p.detach() for p in full]])


def compare() -> None:
    for change in CHANGES:
        expected = train("unsharded", change)
        for kind in ("eager", "compiled"):
            check_equal(train(kind, change), expected, f"{kind}, {change.__name__}")


def test_a_module_that_is_changed_by_itself_is_trained(two: Pool) -> None:
    """Torch's FSDP2 gathers the old values for ever, and says nothing."""
    two.run(compare)


def of_two_dtypes() -> None:
    torch.manual_seed(0)
    model: Any = Net()
    fully_shard(model.layer)
    fully_shard(model)
    model(torch.ones(2, 4)).backward()
    model.layer[1].bfloat16()
    with pytest.raises(TypeError, match=r"layer: parameters .* have several now .*1\.weight"):
        model(torch.ones(2, 4))
    with pytest.raises(TypeError, match="have several now"):
        model.layer.unshard()


def test_one_that_is_cast_and_stays_so(two: Pool) -> None:
    two.run(of_two_dtypes)
