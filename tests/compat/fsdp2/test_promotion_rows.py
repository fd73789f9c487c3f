"""Weights in bf16 and activations in fp32: in which dtype gradients of the weights come to their
reduction.

Since torch 2.15 stock leaves them as autograd yields them, in fp32 where the activations are;
before, it rounds them to bf16. Ours does what the installed one does. That its graphs do what it
does eagerly is tested with both.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kit.compare import check_equal, plain
from kit.oracle import BACKENDS, Api, grads, ours_alike, params, rows, same
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import compile_step, fully_shard, planned
from compiled_fsdp.torch_private.modules import reduces_in_grad_dtype
from compiled_fsdp.units import specs

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

LOW = torch.bfloat16
ROWS, WIDTH = 16, 8


class Scale(torch.autograd.Function):
    """Whose backward returns the dtype of the activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w.float(), (grad * x).sum(0)


class RoundedScale(Scale):
    """Which casts by itself."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w.float(), (grad * x).sum(0).to(w.dtype)


def written(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Tensor:
    buffer = torch.zeros(2, WIDTH)
    buffer[0] = w
    return x * buffer[0] + x * torch.zeros(WIDTH).copy_(v)


def in_place(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Tensor:
    y = x.clone()
    y *= w
    y += v
    return y


# What a layer computes of activations [R, C] in fp32 and of weights w [C], v [C], m [C, C] in bf16.
LAYERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "promoted": lambda x, w, v, m: x * w + v,
    "cast": lambda x, w, v, m: x * w.float() + x * v.type_as(x),
    "both": lambda x, w, v, m: x * w + torch.sin(x) * w.float(),
    "twice": lambda x, w, v, m: (x * w + 1) * w,
    "in two dtypes": lambda x, w, v, m: x * w + x.to(LOW) * w + (x[0] * v + x[0].to(LOW) * v),
    "chosen": lambda x, w, v, m: x * torch.where(x > 0, w, v),
    "joined": lambda x, w, v, m: x * torch.cat([w[:4], torch.ones(4)]) * v,
    "written": written,
    "in place": in_place,
    "summed": lambda x, w, v, m: x * w.sum(dtype=x.dtype) + x * v.mean(dtype=x.dtype),
    "normed": lambda x, w, v, m: F.rms_norm(x, (WIDTH,)) * w + F.layer_norm(x.to(LOW), (WIDTH,), v),
    "softmax": lambda x, w, v, m: x * torch.softmax(v, 0, dtype=x.dtype) + x * torch.cumsum(w, 0),
    "function": lambda x, w, v, m: Scale.apply(x, w) + RoundedScale.apply(x, v),  # type: ignore[no-untyped-call]
    "product": lambda x, w, v, m: x @ m.float() + F.linear(x.to(LOW), m),
    "picked": lambda x, w, v, m: x * m[torch.arange(WIDTH) % 3].sum(0) * w,
    "one more": lambda x, w, v, m: x * (1 + w) + x * (v + w),
    "handed on": lambda x, w, v, m: x * w.clone() + x * v.view(WIDTH),
    "function of another": lambda x, w, v, m: Scale.apply(x, w.clone()) + Scale.apply(x, 1 + v),  # type: ignore[no-untyped-call]
    "with itself": lambda x, w, v, m: torch.addcmul(x, x * w, w + 1) + torch.where(x > 0, v, v + 1),
    "alone": lambda x, w, v, m: x * torch.cumsum(w[:1], 0, dtype=x.dtype),
    "wider": lambda x, w, v, m: (x.double() * w).float(),
}

# Since 2.15 stock adds the gradients of such a parameter in fp32 in a first backward without
# synchronization, and in their own dtypes else; ours always does the latter.
READ_TWICE = ("both", "twice", "in two dtypes", "product", "one more", "with itself", "wider")


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.w, self.v = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH))
        self.m = nn.Parameter(torch.rand(WIDTH, WIDTH) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return LAYERS[self.name](x.float(), self.w, self.v, self.m).to(LOW)


class Model(nn.Module):
    """Layers beside each other: a last bit in one is one in all from the second step on."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, LAYERS))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return sum(checkpoint(layer, x, use_reentrant=False).float() for layer in self.layers)  # type: ignore[return-value]
        return sum(layer(x).float() for layer in self.layers)  # type: ignore[return-value]


def train(api: Api, is_checkpointed: bool, reduce_dtype: torch.dtype | None) -> Any:
    torch.manual_seed(0)
    model = Model(is_checkpointed=is_checkpointed)
    for unit in (*model.layers, model):
        api.fully_shard(unit, mp_policy=MixedPrecisionPolicy(LOW, reduce_dtype))
    return learn(model, api.compile(model))


def learn(model: Any, call: Any) -> Any:
    """Gradients of two steps, and of two backwards that are reduced together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step, syncs in enumerate((True, True, False, True)):
        model.set_requires_gradient_sync(syncs)
        call(batch(step)).square().mean().backward()
        if syncs:
            found.append(plain(grads(model)))
            optimizer.step()
            optimizer.zero_grad()
    names = list(LAYERS)
    found[-1] = {
        name: grad
        for name, grad in found[-1].items()
        if names[int(name.split(".")[1])] not in READ_TWICE
    }
    return found


def batch(step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


@rows("17.15")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_as_stock(two: Pool, is_checkpointed: bool, reduce_dtype: torch.dtype | None) -> None:
    two.run(same, train, is_checkpointed, reduce_dtype)


@rows("17.11")
def test_grad_dtype(two: Pool) -> None:
    """Set on bf16 parameters, it leaves gradients wide on all versions."""
    two.run(same if reduces_in_grad_dtype() else ours_alike, of_grad_dtype)


def of_grad_dtype(api: Api) -> Any:
    torch.manual_seed(0)
    model = Model(is_checkpointed=False).to(LOW)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    for unit in (*model.layers, model):
        api.fully_shard(unit)
    return learn(model, api.compile(model))


def test_whatever_is_installed(two: Pool) -> None:
    """The same where gradients are left wide, and where they are rounded: what is not installed is
    compared here, also in the graph of a whole step, and what is, above.
    """
    two.run(whatever_is_installed)


def whatever_is_installed() -> None:
    found = {}
    installed = specs.reduces_in_grad_dtype()
    for is_wide in (False, True):
        with mock.patch.object(specs, "reduces_in_grad_dtype", return_value=is_wide):
            found[is_wide] = eager = train(Api("eager"), False, torch.float32)
            if is_wide == installed:
                continue
            check_equal(train(Api("compiled"), False, torch.float32), eager, f"wide: {is_wide}")
            stepped = whole_step("eager"), whole_step("compiled")
            check_equal(stepped[1], stepped[0], f"whole step, wide: {is_wide}")
    differ = {
        f"{list(LAYERS)[int(name.split('.')[1])]} {name[-1]}"
        for name, grad in found[True][0].items()
        if grad is not None and not grad["local"].equal(found[False][0][name]["local"])
    }
    assert differ >= {"promoted w", "promoted v", "twice w", "joined v", "function w"}, differ
    assert not differ & {"cast w", "cast v", "written w", "function v", "product m"}, differ


def whole_step(kind: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(is_checkpointed=False)
    for unit in (*model.layers, model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(LOW, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "compiled":
        step = compile_step(
            model, optimizer, lambda m, x: m(x).square().mean(), backend=BACKENDS[kind]
        )
    for number in range(2):
        if kind == "compiled":
            step(batch(number))
        else:
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return plain(params(model))


@pytest.mark.parametrize("name", ["promoted", "both", "twice", "in two dtypes"])
def test_units_that_are_called(two: Pool, name: str) -> None:
    """Where equal units are one subgraph, that returns what their reductions are given."""
    two.run(units_that_are_called, name)


def units_that_are_called(name: str) -> None:
    with mock.patch.object(specs, "reduces_in_grad_dtype", return_value=True):
        eager = chain(name, "eager", "off")
        for regions in ("off", "units"):
            check_equal(chain(name, "compiled", regions), eager, f"regions={regions!r}")
    if not reduces_in_grad_dtype():
        rounded = chain(name, "eager", "off")
        assert any(not rounded[n]["local"].equal(eager[n]["local"]) for n in eager)


def chain(name: str, kind: str, regions: str) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    api = Api(kind)
    model = nn.Sequential(*(Layer(name) for _ in range(4)))
    for unit in (*model, model):
        api.fully_shard(unit, mp_policy=MixedPrecisionPolicy(LOW, torch.float32))
    with planned(regions=regions), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compiled for their place")
        x = batch(0).to(LOW).requires_grad_()
        api.compile(model)(x).square().mean().backward()
    return plain({n: g for n, g in grads(model).items() if g is not None})


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


@rows("18.6")
@pytest.mark.parametrize("units", [("inner",), ("embedding", "inner", "head")])
def test_tied_after_sharding(two: Pool, units: tuple[str, ...]) -> None:
    """Stock gathers the weight for each module, and adds gradients that are reduced; ours adds
    them first, in the dtype in which it reduces: another order of the same additions.
    """
    two.run(ours_alike, tied_after_sharding, units, 1)
    two.run(tied_as_stock, units)


def tied_as_stock(units: tuple[str, ...]) -> None:
    same(tied_after_sharding, units, rtol=1e-5, atol=1e-8)


def tied_after_sharding(api: Api, units: tuple[str, ...], when: int = 0) -> Any:
    """when: behind how many steps; stock only sees it before the first."""
    torch.manual_seed(0)
    model = api.units(Language(), *units, mp_policy=MixedPrecisionPolicy(LOW, torch.float32))
    call, found = api.compile(model), []
    for step in range(2):
        if step == when:
            model.head.weight = model.embedding.weight
        tokens = torch.arange(2 * ROWS).view(2, ROWS) * (step + 2) % 12
        F.cross_entropy(call(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        found.append(plain(model.embedding.weight.grad))
        model.zero_grad()
    return found
