"""Chapters 9, 9b and 13: mixed precision, how gradients are averaged, CPU offload."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import pytest
import torch
from kit.harness import SLOW
from kit.oracle import (
    Api,
    batch,
    close,
    communications,
    eager_same,
    grads,
    inductor_same,
    is_sharded,
    mesh_of,
    net,
    net_of_units,
    params,
    raised,
    rows,
    same,
    train_step,
    unless_stock_raises,
)
from kit.pool import Pool
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

BF16_ORDER = {"rtol": 2e-2, "atol": 1e-4}  # the same in bfloat16

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    """An input that is a dataclass."""

    x: Tensor
    name: str = "batch"


def close_in_bf16(observe: Any, *args: Any) -> None:
    same(observe, *args, **BF16_ORDER)


def two_steps(api: Api, model: Any) -> Any:
    """Input gradients, losses and gradients of two steps."""
    call = api.compile(model)
    seen = []
    for step in (0, 1):
        x = batch(step=step, requires_grad=True)
        out = call(x)
        out.float().square().mean().backward()
        seen.append([out.dtype, out, x.grad])
    return seen, grads(model), params(model)


@rows("9.1")
def test_policy(two: Pool) -> None:
    two.run(same, policy)


def policy(api: Api) -> Any:
    default = api.MixedPrecisionPolicy()
    with pytest.raises(FrozenInstanceError):
        default.param_dtype = torch.float32
    return [
        (f.name, getattr(default, f.name))
        for f in fields(default)
        if f.name != "param_dtype_override_fn"
    ]  # 17.2


POLICIES = (
    ("bfloat16", None, None),
    ("bfloat16", "float32", None),
    ("bfloat16", "bfloat16", "float32"),
    (None, "bfloat16", None),
    (None, None, "float64"),
    ("float16", "float32", "float32"),
    ("float64", None, "bfloat16"),
    ("float32", "float32", None),
)


@rows("9.2", "9.3", "9.5", "9.6", "9.8", "9.11", "9.12")
@pytest.mark.parametrize("dtypes", POLICIES, ids=str)
def test_dtypes(two: Pool, dtypes: Any) -> None:
    two.run(same, dtypes_of, dtypes)


def dtypes_of(api: Api, names: Any) -> Any:
    param, reduce, output = (n and getattr(torch, n) for n in names)
    model = net()
    for name in "02":
        api.fully_shard(
            model.get_submodule(name), mp_policy=api.MixedPrecisionPolicy(param, reduce)
        )
    return two_steps(
        api, api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(param, reduce, output))
    )


class Counted(nn.Module):
    """An integer parameter, a buffer, and what forward got."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(6, 5)
        self.steps = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: Tensor, *, scale: Tensor, index: Tensor) -> Any:
        out = self.inner(x * scale) * self.steps
        return {
            "out": out,
            "shifted": out + self.shift,
            "index": index + 1,
            "steps": self.steps + index,
        }


@rows("9.3", "9.9", "9.11", "9.13")
@pytest.mark.parametrize("cast", [True, False])
def test_what_is_not_cast(two: Pool, cast: bool) -> None:
    unless_stock_raises(two, what_is_not_cast, "floating point dtype can require gradients", cast)


def what_is_not_cast(api: Api, cast: bool) -> Any:
    dtype = torch.bfloat16 if cast else None
    policy = api.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float64)
    model = api.units(Counted(), "inner", mp_policy=policy)
    call = api.compile(model)
    x = batch(requires_grad=True)
    out = call(x, scale=torch.full((), 0.5, dtype=torch.float32), index=torch.tensor(3))
    out["shifted"].sum().backward()
    return out, x.grad, grads(model), model.shift


class Seen(nn.Module):
    """Returns what it got: containers and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.got: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.got = args, kwargs
        return self.weight.sum()


@rows("9.9", "9.10", status="eager")
def test_casts_of_containers(two: Pool) -> None:
    two.run(eager_same, casts_of_containers)


def casts_of_containers(api: Api) -> Any:
    model = api.fully_shard(Seen(), mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x, right, whole = batch(), batch().bfloat16(), torch.arange(3)
    ordered = OrderedDict([("b", x), ("a", whole)])
    packed = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    model(
        x,
        right,
        whole,
        [x, (x, 1)],
        Pair(x, None),
        Batch(x),
        ordered,
        {"k": x},
        packed,
        {x, 5},
        word="w",
        more=[x],
    )
    args, kwargs = model.got
    same_objects = [args[1] is right, args[2] is whole, args[8] is packed]
    types = [type(a).__name__ for a in args], type(kwargs["more"]).__name__
    casts = [args[0], args[3], list(args[4]), args[5], list(args[6].items()), args[7], kwargs]
    in_set = sorted(str(getattr(e, "dtype", e)) for e in args[9])
    data = args[8].data if isinstance(args[8], PackedSequence) else None
    return same_objects, types, casts, in_set, data


@rows("9.9", "9.13")
def test_nested_policies(two: Pool) -> None:
    two.run(same, nested_policies)


def test_nested_policies_with_inductor(two: Pool) -> None:
    two.run(inductor_in_bf16, nested_policies, timeout=SLOW)


def inductor_in_bf16(observe: Any) -> None:
    inductor_same(observe, is_low=True)


def nested_policies(api: Api) -> Any:
    model, new = net(depth=3), api.MixedPrecisionPolicy
    api.fully_shard(model[0], mp_policy=new(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    api.fully_shard(model[2], mp_policy=new(param_dtype=torch.float64, reduce_dtype=torch.float32))
    api.fully_shard(model[4], mp_policy=new(param_dtype=torch.float32, output_dtype=torch.bfloat16))
    api.fully_shard(
        model,
        mp_policy=new(
            param_dtype=torch.bfloat16, cast_forward_inputs=True, output_dtype=torch.float32
        ),
    )
    return two_steps(api, model)


class Holder(nn.Module):
    """Uses tensors from containers, and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(6, 5)

    def forward(self, parts: Any, *, box: Any) -> Any:
        outs = [self.inner(parts["k"][0]), self.inner(box.x)]
        return {"outs": outs, "pair": Pair(outs[0] + 1, box.name)}


@rows("9.10")
def test_casts_of_containers_in_a_graph(two: Pool) -> None:
    two.run(same, casts_of_containers_in_a_graph)


def casts_of_containers_in_a_graph(api: Api) -> Any:
    model = api.fully_shard(
        Holder(), mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    )
    found = api.compile(model)({"k": (batch(), 1)}, box=Batch(batch(step=1)))
    (found["outs"][0] + found["outs"][1]).sum().backward()
    return found, type(found["pair"]).__name__, grads(model)


@rows("9.9")
def test_inputs_not_cast(two: Pool) -> None:
    two.run(same, inputs_not_cast)


def inputs_not_cast(api: Api) -> Any:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = api.fully_shard(net(), mp_policy=policy)
    call = api.compile(model)
    call(batch().bfloat16()).sum().backward()
    found = grads(model)  # stock shows full parameters, without them, behind what raises
    return raised(lambda: model(batch())) is not None, found


@rows("9.8")
def test_dtype_changed_before_the_first_forward(two: Pool) -> None:
    two.run(same, dtype_changed)


def dtype_changed(api: Api) -> Any:
    model = api.units(net(), "0", mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.float32)).to(
        torch.float64
    )
    return two_steps(api, model)


@rows("9.16")
@pytest.mark.parametrize("reduce", [None, "float32", "bfloat16"])
def test_accumulation_dtype(two: Pool, reduce: Any) -> None:
    two.run(same, accumulation_dtype, reduce)


def accumulation_dtype(api: Api, reduce: Any) -> Any:
    policy = api.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce and getattr(torch, reduce)
    )
    model, call = net_of_units(api, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    for step in range(3):
        train_step(call, step)
    model.set_requires_gradient_sync(True)
    train_step(call, 3)
    return grads(model)


def reduce_policy(api: Api, reduce: str | None) -> Any:
    return api.MixedPrecisionPolicy(reduce_dtype=reduce and getattr(torch, reduce))


@rows("9b.1", "9b.3")
@pytest.mark.parametrize("reduce", [None, "bfloat16", "float16", "float64"])
def test_mean(two: Pool, reduce: str | None) -> None:
    two.run(same, mean, reduce)


def mean(api: Api, reduce: str | None) -> Any:
    model = api.units(net(), "0", "2", mp_policy=reduce_policy(api, reduce))
    train_step(api.compile(model))
    return grads(model)


@rows("9b.1", "9b.3")
@pytest.mark.parametrize("reduce", [None, "bfloat16", "float64"])
def test_mean_over_two_axes(four: Pool, reduce: str | None) -> None:
    four.run(close_in_bf16 if reduce == "bfloat16" else close, mean_over_two_axes, reduce)


def mean_over_two_axes(api: Api, reduce: str | None) -> Any:
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    model = api.units(net(), "0", mesh=mesh, mp_policy=reduce_policy(api, reduce))
    counts = communications(lambda: train_step(api.compile(model)))
    return counts["reduce"], counts["all_reduce"], grads(model)


def alone() -> Any:
    """A mesh of this rank only."""
    return mesh_of(2, 1, names=("a", "b"))["b"]


@rows("9b.2", "9b.9")
def test_one_rank(two: Pool) -> None:
    two.run(same, one_rank)


def one_rank(api: Api) -> Any:
    seen = []
    for factor in (None, 1.0, 4.0):
        model = api.units(net(), "0", mesh=alone())
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        counts = communications(lambda m=model: train_step(api.compile(m)))
        seen.append([counts, grads(model)])
    return seen


@rows("9b.10", status="improved")
@pytest.mark.parametrize("case", ["sum", "float64"])
def test_one_rank_divides_once(two: Pool, case: str) -> None:
    """Stock divides by the factor twice."""
    two.run(one_rank_divides_once, case)


def one_rank_divides_once(case: str) -> None:
    for kind, times in (("stock", 2), ("eager", 1), ("compiled", 1)):
        api = Api(kind)
        undivided, divided = (alone_with_factor(api, case, factor) for factor in (1.0, 4.0))
        assert all(
            torch.equal(a / 4.0**times, b) for a, b in zip(undivided, divided, strict=True)
        ), kind


def alone_with_factor(api: Api, case: str, factor: float) -> list[Tensor]:
    model = api.fully_shard(
        net(), mesh=alone(), mp_policy=reduce_policy(api, None if case == "sum" else case)
    )
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(case == "sum")
    train_step(api.compile(model))
    return [p.grad.to_local() for p in model.parameters()]


@rows("9b.5")
def test_factor_of_the_shard_size(two: Pool) -> None:
    two.run(same, factor_of_the_shard_size)


def factor_of_the_shard_size(api: Api) -> Any:
    model = api.units(net(), "0")
    model.set_gradient_divide_factor(2.0)
    train_step(api.compile(model))
    return grads(model)


@rows("9b.5", "9b.6", status="improved")
def test_any_factor_on_gloo(two: Pool) -> None:
    """Stock raises: gloo has no PREMUL_SUM."""
    two.run(any_factor_on_gloo)


def any_factor_on_gloo() -> None:
    assert raised(lambda: grads_with_factor(Api("stock"), 5.0, False)) == "RuntimeError"
    wanted = grads_with_factor(Api("stock"), 5.0, True)
    for kind in ("eager", "compiled"):
        found = grads_with_factor(Api(kind), 5.0, False)
        assert all(
            torch.allclose(a, b, rtol=1e-6, atol=0.0) for a, b in zip(found, wanted, strict=True)
        ), kind


def grads_with_factor(api: Api, factor: float, is_sum: bool) -> list[Tensor]:
    model = api.fully_shard(net())
    model.set_gradient_divide_factor(factor)
    model.set_force_sum_reduction_for_comms(is_sum)
    train_step(api.compile(model))
    return [p.grad.to_local() for p in model.parameters()]


@rows("9b.7", "9b.8")
@pytest.mark.parametrize(
    ("reduce", "factor"),
    [
        (None, None),
        (None, 3.0),
        ("bfloat16", 8.0),
        ("float16", None),
        ("float16", 8.0),
        ("float64", 3.0),
    ],
)
def test_forced_sum(two: Pool, reduce: str | None, factor: float | None) -> None:
    two.run(same, forced_sum, reduce, factor)


def forced_sum(api: Api, reduce: str | None, factor: float | None) -> Any:
    model = api.fully_shard(net(), mp_policy=reduce_policy(api, reduce))
    model.set_force_sum_reduction_for_comms(True)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    train_step(api.compile(model))
    return grads(model)


@rows("9b.7")
def test_forced_sum_over_two_axes(four: Pool) -> None:
    four.run(close, forced_sum_over_two_axes)


def forced_sum_over_two_axes(api: Api) -> Any:
    model = api.fully_shard(net(), mesh=mesh_of(2, 2, names=("replicate", "shard")))
    model.set_force_sum_reduction_for_comms(True)
    train_step(api.compile(model))
    return grads(model)


@rows("13.6")
def test_offload_on_cpu(two: Pool) -> None:
    two.run(same, offload_on_cpu)


def offload_on_cpu(api: Api) -> Any:
    model = api.units(net(), "0", "2", offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    seen = two_steps(api, model)
    devices = {p.device.type for p in model.parameters()} | {
        p.grad.device.type for p in model.parameters()
    }
    return seen, sorted(devices), is_sharded(model)


@rows("13.7")
def test_pinning_without_an_accelerator(two: Pool) -> None:
    two.run(same, pinning_without_an_accelerator)


def pinning_without_an_accelerator(api: Api) -> Any:
    return raised(lambda: api.fully_shard(net(), offload_policy=api.CPUOffloadPolicy()))
