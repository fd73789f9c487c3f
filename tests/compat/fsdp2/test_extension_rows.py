"""Chapter 4c of the specification: parameters whose local tensor brings an all-gather of its
own.
"""

from __future__ import annotations

import re
import types
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import check_equal, plain
from kit.extensions import Quantised, Wrapped, log, two_layers
from kit.oracle import (
    Api,
    each,
    grads,
    mesh_of,
    params,
    raised,
    rows,
    same,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_map_only

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


class Cast(Quantised):
    """Gathered in bf16: one input, of the padded size."""

    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return ((data * scale).to(torch.bfloat16),)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        ones = torch.ones(outputs[0].shape[0], *[1] * (outputs[0].dim() - 1))
        return super().fsdp_post_all_gather((*outputs, ones), metadata, dtype, out=out)


class Short(Wrapped):
    """The old signature. The full parameter is what was gathered, so that filling that fills it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        log.append(("pre", mesh.ndim, mesh.size()))
        return (self.data_inside.contiguous(),), "short"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (data,) = outputs
        log.append(("post", data.shape, metadata, dtype, out is None))
        if out is None:
            return data, ()
        assert data.untyped_storage()._cdata == out.untyped_storage()._cdata
        return None


class Half(Wrapped):
    """Only one of the two methods."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError


class Strange(Short):
    def fsdp_pre_all_gather(self, mesh: Any, more: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Unpadded(Quantised):
    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return data[:-1], scale


def learn(model: nn.Module, call: Any, steps: int = 3) -> Any:
    log.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found = []
    for step in range(steps):
        x = torch.randn(
            5, 6, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        )
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(inside((loss, grads(model), params(model))))
        optimizer.zero_grad()
    return found, list(log)


def inside(value: Any) -> Any:
    """As `plain`, with the tensors inside wrapped ones."""
    found = plain(value)
    unwrapped: Any = tree_map_only(Wrapped, lambda t: t.data_inside.clone(), found)
    return unwrapped


def eager(observe: Callable[..., Any], *args: Any) -> None:
    same(observe, *args, kinds=("eager",))


def each_eager(observe: Callable[..., Any]) -> None:
    each(observe, kinds=("eager",))


@pytest.mark.parametrize("kind", ["quantised", "short"])
@rows("4c.1", "4c.3", "4c.5", "4c.7", "4c.8", status="eager")
def test_extensions(two: Pool, four: Pool, kind: str) -> None:
    two.run(eager, extensions, kind, (), None)
    two.run(eager, extensions, kind, (), torch.bfloat16)
    four.run(eager, extensions, kind, (2, 2), None)


def extensions(api: Api, kind: str, shape: tuple[int, ...], param_dtype: torch.dtype | None) -> Any:
    """What the methods are told, in order, and what comes of it; the old signature does not hear of
    a dtype and keeps its own.
    """
    cls = {"quantised": Quantised, "short": Short}[kind]
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype if cls is Quantised else None, reduce_dtype=torch.float32
    )
    model = two_layers(cls)
    api.units(
        model, "0", mesh=mesh_of(*shape, names=("r", "s") if shape else None), mp_policy=policy
    )
    kinds = [type(p.to_local()).__name__ for p in model.parameters()]
    model[0].unshard()
    model[0].unshard()
    full = [
        (type(p.data).__name__, p.dtype, p.shape, p.detach().clone()) for p in model[0].parameters()
    ]
    model[0].reshard()
    sizes = [p.untyped_storage().size() for p in model[0].parameters() if type(p) is nn.Parameter]
    return kinds, full, sizes, learn(model, model)


@rows("4c.6", status="eager")
def test_uneven(two: Pool) -> None:
    two.run(eager, uneven)


def uneven(api: Api) -> Any:
    """Seven rows over two ranks: padded by the extension itself."""
    model = api.units(two_layers(Cast, rows=7), "0")
    return learn(model, model)


@rows("4c.6", status="eager")
def test_uneven_and_not_padded(two: Pool) -> None:
    """Only the rank that is short notices; the other gathers less than it should, so look at that
    rank alone.
    """
    two.run(each_eager, not_padded)


def not_padded(api: Api) -> None:
    model = api.fully_shard(two_layers(Unpadded, rows=7))
    unit = compiled_fsdp.fully_shard.state(model).runtime
    unit.is_agreed = True  # the other rank does not come along
    if torch.distributed.get_rank() == 1:
        with pytest.raises(
            AssertionError,
            match=r"0.weight of shape \(7, 6\).*should return the padded size \(4, 6\)",
        ):
            unit.start_unshard()


@rows("4c.1", status="eager")
def test_methods_that_come_late(two: Pool) -> None:
    two.run(eager, methods_that_come_late)


def methods_that_come_late(api: Api) -> Any:
    """Plain tensors, patched after sharding and before the first forward; those of the parameters
    before it are lost.
    """

    def pre(self: Tensor, mesh: Any) -> Any:
        log.append(("pre", mesh.size()))
        return (self.detach().clone(), torch.full((1,), 2.0)), None

    def post(
        self: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        log.append(("post", dtype, out is None))
        data = outputs[0] * outputs[1][0]
        if out is None:
            return data, (data,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(data)
        return None

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].weight.fsdp_pre_all_gather = types.MethodType(pre, model[2].weight)
    api.units(model, "0")
    local = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)
    return learn(model, model)


@rows("4c.1", "4c.3", status="eager")
def test_errors(two: Pool) -> None:
    two.run(eager, errors)


def errors(api: Api) -> Any:
    def forward(cls: type[Wrapped]) -> None:
        api.fully_shard(two_layers(cls))(torch.ones(5, 6))

    return raised(lambda: api.fully_shard(two_layers(Half))), raised(lambda: forward(Strange))


@rows("4c.11", status="improved")
def test_int_reshard(four: Pool) -> None:
    """Stock fails in backward, ours in the call."""
    four.run(stock_too, int_reshard)


def stock_too(observe: Callable[..., Any]) -> None:
    each(observe, kinds=("stock", "eager"))


def int_reshard(api: Api) -> None:
    """Stock fails in backward, ours in the call."""

    def step() -> None:
        model = api.units(two_layers(Short), "0", reshard_after_forward=2)
        model(torch.ones(5, 6)).sum().backward()

    assert raised(step) == "NotImplementedError"
    if not api.is_stock:
        assert (
            raised(lambda: api.fully_shard(two_layers(Short), reshard_after_forward=2))
            == "NotImplementedError"
        )


@rows("4c.12", status="improved")
def test_one_rank(two: Pool) -> None:
    """Stock hands over only the first input, ours all of them."""
    two.run(stock_too, one_rank)


def one_rank(api: Api) -> None:
    """Stock hands over only the first input; ours all of them."""
    model = api.fully_shard(two_layers(Quantised), mesh=mesh_of(2, 1, names=("r", "s")))
    error = raised(lambda: model(torch.ones(5, 6)))
    assert error == ("ValueError" if api.is_stock else None)


# -- what no graph can have


class Opaque(Quantised):
    """Does not say what is inside."""

    @property
    def __tensor_flatten__(self) -> Any:
        raise AttributeError


class AsksForValues(Quantised):
    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        assert scale.item() > 0
        return data, scale


class Forgets(Quantised):
    """What it multiplies with is neither a tensor inside nor its context."""

    @staticmethod
    def __new__(cls, data: Tensor, factor: float = 0.5) -> Any:
        return Quantised.__new__(cls, data)

    def __init__(self, data: Tensor, factor: float = 0.5) -> None:
        super().__init__(data)
        self.factor = factor

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_inside"], 1.0)

    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return data, scale * self.factor


class CountsCalls(Quantised):
    count = 0

    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        self.count += 1
        return data, scale * (1 + self.count)


class Decays(Quantised):
    def inputs(self, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        self.data_inside.mul_(0.5)
        return data, scale


class TellsItsModule(Quantised):
    def fsdp_pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any
    ) -> Any:
        inputs, rows = super().fsdp_pre_all_gather(mesh, size, stride, module, policy)
        module.last_scale = inputs[1]
        return inputs, rows


WHY = {
    Opaque: r"1\.0\.weight: Opaque has no __tensor_flatten__",
    AsksForValues: r"1\.0\.weight: tracing the one of AsksForValues ends in DataDependentOutput",
    Forgets: r"1\.0\.weight: Forgets.__tensor_unflatten__ forgets factor",
    CountsCalls: r"the one of CountsCalls writes to what outlives it \(count\)",
    Decays: r"the one of Decays writes to what outlives it \(aten.mul_.Tensor\)",
    TellsItsModule: r"the one of TellsItsModule writes to what outlives it \(last_scale\)",
}


@pytest.mark.parametrize("cls", WHY)
@rows("4c.1", "4c.3", "4c.5", "4c.7", "4c.8")
def test_compiled_model_runs_the_unit_eagerly(two: Pool, cls: type[Quantised]) -> None:
    two.run(runs_eagerly, cls)


def runs_eagerly(cls: type[Quantised]) -> None:
    """The unit with the extension says once why it stays outside; the other units are in graphs,
    and the numbers are stock's, as is what the methods are told.
    """
    api, ours = Api("stock"), Api("eager")
    expected, told = learn(*[api.units(three(cls), "0", "1")] * 2)
    torch._dynamo.reset()
    model = ours.units(three(cls), "0", "1")
    call = torch.compile(model, backend="compiled_fsdp_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, told_ours = learn(model, call)
    check_equal(plain(found), plain(expected), "compiled")
    check_equal(
        plain(told_ours[-len(told) // 3 :]), plain(told[-len(told) // 3 :]), "the last step"
    )
    said = [str(w.message) for w in caught if "all-gather extension" in str(w.message)]
    assert len(said) == len(set(said)) == 2, said
    assert all("of unit 1" in text and re.search(WHY[cls], text) for text in said), said
    assert "unit '1' runs eagerly" in said[1], (
        "the first is about the outermost unit, whose graph this breaks"
    )
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=WHY[cls]):
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(5, 6))


def three(cls: type[Quantised]) -> nn.Sequential:
    """Plain, with extensions, plain."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), two_layers(cls), nn.Linear(4, 4))


@rows("4c.1", "4b.8", status="eager")
def test_beside_tensor_parallelism(four: Pool) -> None:
    four.run(eager, beside_tensor_parallelism)


def beside_tensor_parallelism(api: Api) -> Any:
    """The local tensor of a DTensor is the subclass."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    torch.manual_seed(3)
    model = nn.Linear(6, 8, bias=False)
    whole = distribute_tensor(
        model.weight.detach(), mesh["tp"], [torch.distributed.tensor.Replicate()]
    )
    whole._local_tensor = Short(whole._local_tensor)
    model.weight = nn.Parameter(whole)
    api.fully_shard(model, mesh=mesh["dp"])
    x = torch.ones(3, 6) * (1 + mesh.get_local_rank("dp"))
    x = torch.distributed.tensor.DTensor.from_local(
        x, mesh["tp"], [torch.distributed.tensor.Replicate()]
    )
    log.clear()
    model(x).to_local().square().sum().backward()
    return inside(grads(model)), list(log)
