"""Bad input to every public function, with the exact text of each error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

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


class NoAllocate:
    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "NoAllocate()"


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
    "no such dim from the end": lambda: fully_shard(
        linear(), shard_placement_fn=lambda p: Shard(-3)
    ),
    "a word for a placement": lambda: fully_shard(linear(), shard_placement_fn=lambda p: "rows"),
    "uneven on another dim": lambda: fully_shard(
        nn.Linear(3, 4, bias=False), shard_placement_fn=lambda p: Shard(1)
    ),
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
    "forward prefetch of a plain module": lambda: sharded().set_modules_to_forward_prefetch(
        [nn.ReLU()]
    ),
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
    "a custom reduction without allocate": lambda: sharded().set_custom_reduce_scatter(
        NoAllocate()
    ),
    "memory by word": lambda: sharded().set_allocate_memory_from_process_group_for_comm("yes"),
    "a stream that is none": lambda: sharded().set_all_reduce_hook(print, stream=3),
    "symmetric memory": lambda: sharded().set_symm_mem_for_comm("NVSHMEM"),
    "reset inside": lambda: nested()[0].reset_iter_state(),
    "deepcopy": lambda: __import__("copy").deepcopy(sharded()),
    # functions
    "a method that is not there": lambda: compiled_fsdp.register_fsdp_forward_method(
        sharded(), "generate"
    ),
    "shared context of a plain module": lambda: compiled_fsdp.share_comm_ctx(
        [sharded(), nn.ReLU()]
    ),
    "fallback by word": lambda: compiled_fsdp.set_fallback("ignore"),
    "fallback by None": lambda: compiled_fsdp.set_fallback(None),
    "a plan that is none": lambda: compiled_fsdp.set_plan({"prefetch": 1}),
    "a plan that chooses": lambda: compiled_fsdp.set_plan(Plan(kept=(("blocks.0", "weight"),))),
    "planned with a choice": lambda: planned(recomputed=("mm",)),
    "prefetch before": lambda: Plan(prefetch=-1),
    "prefetch by word": lambda: Plan(prefetch="all"),
    "prefetch by True": lambda: Plan(prefetch=True),
    "buckets below nothing": lambda: Plan(bucket_bytes=-1),
    "buckets by fraction": lambda: Plan(bucket_bytes=0.5),
    "a budget below nothing": lambda: Plan(memory_budget=-1),
    "a budget of more than all": lambda: Plan(memory_budget=1.5),
    "a budget by word": lambda: Plan(memory_budget="8 GiB"),
    "the optimizer's state by a budget": lambda: Plan(memory_budget=0.5, offload="optimizer"),
    "regions of another kind": lambda: Plan(regions="blocks"),
    "units and activations by a budget": lambda: Plan(
        regions="units", memory_budget=0.5, recompute="budget"
    ),
    "the optimizer's state by word": lambda: Plan(memory_budget=0.5, optimizer_state="host"),
    "the optimizer's state without a budget": lambda: Plan(optimizer_state="budget"),
    "offload without a budget": lambda: Plan(offload="budget"),
    "a host's budget alone": lambda: Plan(memory_budget=0.5, host_budget=1 << 30),
    "a host's budget by word": lambda: Plan(
        memory_budget=0.5, offload="budget", host_budget="8 GiB"
    ),
    "endless reductions": lambda: Plan(reduces_in_flight=float("inf")),
    "backward prefetch by nan": lambda: Plan(backward_prefetch=float("nan")),
    "planned with another field": lambda: planned(prefetch_units=2),
    "planned with a bad value": lambda: planned(prefetch=-2),
    "a dump into nothing": lambda: dumped(None),
    "a dump into a file": lambda: dumped(__file__.replace(__file__, "/dev/null")),
    "warmup of a plain module": lambda: warm(nn.ReLU()),
    "warmup of no module": lambda: compiled_fsdp.warmup("model"),
    "a function for a model": lambda: compiled_fsdp.compile_step(
        sharded, torch.optim.SGD(nn.Linear(2, 2).parameters())
    ),
}

# The exact texts.
EXPECTED: dict[str, tuple[type[Exception], str]] = {
    "no module": (TypeError, "fully_shard: expects nn.Module, got NoneType: None"),
    "a class": (
        TypeError,
        "fully_shard: expects nn.Module, got type: <class 'torch.nn.modules.linear.Linear'>",
    ),
    "a tensor": (TypeError, "fully_shard: expects nn.Module, got Tensor: tensor([1., 1.])"),
    "an empty list": (
        IndexError,
        "fully_shard: got an empty list of modules; a unit needs at least one",
    ),
    "a list with something else": (TypeError, "fully_shard: expects nn.Module, got str: 'layer'"),
    "a ModuleList": (
        ValueError,
        "fully_shard: ModuleList has no forward, so nothing would gather its parameters. Shard its "
        "members, or pass them as a list",
    ),
    "a ModuleDict": (
        ValueError,
        "fully_shard: ModuleDict has no forward, so nothing would gather its parameters. Shard its "
        "members, or pass them as a list",
    ),
    "twice": (
        AssertionError,
        "fully_shard: FSDPLinear is sharded already; a module can be given to fully_shard once",
    ),
    "twice in a list": (
        AssertionError,
        "fully_shard: Linear is sharded already; a module can be given to fully_shard once",
    ),
    "a scalar parameter": (
        ValueError,
        "fully_shard: parameter weight is a scalar and cannot be cut. Change it to a 1D tensor "
        "with numel equal to 1, or name it in ignored_params",
    ),
    "a strided parameter": (
        NotImplementedError,
        "fully_shard: parameter weight is not contiguous (parameter.shape=torch.Size([2, 4]) "
        "parameter.stride()=(1, 2)). Call .contiguous() on it before sharding",
    ),
    "a mesh of three dimensions": (
        ValueError,
        "fully_shard: mesh has 3 dimensions (DeviceMesh(...)); expects a 1D mesh (shard) or a 2D "
        "mesh (replicate, shard). Pass a sub-mesh, for example mesh['dp']",
    ),
    "a mesh without names": (
        AssertionError,
        "fully_shard: the 2D mesh DeviceMesh(...) has no mesh_dim_names; HSDP needs them. Pass "
        "mesh_dim_names=('replicate', 'shard') to init_device_mesh",
    ),
    "a mesh by name": (
        TypeError,
        "fully_shard: mesh is str 'dp'; should be a DeviceMesh, for example "
        "init_device_mesh('cpu', (2,))",
    ),
    "a group as mesh": (
        TypeError,
        "fully_shard: mesh is int 2; should be a DeviceMesh, for example init_device_mesh('cpu', "
        "(2,))",
    ),
    "reshard by word": (
        ValueError,
        "fully_shard: reshard_after_forward='yes'; should be a bool, an int group size, or None",
    ),
    "reshard by a half": (
        ValueError,
        "fully_shard: reshard_after_forward=0.5; should be a bool, an int group size, or None",
    ),
    "reshard by 0": (
        ValueError,
        "fully_shard: reshard_after_forward=0; an int should be a factor of the shard mesh size 2, "
        "so that slices can be kept on groups of that size",
    ),
    "reshard by 3 of 2": (
        ValueError,
        "fully_shard: reshard_after_forward=3; an int should be a factor of the shard mesh size 2, "
        "so that slices can be kept on groups of that size",
    ),
    "reshard by -1": (
        ValueError,
        "fully_shard: reshard_after_forward=-1; an int should be a factor of the shard mesh size "
        "2, so that slices can be kept on groups of that size",
    ),
    "no such dim": (
        AssertionError,
        "fully_shard: shard_placement_fn returned S(2) for weight of shape (4, 4), which has no "
        "dim 2",
    ),
    "no such dim from the end": (
        AssertionError,
        "fully_shard: shard_placement_fn returned S(-3) for weight of shape (4, 4), which has no "
        "dim -3",
    ),
    "a word for a placement": (
        ValueError,
        "fully_shard: shard_placement_fn returned 'rows' for weight, an invalid result; should be "
        "None, a Shard, or a ShardPlacementResult",
    ),
    "uneven on another dim": (
        NotImplementedError,
        "fully_shard: FSDP does not support uneven sharding on dim 1: weight has size 3 there, and "
        "the shard mesh has 2 ranks. Return Shard(0), or pad the parameter",
    ),
    "a placement instead of a function": (
        TypeError,
        "fully_shard: shard_placement_fn is Shard Shard(dim=0), which cannot be called; should be "
        "a callable",
    ),
    "a dtype as mp_policy": (
        TypeError,
        "fully_shard: mp_policy is dtype torch.bfloat16; should be a MixedPrecisionPolicy",
    ),
    "None as mp_policy": (
        TypeError,
        "fully_shard: mp_policy is NoneType None; should be a MixedPrecisionPolicy",
    ),
    "a bool as offload_policy": (
        TypeError,
        "fully_shard: offload_policy is bool True; should be an OffloadPolicy",
    ),
    "pinned memory": (
        RuntimeError,
        "fully_shard: offload_policy=CPUOffloadPolicy(pin_memory=True) asks for pinned memory, "
        "which needs an accelerator. Pass CPUOffloadPolicy(pin_memory=False)",
    ),
    "one ignored parameter": (
        TypeError,
        "fully_shard: ignored_params is Parameter; should be a set of parameters",
    ),
    "ignored by name": (
        TypeError,
        "fully_shard: ignored_params holds str 'weight'; should hold the nn.Parameters themselves, "
        "not names",
    ),
    "ignored module": (
        TypeError,
        "fully_shard: ignored_params holds Linear Linear(in_features=4, out_features=4, "
        "bias=True); should hold the nn.Parameters themselves, not names",
    ),
    "sync by word": (
        TypeError,
        "set_requires_gradient_sync: requires_gradient_sync is str 'no'; should be a bool",
    ),
    "sync by number": (
        TypeError,
        "set_requires_gradient_sync: requires_gradient_sync is int 0; should be a bool",
    ),
    "recurse by word": (
        TypeError,
        "set_requires_gradient_sync: recurse is str 'no'; should be a bool",
    ),
    "all-reduce by None": (
        TypeError,
        "set_requires_all_reduce: requires_all_reduce is NoneType None; should be a bool",
    ),
    "reshard after forward by int": (
        ValueError,
        "set_reshard_after_forward: got 2; reshard_after_forward should be a bool. Pass an int to "
        "fully_shard(reshard_after_forward=...)",
    ),
    "reshard after backward by word": (
        TypeError,
        "set_reshard_after_backward: reshard_after_backward is str 'yes'; should be a bool",
    ),
    "last backward by number": (
        TypeError,
        "set_is_last_backward: is_last_backward is int 1; should be a bool",
    ),
    "unshard in backward by word": (
        TypeError,
        "set_unshard_in_backward: unshard_in_backward is str 'x'; should be a bool",
    ),
    "forward prefetch of a plain module": (
        ValueError,
        "Expects FSDPModule but got <class 'torch.nn.modules.activation.ReLU'>: ReLU()",
    ),
    "backward prefetch of a word": (ValueError, "Expects FSDPModule but got <class 'str'>: layer"),
    "divide by 0": (
        ValueError,
        "set_gradient_divide_factor: factor is 0; should be finite and greater than 0",
    ),
    "divide by less": (
        ValueError,
        "set_gradient_divide_factor: factor is -2.0; should be finite and greater than 0",
    ),
    "divide by nan": (
        ValueError,
        "set_gradient_divide_factor: factor is nan; should be finite and greater than 0",
    ),
    "divide by a word": (
        TypeError,
        "set_gradient_divide_factor: factor is str '2'; should be a number",
    ),
    "divide by True": (
        TypeError,
        "set_gradient_divide_factor: factor is bool True; should be a number",
    ),
    "force sum by word": (
        TypeError,
        "set_force_sum_reduction_for_comms: enable is str 'sum'; should be a bool",
    ),
    "unused by number": (
        TypeError,
        "set_reduce_scatter_unused_params: reduce_scatter_unused_params is int 1; should be a bool",
    ),
    "buffers by half": (TypeError, "max_input_buffers must be an int, got float"),
    "buffers by True": (TypeError, "max_input_buffers must be an int, got bool"),
    "no buffers": (ValueError, "max_input_buffers must be a positive int, got 0"),
    "separate group by None": (
        TypeError,
        "set_separate_reduce_scatter_group: enable is NoneType None; should be a bool",
    ),
    "a hook that is none": (
        TypeError,
        "set_all_reduce_hook: hook is int 3, which cannot be called; should be a callable",
    ),
    "a custom gather that is none": (
        TypeError,
        "set_custom_all_gather: comm is str 'ring', which cannot be called; should be a callable "
        "with allocate()",
    ),
    "a custom gather without allocate": (
        TypeError,
        "set_custom_all_gather: comm is NoAllocate NoAllocate(), which has no allocate(); should "
        "be a callable with allocate()",
    ),
    "a custom reduction without allocate": (
        TypeError,
        "set_custom_reduce_scatter: comm is NoAllocate NoAllocate(), which has no allocate(); "
        "should be a callable with allocate()",
    ),
    "memory by word": (
        TypeError,
        "set_allocate_memory_from_process_group_for_comm: enable is str 'yes'; should be a bool",
    ),
    "a stream that is none": (
        TypeError,
        "set_all_reduce_hook: stream is int 3, which has no wait_stream(); should be a stream of "
        "the device that the parameters are on, such as a torch.cuda.Stream",
    ),
    "symmetric memory": (
        ValueError,
        "set_symm_mem_for_comm: backend='NVSHMEM'; should be 'NCCL'",
    ),
    "reset inside": (
        RuntimeError,
        "reset_iter_state: called on '0', which is inside another sharded module. Call it on the "
        "outermost one",
    ),
    "deepcopy": (
        AssertionError,
        "FSDP does not support deepcopy: a sharded module shares flat buffers and process groups. "
        "Copy its state_dict; for a second model, as AveragedModel makes, build and shard another "
        "one and load that into it",
    ),
    "a method that is not there": (
        ValueError,
        "<class 'torch.nn.modules.linear.FSDPLinear'> does not have a method generate",
    ),
    "shared context of a plain module": (
        ValueError,
        "Expects FSDPModule but got <class 'torch.nn.modules.activation.ReLU'>: ReLU()",
    ),
    "fallback by word": (ValueError, 'set_fallback: got \'ignore\'; should be "warn" or "error"'),
    "fallback by None": (ValueError, 'set_fallback: got None; should be "warn" or "error"'),
    "a plan that is none": (
        TypeError,
        "set_plan: plan is {'prefetch': 1}; should be a Plan, for example Plan(prefetch=1)",
    ),
    "a plan that chooses": (
        ValueError,
        "set_plan: kept=(('blocks.0', 'weight'),); it is chosen for each graph from memory_budget, "
        "and is not to be set. Set memory_budget instead; compiled_fsdp.explain(model) says what "
        "was chosen",
    ),
    "planned with a choice": (
        ValueError,
        "planned: recomputed=('mm',); it is chosen for each graph from memory_budget, and is not "
        "to be set. Set memory_budget instead; compiled_fsdp.explain(model) says what was chosen",
    ),
    "prefetch before": (
        ValueError,
        "Plan: prefetch=-1; should be a number of units, at least 0, or 'auto' (from costs)",
    ),
    "prefetch by word": (
        ValueError,
        "Plan: prefetch='all'; should be a number of units, at least 0, or 'auto' (from costs)",
    ),
    "prefetch by True": (
        ValueError,
        "Plan: prefetch=True; should be a number of units, at least 0, or 'auto' (from costs)",
    ),
    "buckets below nothing": (
        ValueError,
        "Plan: bucket_bytes=-1; should be a number of bytes, at least 0, or 'auto' (from costs)",
    ),
    "buckets by fraction": (
        ValueError,
        "Plan: bucket_bytes=0.5; should be a number of bytes, at least 0, or 'auto' (from costs)",
    ),
    "a budget below nothing": (
        ValueError,
        "Plan: memory_budget=-1; should be bytes (an int), or a float from 0.0 (nothing kept for "
        "backward) to 1.0",
    ),
    "a budget of more than all": (
        ValueError,
        "Plan: memory_budget=1.5; should be bytes (an int), or a float from 0.0 (nothing kept for "
        "backward) to 1.0",
    ),
    "a budget by word": (
        ValueError,
        "Plan: memory_budget='8 GiB'; should be bytes (an int), or a float from 0.0 (nothing kept "
        "for backward) to 1.0",
    ),
    "the optimizer's state by a budget": (
        ValueError,
        "Plan: offload='optimizer'; should be None, or 'budget', for saved activations. An "
        "optimizer's state rests on the host by Plan(optimizer_state='budget') with compile_step; "
        "parameters, and their state with them, by CPUOffloadPolicy (fully_shard) or CPUOffload "
        "(FullyShardedDataParallel)",
    ),
    "the optimizer's state by word": (
        ValueError,
        "Plan: optimizer_state='host'; should be None (on the device), or 'budget', for state that "
        "rests on the host as far as memory_budget asks for it. For all of it, memory_budget=0.0",
    ),
    "the optimizer's state without a budget": (
        ValueError,
        "Plan: optimizer_state='budget' with memory_budget=None; a budget decides which optimizer "
        "state goes to the host. Set one, in bytes (an int) or as a float from 0.0 to 1.0",
    ),
    "offload without a budget": (
        ValueError,
        "Plan: offload='budget' with memory_budget=None; a budget decides which activations go to "
        "the host. Set one, in bytes (an int) or as a float from 0.0 to 1.0",
    ),
    "regions of another kind": (
        ValueError,
        "Plan: regions='blocks'; should be one of ('auto', 'units', 'off'), or a tuple of names of "
        'classes, for example ("Block",)',
    ),
    "units and activations by a budget": (
        ValueError,
        "Plan: regions='units' with recompute='budget', offload=None; a unit that is compiled once "
        "saves the same activations wherever it is called, so that no budget can choose among "
        "them. Leave out one of the two",
    ),
    "a host's budget alone": (
        ValueError,
        "Plan: host_budget=1073741824 with offload=None and optimizer_state=None, so that nothing "
        "goes to the host. Set one of them to 'budget', or leave out host_budget",
    ),
    "a host's budget by word": (
        ValueError,
        "Plan: host_budget='8 GiB'; should be a number of bytes, at least 0, or None (as many as "
        "the memory budget asks for)",
    ),
    "endless reductions": (
        ValueError,
        "Plan: reduces_in_flight=inf; should be a number of units, at least 0, or 'auto' (from "
        "costs)",
    ),
    "backward prefetch by nan": (
        ValueError,
        "Plan: backward_prefetch=nan; should be a number of units, at least 0, or 'auto' (from "
        "costs)",
    ),
    "planned with another field": (
        TypeError,
        "planned: ['prefetch_units'] are no fields of Plan; it has ['prefetch', "
        "'backward_prefetch', 'reduces_in_flight', 'bucket_bytes', 'split_bytes', 'own_message', "
        "'reductions', 'copy_out', 'reduction_bytes', 'recompute', 'overlap_exchanges', "
        "'exchange_group', 'record_routing', 'regions', 'memory_budget', 'offload', "
        "'optimizer_state', 'host_budget', 'kept', 'dropped', 'recomputed', 'offloaded', "
        "'states_on_host', 'costs', 'gather_quantized', 'reduce_quantized', 'exact', 'check']",
    ),
    "planned with a bad value": (
        ValueError,
        "Plan: prefetch=-2; should be a number of units, at least 0, or 'auto' (from costs)",
    ),
    "a dump into nothing": (TypeError, "dumped_to: path is None; should be the path of a folder"),
    "a dump into a file": (
        NotADirectoryError,
        "dumped_to: /dev/null is a file; should be a folder, or nothing yet",
    ),
    "warmup of a plain module": (
        TypeError,
        "warmup: ReLU ReLU() has no sharded module. Call fully_shard on it first",
    ),
    "warmup of no module": (
        TypeError,
        "warmup: str 'model' has no sharded module. Call fully_shard on it first",
    ),
    "a function for a model": (
        TypeError,
        "compile_step: the function sharded is in the place of the model. Pass the module that was "
        "given to fully_shard, first",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    kind, text = EXPECTED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the kind is compared below
        CASES[name]()
    found = re.sub(
        r"DeviceMesh\(\(1.*?1\)\)", "DeviceMesh(...)", str(caught.value)
    )  # torch's text changes with its versions
    assert (type(caught.value), found) == (kind, text)


def test_there_are_enough() -> None:
    assert set(CASES) == set(EXPECTED)
    assert len(CASES) >= 60
