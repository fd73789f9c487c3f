"""What random programs found to crash in compiled functions, where eager mode and the unsharded
model run.
"""

from __future__ import annotations

import copy
import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.harness import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard, overlap_optimizer

if TYPE_CHECKING:
    from kit.pool import Pool

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
    """Writes to two parameters that share a buffer, which nothing else in the graph reads with
    autograd.
    """

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
    """Hooks that run in the backward are no code of the user's, and are not compiled; nor is what
    the compilation of the backward, which is inside of the function's, puts back when it ends.
    """
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own, which compiling raises meanwhile
    try:
        train_broken()
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


def train_broken() -> None:
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
        assert all(
            torch.equal(p.grad.to_local(), grad)
            for p, grad in zip(model.parameters(), grads, strict=True)
        )
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
        lambda: sum(p.to_local().sum() + p.grad.to_local().sum() for p in model.parameters()),
        backend="eager",
    )
    with torch.no_grad():
        wanted = sum(p.to_local().sum() + p.grad.to_local().sum() for p in model.parameters())
        assert torch.allclose(total(), wanted)


def state_in_a_function() -> None:
    """A tensor of `state_dict()` is the parameter's memory and version, and an input that Dynamo
    takes.
    """
    model = shard(Net())
    state = model.state_dict()
    total = torch.compile(
        lambda entries: sum(v.to_local().sum() for v in entries),
        backend="aot_eager",
        fullgraph=True,
    )
    assert torch.allclose(
        total(list(state.values())), sum(p.to_local().sum() for p in model.state_dict().values())
    )
    written, before = model(batch()), model.second.bias.detach().clone()
    state["second.bias"].zero_()  # the root keeps full parameters: it must notice
    assert torch.allclose(model(batch()), written - before)
    assert all(type(value) is DTensor for value in state.values())


def state_written_in_a_graph() -> None:
    """The graph has the buffer and the tensor in it as two inputs: it cannot show a write to one to
    reads of the other.
    """
    model = shard(Net())
    entry = model.state_dict()["second.bias"]

    def write(x: Tensor, entry: DTensor) -> Tensor:
        entry.mul_(0.5)
        return model(x)

    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"writes in place to a tensor of state_dict\(\)"),
    ):
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
    """`to` does not come to the parameter that was there before the tie; what shares its buffer is
    cast all the same.
    """
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


class SumsParameters(Net):
    """Reads another unit's parameters, which iterating finds, with what autograd need not save, or
    has to.
    """

    squares = False

    def forward(self, x: Tensor) -> Tensor:
        scale = sum((p.square() if self.squares else p).sum() for p in self.parameters())
        return super().forward(x * scale)


def iterated_while_gathered() -> None:
    """A unit that was unsharded by hand: its gradients from another's forward are reduced with its
    own, in a graph too.
    """
    wanted, model = SumsParameters(), SumsParameters()
    model.load_state_dict(wanted.state_dict())
    model = shard(model, model.first)
    wanted(batch()).sum().backward()
    for call in (model, torch.compile(model, backend=BACKEND, fullgraph=True)):
        model.zero_grad()
        model.first.unshard()
        call(batch()).sum().backward()
        for param, expected in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(param.grad.full_tensor(), expected.grad)


def freed_before_its_backward() -> None:
    """What autograd saved of another unit's parameter is gone when backward comes to it: an error,
    where memory was read that is nobody's, and stock's processes die.
    """
    model = SumsParameters()
    model.squares = True
    model = shard(model, model.first)
    model.first.unshard()
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.reset_iter_state()
    model.squares = False
    model.first.unshard()
    model(batch()).sum().backward()


class Renormed(nn.Module):
    """Writes to a parameter while it reads it, and reads it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, max_norm=0.5)
        self.head = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * self.embed.weight.sum(0))


def written_while_it_stays() -> None:
    """`set_reshard_after_backward(False)`: the full parameter is an input of the graph, and may be
    written to there.
    """
    wanted = Renormed()
    models = [shard(copy.deepcopy(wanted)) for _ in range(2)]
    for model in models:
        model.set_reshard_after_backward(False)
    ids = torch.arange(4)
    outputs = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* the write is lost")
        for call in (models[0], torch.compile(models[1], backend=BACKEND)):
            outputs.append(call(ids))
            outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert torch.allclose(outputs[0], wanted(ids))


class Mixes(Net):
    """Reads by iteration what is tied to a parameter of another unit."""

    def between(self, x: Tensor) -> Tensor:
        for p in self.second.parameters():
            x = x * p.sum()
        return x


def iterated_after_a_tie() -> None:
    """The unit that owns a tied parameter is gathered for those that read it too, in a graph as in
    eager mode.
    """
    wanted, model = Mixes(), Mixes()
    model.load_state_dict(wanted.state_dict())
    model = shard(model, model.first)
    for each in (wanted, model):
        each.second.weight = each.first.weight
    for call in (model, torch.compile(model, backend=BACKEND, fullgraph=True)):
        assert torch.allclose(call(batch()), wanted(batch()))


def tied_on_meta() -> None:
    """What no module holds any more gets no values from anybody, and needs none."""
    with torch.device("meta"):
        model = Net()
    model = shard(model, model.first)
    model.second.weight = model.first.weight
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    wanted = 4 * 0.1 * (4 * 0.1 + 0.1) + 0.1
    for call in (model, torch.compile(model, backend=BACKEND, fullgraph=True)):
        assert torch.allclose(call(torch.ones(2, 4)), torch.full((2, 4), wanted))


class Fails(Net):
    fails = False

    def between(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("as asked")
        return x


def gradients_kept_after_an_exception() -> None:
    """`zero_grad` does not come to them: that is said, and `reset_iter_state` does."""
    model = shard(Fails())
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    model.set_requires_gradient_sync(True)
    model.fails = True
    with (
        pytest.warns(UserWarning, match=r"Fails keeps gradients.*reset_iter_state"),
        pytest.raises(ValueError, match="as asked"),
    ):
        model(batch())
    model.fails = False
    model.zero_grad()
    model.reset_iter_state()
    model(batch()).sum().backward()
    wanted = copy.deepcopy([p.grad.full_tensor() for p in model.parameters()])
    model.zero_grad()
    model(batch()).sum().backward()
    assert all(
        torch.equal(p.grad.full_tensor(), w)
        for p, w in zip(model.parameters(), wanted, strict=True)
    )


class Assigns(Net):
    """A momentum encoder as MoCo writes it."""

    def between(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.second.parameters(), self.first.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return x


def assigned_data() -> None:
    """DTensor ignores it, sharded by us or by stock: we say so. What is written in place is taken,
    and nothing is said.
    """
    model = Assigns()
    model = shard(model, model.first, model.second)
    model(batch())
    with pytest.warns(
        UserWarning,
        match=r"`.data` of parameter first.weight|`.data` of parameter second.weight and 1 more",
    ):
        model(batch())
    other = shard(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            other(batch()).sum().backward()
            with torch.no_grad():
                for p in other.parameters():
                    p.data.copy_(p * 0.9)
            other.to(torch.float64).to(torch.float32)


class Adds(Net):
    """Reads a parameter past the module's attributes."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.first._parameters["bias"]
        return super().forward(x + bias)


def read_past_the_attributes() -> None:
    """Of a unit that was gathered by hand it would be a leaf whose gradient nothing reduces."""
    model = Adds()
    model = shard(model, model.first)
    model.first.unshard()
    with pytest.raises(Exception, match=r"first.bias, which unshard\(\) has gathered, is an input"):
        torch.compile(model, backend=BACKEND)(batch())


class SumsAfter(Net):
    """Iterates over a unit's parameters behind its forward."""

    def between(self, x: Tensor) -> Tensor:
        return x * sum(p.sum() for p in self.first.parameters())


def iterated_while_they_stay() -> None:
    """`reshard_after_forward=False`: full parameters are there until backward, in a trace too."""
    wanted, model = SumsAfter(), SumsAfter()
    model.load_state_dict(wanted.state_dict())
    for module in (model.first, model):
        fully_shard(module, mesh=mesh_of("1d"), reshard_after_forward=False)
    wanted(batch()).sum().backward()
    for call in (model, torch.compile(model, backend=BACKEND, fullgraph=True)):
        model.zero_grad()
        call(batch()).sum().backward()
        for param, expected in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(param.grad.full_tensor(), expected.grad)


class WritesBehindABreak(Net):
    """The sharded parameters of a unit whose forward is over, in a graph of their own."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        torch._foreach_mul_([p.data for p in self.first.parameters()], 0.9)
        return self.second(x)


def written_between_graphs() -> None:
    """AOTAutograd gives a parameter that a graph only writes to a gradient of zeros, which no
    module wants; whether the graph before has kept the old values is the plan's to say.
    """
    model = WritesBehindABreak()
    model = shard(model, model.first, model.second)
    wanted = [p.full_tensor() * 0.9 for p in model.first.parameters()]
    compiled = torch.compile(model, backend=BACKEND)
    with pytest.warns(UserWarning, match=r"first.weight and 1 more is written to in a graph"):
        loss = compiled(batch()).sum()
    loss.backward()
    for p, expected in zip(model.first.parameters(), wanted, strict=True):
        assert torch.equal(p.full_tensor(), expected)
        assert isinstance(p.grad, DTensor)
        assert p.grad.full_tensor().any()


def left_by_an_eager_forward() -> None:
    """A frozen unit's full parameters, which no gradient would drop: what the loop writes to
    `parameters()` comes to the shards.
    """
    write_to_what_is_left(lambda model: torch.compile(lambda x: model(x), backend=BACKEND))
    write_to_what_is_left(lambda model: torch.compile(model, backend=BACKEND))


def write_to_what_is_left(compiled: Any) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    for module in (model.first, model):
        fully_shard(module, mesh=mesh_of("1d"), reshard_after_forward=False)
    call = compiled(model)
    for module in (model, plain):
        module.first.requires_grad_(False)
    for _ in range(3):
        model(batch()), plain(batch())
        loss = call(batch()).sum()
        loss.backward()
        assert torch.equal(loss, plain(batch()).sum())
        for p in [*model.parameters(), *plain.parameters()]:
            p.data.mul_(0.5)


class AssignsInside(Net):
    """Puts tensors of inference mode into a unit whose parameters are gathered."""

    def between(self, x: Tensor) -> Tensor:
        for p in self.first.parameters():
            p.data = p.data * 0.5
        return x


def assigned_in_inference_mode() -> None:
    """Nobody may fill an inference tensor outside of the mode, so it is not filled again."""
    model = shard(AssignsInside())
    with torch.inference_mode():
        model(batch())
    model(batch()).sum().backward()
    assert model.first.weight.grad.full_tensor().any()


def taken_out_on_meta() -> None:
    """A module that is no longer in the model gets no values, and none are missed."""
    with torch.device("meta"):
        model = shard(Net())
    model.second = model.first
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    for call in (model, torch.compile(model, backend=BACKEND, fullgraph=True)):
        assert torch.allclose(call(torch.ones(2, 4)), torch.full((2, 4), 4 * 0.1 * 0.5 + 0.1))


@pytest.mark.parametrize(
    "case",
    [
        written_between_graphs,
        left_by_an_eager_forward,
        assigned_in_inference_mode,
        taken_out_on_meta,
        read_past_the_attributes,
        iterated_while_they_stay,
        iterated_after_a_tie,
        tied_on_meta,
        gradients_kept_after_an_exception,
        assigned_data,
        iterated_while_gathered,
        freed_before_its_backward,
        written_while_it_stays,
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
