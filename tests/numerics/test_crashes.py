"""What random programs found to crash in compiled functions, where eager mode and the unsharded model run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard, overlap_optimizer

if TYPE_CHECKING:
    from pool import Pool

BACKEND = "compiled_fsdp_eager"


class Net(nn.Module):
    """Two layers, and what forward does between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Broken(Net):
    def between(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class Written(Net):
    """Writes to two parameters that share a buffer, which nothing else in the graph reads with autograd."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._foreach_mul_([p.data for p in self.first.parameters()], 0.5)
        return x


def shard(model: Any, *modules: nn.Module) -> Any:
    for module in (*modules, model):
        fully_shard(module, mesh=mesh_of("1d"))
    return model


def batch() -> Tensor:
    return torch.arange(8.0).view(2, 4) / 8


def backward_in_a_broken_function() -> None:
    """Hooks that run in the backward are no code of the user's, and are not compiled."""
    model = Broken()
    sharded = shard(model, model.first, model.second)

    def train(x: Tensor) -> Tensor:
        loss = sharded(x).square().mean()
        loss.backward()
        return loss.detach()

    wanted = train(batch())
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(train, backend=BACKEND)
    for _ in range(2):
        assert torch.equal(compiled(batch()), wanted)
        assert all(torch.equal(p.grad.to_local(), grad) for p, grad in zip(model.parameters(), grads, strict=True))
        model.zero_grad()


def gradients_that_arrived() -> None:
    """Dynamo looks at `.grad` of a parameter that a graph reads, and at its offset."""
    model = shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap_optimizer(model, optimizer)
    torch.compile(model, backend=BACKEND)(batch()).sum().backward()
    optimizer.step()
    grads: list[Any] = [p.grad for p in model.parameters()]
    assert all(grad.storage_offset() == grad.to_local().storage_offset() for grad in grads)
    total = torch.compile(
        lambda: sum(p.to_local().sum() + p.grad.to_local().sum() for p in model.parameters()), backend="eager"
    )
    with torch.no_grad():
        wanted = sum(p.to_local().sum() + p.grad.to_local().sum() for p in model.parameters())
        assert torch.allclose(total(), wanted)


def state_in_a_function() -> None:
    """A tensor of `state_dict()` is the parameter's memory and version, and an input that Dynamo takes."""
    model = shard(Net())
    state = model.state_dict()
    total = torch.compile(lambda entries: sum(v.to_local().sum() for v in entries), backend="aot_eager", fullgraph=True)
    assert torch.allclose(total(list(state.values())), sum(p.to_local().sum() for p in model.state_dict().values()))
    written, before = model(batch()), model.second.bias.detach().clone()
    state["second.bias"].zero_()  # the root keeps full parameters: it must notice
    assert torch.allclose(model(batch()), written - before)
    assert all(type(value) is DTensor for value in state.values())


def state_written_in_a_graph() -> None:
    """The graph has the buffer and the tensor in it as two inputs: it cannot show a write to one to reads of the other."""
    model = shard(Net())
    entry = model.state_dict()["second.bias"]

    def write(x: Tensor, entry: DTensor) -> Tensor:
        entry.mul_(0.5)
        return model(x)

    with torch.no_grad(), pytest.raises(Exception, match=r"writes in place to a tensor of state_dict\(\)"):
        torch.compile(write, backend=BACKEND, fullgraph=True)(batch(), entry)


def two_writes_to_a_buffer() -> None:
    """Each is a view of the buffer, which has views among its users then."""
    wanted, model = Written(), Written()
    model.load_state_dict(wanted.state_dict())
    model = shard(model, model.first)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        assert torch.allclose(compiled(batch()), wanted(batch()))
        assert torch.allclose(compiled(batch()), wanted(batch()))


def cast_after_a_tie() -> None:
    """`to` does not come to the parameter that was there before the tie; what shares its buffer is cast all the same."""
    wanted, model = Net(), Net()
    model.load_state_dict(wanted.state_dict())
    model = shard(model, model.second)
    for each in (wanted, model):
        each.second.weight = each.first.weight
        each.to(torch.float64)
    x = batch().double()
    assert model.second.bias.dtype == torch.float64
    for call in (model, torch.compile(model, backend=BACKEND)):
        assert torch.allclose(call(x), wanted(x))


@pytest.mark.parametrize(
    "case",
    [
        backward_in_a_broken_function,
        gradients_that_arrived,
        state_in_a_function,
        state_written_in_a_graph,
        two_writes_to_a_buffer,
        cast_after_a_tie,
    ],
)
def test_runs(two: Pool, case: Any) -> None:
    two.run(case)
