"""Bad input to every public function, with the exact text of each error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import compiled_fsdp
from compiled_fsdp import Plan, fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fake_world")


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def sharded() -> Any:
    return fully_shard(linear())


def nested() -> Any:
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0])
    return fully_shard(model)


def with_parameter(parameter: nn.Parameter) -> nn.Module:
    model = nn.Module()
    model.weight = parameter
    return model


def tensor_parallel() -> nn.Module:
    full = distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert isinstance(full, DTensor)
    return with_parameter(nn.Parameter(full))


class NoAllocate:
    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "NoAllocate()"


class Thing:
    def __repr__(self) -> str:
        return "Thing()"


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def planned(**changes: Any) -> None:
    with compiled_fsdp.planned(**changes):
        pass


def dumped(path: Any) -> None:
    with compiled_fsdp.dumped_to(path):
        pass


def warm(model: nn.Module) -> None:
    compiled_fsdp.warmup(model, torch.ones(2, 4))


def frozen() -> Any:
    return fully_shard(linear().requires_grad_(False))


CASES: dict[str, Callable[[], object]] = {
    # fully_shard: the module
    "no module": lambda: fully_shard(None),
    "a class": lambda: fully_shard(nn.Linear),
    "a tensor": lambda: fully_shard(torch.ones(2)),
    "an empty list": lambda: fully_shard([]),
    "a list with something else": lambda: fully_shard([linear(), "layer"]),
    "a ModuleList": lambda: fully_shard(nn.ModuleList([linear()])),
    "a ModuleDict": lambda: fully_shard(nn.ModuleDict({"a": linear()})),
    "twice": lambda: fully_shard(sharded()),
    "twice in a list": lambda: fully_shard([(model := linear()), model]),
    "a scalar parameter": lambda: fully_shard(with_parameter(nn.Parameter(torch.tensor(1.0)))),
    "a strided parameter": lambda: fully_shard(with_parameter(nn.Parameter(torch.ones(4, 2).t()))),
    # fully_shard: the mesh
    "a mesh of three dimensions": lambda: fully_shard(linear(), mesh=mesh(1, 1, 2)),
    "a mesh without names": lambda: fully_shard(linear(), mesh=mesh(1, 2)),
    "a mesh by name": lambda: fully_shard(linear(), mesh="dp"),
    "a group as mesh": lambda: fully_shard(linear(), mesh=2),
    # fully_shard: the rest
    "reshard by word": lambda: fully_shard(linear(), reshard_after_forward="yes"),
    "reshard by a half": lambda: fully_shard(linear(), reshard_after_forward=0.5),
    "reshard by 0": lambda: fully_shard(linear(), reshard_after_forward=0),
    "reshard by 3 of 2": lambda: fully_shard(linear(), reshard_after_forward=3),
    "reshard by -1": lambda: fully_shard(linear(), reshard_after_forward=-1),
    "no such dim": lambda: fully_shard(linear(), shard_placement_fn=lambda p: Shard(2)),
    "no such dim from the end": lambda: fully_shard(linear(), shard_placement_fn=lambda p: Shard(-3)),
    "a word for a placement": lambda: fully_shard(linear(), shard_placement_fn=lambda p: "rows"),
    "uneven on another dim": lambda: fully_shard(nn.Linear(3, 4, bias=False), shard_placement_fn=lambda p: Shard(1)),
    "a placement instead of a function": lambda: fully_shard(linear(), shard_placement_fn=Shard(0)),
    "a dtype as mp_policy": lambda: fully_shard(linear(), mp_policy=torch.bfloat16),
    "None as mp_policy": lambda: fully_shard(linear(), mp_policy=None),
    "a bool as offload_policy": lambda: fully_shard(linear(), offload_policy=True),
    "pinned memory": lambda: fully_shard(linear(), offload_policy=CPUOffloadPolicy()),
    "one ignored parameter": lambda: fully_shard((model := linear()), ignored_params=model.weight),
    "ignored by name": lambda: fully_shard(linear(), ignored_params={"weight"}),
    "ignored module": lambda: fully_shard((model := linear()), ignored_params={model}),
    # methods
    "sync by word": lambda: sharded().set_requires_gradient_sync("no"),
    "sync by number": lambda: sharded().set_requires_gradient_sync(0),
    "recurse by word": lambda: sharded().set_requires_gradient_sync(True, recurse="no"),
    "all-reduce by None": lambda: sharded().set_requires_all_reduce(None),
    "reshard after forward by int": lambda: sharded().set_reshard_after_forward(2),
    "reshard after backward by word": lambda: sharded().set_reshard_after_backward("yes"),
    "last backward by number": lambda: sharded().set_is_last_backward(1),
    "unshard in backward by word": lambda: sharded().set_unshard_in_backward("x"),
    "forward prefetch of a plain module": lambda: sharded().set_modules_to_forward_prefetch([nn.ReLU()]),
    "backward prefetch of a word": lambda: sharded().set_modules_to_backward_prefetch(["layer"]),
    "divide by 0": lambda: sharded().set_gradient_divide_factor(0),
    "divide by less": lambda: sharded().set_gradient_divide_factor(-2.0),
    "divide by nan": lambda: sharded().set_gradient_divide_factor(float("nan")),
    "divide by a word": lambda: sharded().set_gradient_divide_factor("2"),
    "divide by True": lambda: sharded().set_gradient_divide_factor(True),
    "force sum by word": lambda: sharded().set_force_sum_reduction_for_comms("sum"),
    "unused by number": lambda: sharded().set_reduce_scatter_unused_params(1),
    "buffers by half": lambda: sharded().set_reduce_scatter_max_input_buffers(1.5),
    "buffers by True": lambda: sharded().set_reduce_scatter_max_input_buffers(True),
    "no buffers": lambda: sharded().set_reduce_scatter_max_input_buffers(0),
    "separate group by None": lambda: sharded().set_separate_reduce_scatter_group(None),
    "a hook that is none": lambda: sharded().set_all_reduce_hook(3),
    "a custom gather that is none": lambda: sharded().set_custom_all_gather("ring"),
    "a custom gather without allocate": lambda: sharded().set_custom_all_gather(NoAllocate()),
    "a custom reduction without allocate": lambda: sharded().set_custom_reduce_scatter(NoAllocate()),
    "memory by word": lambda: sharded().set_allocate_memory_from_process_group_for_comm("yes"),
    "symmetric memory": lambda: sharded().set_symm_mem_for_comm(),
    "reset inside": lambda: nested()[0].reset_iter_state(),
    "deepcopy": lambda: __import__("copy").deepcopy(sharded()),
    # functions
    "a method that is not there": lambda: compiled_fsdp.register_fsdp_forward_method(sharded(), "generate"),
    "shared context of a plain module": lambda: compiled_fsdp.share_comm_ctx([sharded(), nn.ReLU()]),
    "fallback by word": lambda: compiled_fsdp.set_fallback("ignore"),
    "fallback by None": lambda: compiled_fsdp.set_fallback(None),
    "a plan that is none": lambda: compiled_fsdp.set_plan({"prefetch": 1}),
    "prefetch before": lambda: Plan(prefetch=-1),
    "prefetch by word": lambda: Plan(prefetch="all"),
    "prefetch by True": lambda: Plan(prefetch=True),
    "endless reductions": lambda: Plan(reduces_in_flight=float("inf")),
    "backward prefetch by nan": lambda: Plan(backward_prefetch=float("nan")),
    "planned with another field": lambda: planned(prefetch_units=2),
    "planned with a bad value": lambda: planned(prefetch=-2),
    "a dump into nothing": lambda: dumped(None),
    "a dump into a file": lambda: dumped(__file__.replace(__file__, "/dev/null")),
    "warmup of a plain module": lambda: warm(nn.ReLU()),
    "warmup of no module": lambda: compiled_fsdp.warmup("model"),
}
