"""Graphs and eager units in one model: whatever Dynamo gives up, and in whatever order sharding and
compiling came.

A parameter is gathered when it is used, freed when done, and its gradient reduced once: so the
number of communications is that of a model in one graph, and gradients are those of the unsharded
model.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.harness import SLOW
from kit.models import Block, Net
from kit.oracle import communications
from torch import nn

import compiled_fsdp
from compiled_fsdp import MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool
    from torch import Tensor

BACKEND = "compiled_fsdp_eager"


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return x + self.second(h)


class ReadsItem(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if h.sum().item() > 0:
            h = h * 2
        return x + self.second(h)


class Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Doubled(torch.autograd.Function):
    """A third party's autograd function that Dynamo is kept out of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


@torch.compiler.disable
def doubled(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = Doubled.apply(x, weight)
    return result


class ThirdParty(Block):
    def forward(self, x: Tensor) -> Tensor:
        again = doubled(x, self.first.weight)
        return x + self.second(torch.tanh(self.first(x)) + again)


class BreaksInTheRoot(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        print(end="")
        torch._dynamo.graph_break()
        return self.head(x)


MODELS = {
    "whole": lambda: Net(num_blocks=3),
    "break in a unit": lambda: Net(middle=Breaks, num_blocks=3),
    "item in a unit": lambda: Net(middle=ReadsItem, num_blocks=3),
    "disabled unit": lambda: Net(middle=Disabled, num_blocks=3),
    "third-party function": lambda: Net(middle=ThirdParty, num_blocks=3),
    "break in the root": lambda: BreaksInTheRoot(num_blocks=3),
}
ORDERS = (
    "compile(shard(m))",
    "shard(compile(m))",
    "shard, m.compile()",
    "m.compile(), shard",
    "shard, block.compile()",
    "block.compile(), shard",
    "blocks = compile(block), shard",
)


def build(name: str, order: str, backend: str = BACKEND, **options: Any) -> tuple[nn.Module, Any]:  # noqa: C901
    """The sharded model, and what to call."""
    torch.manual_seed(3)
    model: Any = MODELS[name]()
    if order == "block.compile(), shard":
        for layer in model.layers:
            layer.compile(backend=backend)
    if order == "m.compile(), shard":
        model.compile(backend=backend)
    if order == "blocks = compile(block), shard":
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer, backend=backend)
    for layer in model.layers:
        fully_shard(layer, **options)
    if order == "shard(compile(m))":
        return model, fully_shard(torch.compile(model, backend=backend), **options)
    fully_shard(model, **options)
    if order == "shard, block.compile()":
        for layer in model.layers:
            layer.compile(backend=backend)
    if order == "shard, m.compile()":
        model.compile(backend=backend)
    return model, torch.compile(model, backend=backend) if order == "compile(shard(m))" else model


def step(call: Any, number: int, rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
    loss: Tensor = call(x).float().square().mean()
    loss.backward()
    return loss.detach()


def seen_in(run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, int]]:
    """What `run` returns, and what it communicates."""
    found: list[Tensor] = []
    seen = communications(lambda: found.append(run()))
    return found[0], seen


def check(
    name: str, order: str, options: dict[str, Any], atol: float, backend: str = BACKEND
) -> None:
    """Worker function: three steps beside the unsharded model."""
    warnings.simplefilter("ignore")
    model, call = build(name, order, backend, **options)
    torch.manual_seed(3)
    reference: Any = MODELS[name]()
    if options:
        reference = reference.to(options["mp_policy"].param_dtype)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    dtype = next(reference.parameters()).dtype
    for number in range(3):
        if number == 0:  # ranks compare their models, and compile
            loss = step(call, 0, dist.get_rank())
        else:
            loss, seen = seen_in(partial(step, call, number, dist.get_rank()))
            assert seen == {"gather": 7, "reduce": 4, "all_reduce": 0}, (number, seen)
        expected = step(lambda x: reference(x.to(dtype)), number, dist.get_rank())
        assert torch.allclose(loss, expected, atol=atol)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(q.grad)
            q.grad /= dist.get_world_size()
            assert torch.allclose(p.grad.full_tensor().to(q.dtype), q.grad, atol=atol), (
                number,
                p.shape,
            )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert not any("_orig_mod" in name for name in model.state_dict()) or order.startswith("blocks")


CASES = {(name, ORDERS[0]) for name in MODELS} | {("disabled unit", order) for order in ORDERS}


@pytest.mark.parametrize(("name", "order"), sorted(CASES))
def test_as_unsharded_with_each_gather_once(two: Pool, name: str, order: str) -> None:
    two.run(check, name, order, {}, 1e-6)


def test_graphs_and_eager_units_with_inductor(two: Pool) -> None:
    two.run(check, "item in a unit", ORDERS[0], {}, 1e-6, "inductor", timeout=SLOW)


@pytest.mark.parametrize("order", ORDERS[::2])
def test_with_casts_at_the_boundaries(two: Pool, order: str) -> None:
    """A cast makes the pre-forward hook worth a graph of its own, which must not be split from its
    forward.
    """
    two.run(
        check,
        "break in a unit",
        order,
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
        1e-6,
    )


def test_the_fallback_is_said_once(two: Pool) -> None:
    two.run(said_once)


def said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, call = build("item in a unit", "compile(shard(m))")
        for number in range(3):
            step(call, number, dist.get_rank())
    texts = [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
    assert len(texts) == 1, texts
    assert "unit 'layers.1'" in texts[0]
    assert "test_mixed.py" in texts[0]
    assert "if h.sum().item() > 0" in texts[0]


def test_fallback_as_an_error(two: Pool) -> None:
    two.run(as_an_error)


def as_an_error() -> None:
    _, call = build("break in a unit", "compile(shard(m))")
    compiled_fsdp.set_fallback("error")
    try:
        with pytest.raises(
            compiled_fsdp.FallbackError, match=r"unit 'layers\.1' runs eagerly.*test_mixed\.py"
        ):
            step(call, 0, 0)
    finally:
        compiled_fsdp.set_fallback("warn")
    model, call = build("whole", "compile(shard(m))")
    compiled_fsdp.set_fallback("error")
    try:
        step(call, 0, dist.get_rank())
    finally:
        compiled_fsdp.set_fallback("warn")
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match='"warn" or "error"'):
        compiled_fsdp.set_fallback("ignore")  # type: ignore[arg-type]


def test_a_method_that_is_not_forward(two: Pool) -> None:
    two.run(not_forward)


def not_forward() -> None:
    class Speaker(Block):
        def speak(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    torch.manual_seed(0)
    model = Speaker()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.ones(2, 6)
    with pytest.raises(RuntimeError) as caught:
        model.speak(x)
    assert str(caught.value) == (
        "Linear was called while its parameter first.weight is sharded: its unit 'Speaker' was not "
        "called, but another method of it, or its forward(...) by name, which passes over the "
        "hooks that gather; or its call has ended, which leaves nothing gathered where no gradient "
        "is asked for. Call the module itself; or call "
        "register_fsdp_forward_method(sharded_module, name) for that method, or "
        "sharded_module.unshard() before and .reshard() after it"
    )
    compiled_fsdp.register_fsdp_forward_method(model, "speak")
    for call in (model.speak, torch.compile(model.speak, backend=BACKEND, fullgraph=True)):
        assert torch.allclose(call(x), reference.speak(x))
        call(x).sum().backward()
    reference.speak(x).sum().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), 2 * q.grad)


class Headless(nn.Module):
    """Its head is for the loss to apply."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def head_in_the_loss() -> None:
    """Behind a graph it has nothing to compute with; what the error advises is right."""
    torch.manual_seed(0)
    reference = Headless()
    x = torch.ones(2, 6)
    reference.head(reference(x)).sum().backward()

    model = copy.deepcopy(reference)
    model.zero_grad()
    fully_shard(model)
    call = torch.compile(model, backend=BACKEND)
    with pytest.raises(RuntimeError) as caught:
        model.head(call(x))
    assert str(caught.value) == (
        "Linear was called while its parameter head.weight is sharded: its unit 'Headless' is in a "
        "graph, which leaves nothing gathered behind it. Give this module a unit of its own, by "
        "fully_shard before its parent's; or compile what calls it together with the model; or, "
        "for another method of a sharded module, call "
        "register_fsdp_forward_method(sharded_module, name)"
    )
    own = copy.deepcopy(reference)
    own.zero_grad()
    fully_shard(own.head)
    fully_shard(own)
    hidden = torch.compile(own, backend=BACKEND)
    together = torch.compile(lambda x: model.head(model(x)), backend=BACKEND, fullgraph=True)
    for each, run in ((own, lambda x: own.head(hidden(x))), (model, together)):
        run(x).sum().backward()
        for p, q in zip(each.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), q.grad)


def test_a_head_that_the_loss_applies(two: Pool) -> None:
    two.run(head_in_the_loss)
