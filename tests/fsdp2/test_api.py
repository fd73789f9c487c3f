"""`fully_shard`'s arguments, what it does to the module, and the methods of `FSDPModule`; no
communication.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from kit.models import OddMLP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import compiled_fsdp
from compiled_fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard

pytestmark = pytest.mark.usefixtures("fake_world")


# -- signature


def test_signature_is_that_of_stock() -> None:
    ours, theirs = inspect.signature(fully_shard), inspect.signature(stock.fully_shard)
    newer = {"dp_mesh_dims"} - set(theirs.parameters)  # came with torch 2.13
    named = [(p.name, p.kind) for p in ours.parameters.values() if p.name not in newer]
    assert named == [(p.name, p.kind) for p in theirs.parameters.values()]
    for name, parameter in theirs.parameters.items():
        default = ours.parameters[name].default
        assert default == parameter.default or type(default) is type(parameter.default), name


def test_returns_what_it_got() -> None:
    model, pair = OddMLP(), [nn.Linear(4, 4), nn.Linear(4, 4)]
    assert fully_shard(model) is model
    assert fully_shard(pair) is pair


def test_policies_are_those_of_stock() -> None:
    assert issubclass(compiled_fsdp.MixedPrecisionPolicy, stock.MixedPrecisionPolicy)
    ours, theirs = (
        tuple(f.name for f in fields(p.MixedPrecisionPolicy)) for p in (compiled_fsdp, stock)
    )
    newer = ("param_dtype_override_fn",)  # came with torch 2.15
    assert ours == (*(name for name in theirs if name not in newer), *newer)
    assert (ours == theirs) == (compiled_fsdp.MixedPrecisionPolicy is stock.MixedPrecisionPolicy)
    assert compiled_fsdp.CPUOffloadPolicy is stock.CPUOffloadPolicy
    assert issubclass(FSDPModule, stock.FSDPModule)
    assert issubclass(UnshardHandle, stock.UnshardHandle)


# -- arguments out of range: (arguments, error, what its text names)

REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reshard_after_forward": "x"}, ValueError, r"reshard_after_forward='x'.*bool"),
    ({"reshard_after_forward": 0.5}, ValueError, r"reshard_after_forward=0\.5.*bool"),
    ({"reshard_after_forward": 0}, ValueError, r"reshard_after_forward=0;.*factor.* 2"),
    ({"reshard_after_forward": 3}, ValueError, r"reshard_after_forward=3;.*factor.* 2"),
    ({"reshard_after_forward": -1}, ValueError, r"reshard_after_forward=-1;.*factor"),
    ({"shard_placement_fn": lambda p: Shard(2)}, AssertionError, r"shard_placement_fn.*no dim 2"),
    (
        {"shard_placement_fn": lambda p: "x"},
        ValueError,
        r"shard_placement_fn returned 'x'.*invalid",
    ),
    (
        {"offload_policy": stock.CPUOffloadPolicy()},
        RuntimeError,
        r"pinned memory.*pin_memory=False",
    ),
]
if hasattr(stock, "DataParallelMeshDims"):  # since torch 2.13
    dims = stock.DataParallelMeshDims(shard="dp")
    REJECTED.append(({"dp_mesh_dims": dims}, ValueError, r"dp_mesh_dims=.*no mesh_dim_names"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    REJECTED,
    ids=[f"{i}-{next(iter(a))}" for i, (a, _, _) in enumerate(REJECTED)],
)
def test_rejected_arguments_leave_the_module_alone(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = OddMLP()
    before = {name: p for name, p in model.named_parameters()}
    with pytest.raises(error, match=text):
        fully_shard(model, **arguments)
    assert type(model) is OddMLP
    assert all(before[name] is p for name, p in model.named_parameters())
    fully_shard(model)  # and it can be tried again, unlike with stock


def test_mesh_of_three_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"3 dimensions.*1D.*2D"):
        fully_shard(OddMLP(), mesh=mesh)


def test_two_dimensional_mesh_needs_names() -> None:
    with pytest.raises(AssertionError, match="mesh_dim_names"):
        fully_shard(OddMLP(), mesh=init_device_mesh("cpu", (1, 2)))
    fully_shard(OddMLP(), mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize(
    "container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
)
def test_container_without_forward(container: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(container).__name__} has no forward"):
        fully_shard(container)


def test_container_with_forward() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    assert isinstance(fully_shard(Chain([nn.Linear(2, 2)])), FSDPModule)


def test_empty_list() -> None:
    with pytest.raises(IndexError, match="empty list"):
        fully_shard([])


def test_not_a_module() -> None:
    with pytest.raises((TypeError, ValueError), match=r"expects nn\.Module.*Tensor"):
        fully_shard([nn.Linear(2, 2), torch.zeros(2)])  # type: ignore[list-item]


def test_twice() -> None:
    linear = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="Linear is sharded already"):
        fully_shard(linear)
    other = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="once"):
        fully_shard([other, other])


def test_scalar_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.inner.scale

    model = Scaled()
    with pytest.raises(ValueError, match=r"inner\.scale is a scalar.*1D"):
        fully_shard(model)
    fully_shard(model, ignored_params={model.inner.scale})
    assert not isinstance(model.inner.scale, DTensor)


def test_non_contiguous_parameter() -> None:
    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.randn(2, 3).t())
    with pytest.raises(NotImplementedError, match=r"weight is not contiguous.*stride"):
        fully_shard(linear)


def test_int_of_one_warns_as_stock(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=1)


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process group it is initialised from the environment, as stock does."""
    called = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: bool(called))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *a, **k: called.append((a, k))
    )
    fully_shard(nn.Linear(2, 2))
    assert called == [((), {})]


# -- what becomes of the module


def test_class() -> None:
    linear, again = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(3, 3))
    assert type(linear).__name__ == "FSDPLinear"
    order = type(linear).__mro__
    assert order[1] is FSDPModule
    assert order.index(FSDPModule) < order.index(stock.FSDPModule) < order.index(nn.Linear)
    assert type(linear) is type(again)
    assert isinstance(linear, stock.FSDPModule)


def test_submodules_stay_what_they_are() -> None:
    model = fully_shard(OddMLP())
    for module in model.modules():
        if module is not model:
            assert not isinstance(module, FSDPModule)
            assert type(module).__name__ in ("Linear", "ModuleList")
    assert isinstance(model.last, nn.Linear)


def test_class_of_a_child_used_by_others_is_unchanged() -> None:
    fully_shard(OddMLP())
    assert not isinstance(nn.Linear(2, 2).__class__.__dict__.get("weight"), property)


@pytest.mark.parametrize("apply", [stock.fully_shard, fully_shard])
def test_names_order_and_placements(apply: Any) -> None:
    model = OddMLP()
    model.register_buffer("extra", torch.ones(2))
    expected = [
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
    ]
    modules = [name for name, _ in model.named_modules()]
    apply(model.layers[1])
    apply(model)
    assert [
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
    ] == expected
    assert [name for name, _ in model.named_modules()] == modules
    assert list(model.state_dict()) == [*(["extra"]), *(name for name, *_ in expected)]
    for p in model.parameters():
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, DTensor)
        assert p.placements == (Shard(0),)
        assert p.is_leaf
    assert type(model.extra) is torch.Tensor


def test_placements_of_hsdp() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(OddMLP(), mesh=mesh)
    for p in model.parameters():
        assert p.placements == (Replicate(), Shard(0))
        assert p.device_mesh == mesh


def test_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    linear = nn.Linear(3, 3)
    original = linear.weight.detach().clone()
    fully_shard(linear, mesh=mesh)
    assert torch.equal(linear.weight.to_local(), original)


def test_parameters_are_new_objects_and_stay() -> None:
    model = OddMLP()
    old = model.last.weight
    fully_shard(model)
    new = model.last.weight
    assert new is not old
    loss = model(torch.randn(2, 6)).sum()
    loss.backward()
    assert model.last.weight is new


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1


def test_descendants_in_a_list_are_dropped() -> None:
    model = OddMLP()
    fully_shard([model, model.last])
    assert isinstance(model, FSDPModule)
    assert not isinstance(model.last, FSDPModule)


def test_ignored_parameters_are_the_same_objects() -> None:
    model = OddMLP()
    kept = {model.last.weight, model.layers[0].bias}
    fully_shard(model, ignored_params=kept)
    assert model.last.weight in kept
    assert model.layers[0].bias in kept
    assert isinstance(model.last.bias, DTensor)


def test_parameter_registered_later_is_not_managed() -> None:
    model = fully_shard(nn.Linear(6, 6))
    model.extra = nn.Parameter(torch.ones(3))
    assert type(model.extra) is nn.Parameter


def test_parent_with_nothing_left() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    assert model(torch.randn(2, 4)).shape == (2, 4)
    model.unshard()
    model.reshard()


def test_deepcopy() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(nn.Sequential(model))


def test_slicing_a_sequential() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    part = model[:2]
    assert type(part) is nn.Sequential
    assert not isinstance(part, FSDPModule)
    assert part[0] is model[0]


def test_marks_for_other_libraries() -> None:
    model = fully_shard(OddMLP())
    assert all(m._is_fsdp_managed_module and m._fsdp_use_orig_params for m in model.modules())
    assert fully_shard.state(model) is model._get_fsdp_state()
    assert fully_shard.state(model.last) is None


# -- reading parameters


def test_what_is_registered_when() -> None:
    model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    seen = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen["layer"] = (
            type(module.weight),
            module.weight.shape,
            type(module._parameters["weight"]),
        )

    # Stock: a hook that is registered before `fully_shard` sees the full weight; prepend puts this
    # one before ours.
    model.layers[0].register_forward_hook(look, prepend=True)
    out = model(torch.randn(2, 6))
    assert seen["layer"] == (nn.Parameter, (7, 6), nn.Parameter)
    assert isinstance(model.layers[0].weight, DTensor), "resharded after forward"
    assert not isinstance(model.last.weight, DTensor), "the root's unit is kept"
    out.sum().backward()
    assert isinstance(model.last.weight, DTensor)


def test_unshard_and_reshard() -> None:
    model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    sharded = model.layers[0].weight
    assert model.layers[0].unshard() is None
    assert type(model.layers[0].weight) is nn.Parameter
    assert model.layers[0].weight.shape == (7, 6)
    assert isinstance(model.last.weight, DTensor), "not recursive"
    model.layers[0].reshard()
    assert model.layers[0].weight is sharded
    model.layers[0].reshard()


def test_unshard_handle() -> None:
    model = fully_shard(nn.Linear(4, 4))
    handle = model.unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    assert isinstance(model.weight, DTensor)
    handle.wait()
    handle.wait()
    assert not isinstance(model.weight, DTensor)


def test_unshard_with_param_dtype() -> None:
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    assert model.weight.dtype == torch.bfloat16
    model.reshard()
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("value", [2, "x", None])
def test_set_reshard_after_forward_takes_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="should be a bool"):
        fully_shard(nn.Linear(2, 2)).set_reshard_after_forward(value)


@pytest.mark.parametrize("recurse", [True, False])
def test_set_reshard_after_forward(recurse: bool) -> None:
    model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    model.set_reshard_after_forward(True, recurse)
    model.layers[0].set_reshard_after_forward(False)
    model.set_reshard_after_forward(True, recurse)
    model(torch.randn(2, 6))
    assert isinstance(model.last.weight, DTensor)
    assert isinstance(model.layers[0].weight, DTensor) == recurse


NOT_YET = sorted(
    name
    for name, value in vars(stock.FSDPModule).items()
    if callable(value) and not name.startswith("__") and vars(FSDPModule).get(name) is not value
)


def test_no_method_of_stock_reaches_stocks_state() -> None:
    """Each public method of stock's class is ours, or says that it is not there."""
    inherited = [
        name for name in NOT_YET if name not in vars(FSDPModule) and not name.startswith("_")
    ]
    assert inherited == []


# -- moving and meta


def test_to_dtype_before_the_first_forward() -> None:
    model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    objects = list(model.parameters())
    model.to(torch.float64)
    assert all(
        p.dtype == torch.float64 and p._local_tensor.dtype == torch.float64
        for p in model.parameters()
    )
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    pointers = {p._local_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(pointers) == 2, "back in the two units' flat buffers"
    model(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert all(p.grad.dtype == torch.float64 for p in model.parameters())


def test_meta_parameters_are_named_when_used() -> None:
    with torch.device("meta"):
        model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    assert all(p._local_tensor.is_meta for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*meta.*to_empty"):
        model.layers[0].unshard()
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight.*meta.*to_empty"):
        model(torch.randn(2, 6))


def test_to_empty() -> None:
    with torch.device("meta"):
        model = OddMLP()
    fully_shard(model.layers[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    pointers = {p._local_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(pointers) == 2, "back in the two units' flat buffers"
    model(torch.randn(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
