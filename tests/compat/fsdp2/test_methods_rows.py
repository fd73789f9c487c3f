"""Chapters 12, 12b, 15 and 16: methods, free functions, custom communication, modes, composition,
logging.
"""

from __future__ import annotations

import logging
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal, plain
from kit.harness import SLOW
from kit.oracle import (
    Api,
    ShardPlacementResult,
    against_stock,
    batch,
    close,
    communications,
    each,
    eager_same,
    grads,
    inductor_same,
    input_step,
    is_sharded,
    mesh_of,
    message,
    needs_meshes_of_their_own,
    net,
    net_of_units,
    ours_eager,
    params,
    raised,
    rows,
    same,
    skip_without,
    stock_has,
    train_step,
)
from kit.pool import Pool
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import compiled_fsdp
from compiled_fsdp.torch_private import symmetric
from compiled_fsdp.torch_private.modules import forgets_gradients


class Methods(nn.Module):
    """Other entry points than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Encode."""
        return self.inner[0](x).tanh() * scale


class Log:
    """What a custom communication was asked for."""

    def __init__(self, returns_work: bool = False) -> None:
        self.calls: list[Any] = []
        self.ops: list[str] = []
        self.returns_work = returns_work

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append(("allocate", tuple(size), dtype, device.type))
        return torch.empty(*size, dtype=dtype, device=device)


class LoggedGather(Log, AllGather):
    def __call__(self, **kw: Any) -> Any:  # type: ignore[override]
        out, mine, group = kw["output_tensor"], kw["input_tensor"], kw["group"]
        start = mine.storage_offset() - out.storage_offset()
        is_slice = mine.untyped_storage()._cdata == out.untyped_storage()._cdata
        self.calls.append(
            (
                "gather",
                sorted(kw),
                mine.numel(),
                is_slice,
                start == dist.get_rank(group) * mine.numel(),
            )
        )
        work = dist.all_gather_into_tensor(out, mine.clone(), group=group, async_op=True)
        if self.returns_work:
            return work
        work.wait()
        return None


class LoggedReduce(Log, ReduceScatter):
    def __call__(self, **kw: Any) -> Any:  # type: ignore[override]
        out, rows_, group = kw["output_tensor"], kw["input_tensor"], kw["group"]
        is_own = dist.get_process_group_ranks(group) == list(range(group.size()))
        self.ops.append(str(kw["op"]))
        self.calls.append(
            ("reduce", sorted(kw), rows_.clone(), out.shape, is_own, group.group_desc)
        )
        work = dist.reduce_scatter_tensor(out, rows_, op=kw["op"], group=group, async_op=True)
        if self.returns_work:
            return work
        work.wait()
        return None


@rows("12.1", "12.7")
def test_unshard(two: Pool) -> None:
    two.run(same, unshard)


def unshard(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    seen: list[Any] = [
        communications(model[0].unshard),
        communications(model[0].unshard),
        model[0].unshard(),
    ]
    seen += [
        is_sharded(model),
        plain(params(model)),
        [type(p) is nn.Parameter for p in model[0].parameters()],
    ]
    model.unshard()
    model.reshard()
    seen += [is_sharded(model), model[0].reshard(), model[0].reshard(), is_sharded(model)]
    model[2].unshard()
    return seen, input_step(api.compile(model)), grads(model), is_sharded(model)


@rows("12.1")
def test_unshard_before_forward_saves_a_gather(two: Pool) -> None:
    two.run(eager_same, unshard_before_forward)


def unshard_before_forward(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model(batch())
    model.reshard()
    model[2].unshard()
    return communications(lambda: model(batch()))["gather"]


@rows("12.2", "12.5")
def test_unshard_handle(two: Pool) -> None:
    two.run(same, unshard_handle)


def unshard_handle(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    handle = model[0].unshard(async_op=True)
    seen = [
        isinstance(handle, api.UnshardHandle),
        is_sharded(model),
        communications(model[0].unshard)["gather"],
    ]
    seen += [
        is_sharded(model),
        handle.wait(),
        handle.wait(),
        is_sharded(model),
        plain(params(model)),
    ]
    model[2].unshard(async_op=True)
    empty = api.fully_shard(nn.Tanh()).unshard(async_op=True)
    return seen, is_sharded(model), empty.wait(), train_step(api.compile(model)), grads(model)


@rows("12.5")
def test_base_handle(two: Pool) -> None:
    two.run(same, base_handle)


def base_handle(api: Api) -> Any:
    return api.UnshardHandle().wait()


@rows("12.4")
def test_unshard_in_param_dtype(two: Pool) -> None:
    two.run(same, unshard_in_param_dtype)


def unshard_in_param_dtype(api: Api) -> Any:
    model = api.fully_shard(net(), mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    full = plain(params(model))
    model.reshard()
    return full, params(model)


@rows("12.8")
def test_set_reshard_after_forward(two: Pool) -> None:
    two.run(same, reshard_after_forward)
    two.run(eager_same, reshard_after_forward_registration)


def reshard_after_forward(api: Api) -> Any:
    model, call = net_of_units(api)
    errors = [
        raised(lambda value=value: model.set_reshard_after_forward(value))
        for value in (0, 1, 2, None, "x")
    ]
    input_step(call)
    counts = [communications(lambda: input_step(call))]
    for value, recurse in ((True, True), (False, True), (True, False)):
        model.set_reshard_after_forward(value, recurse)
        counts.append(communications(lambda: input_step(call)))
    return errors, counts, grads(model)


def reshard_after_forward_registration(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    seen = []
    for value in (True, False):
        model.set_reshard_after_forward(value)
        model(batch())
        seen.append(is_sharded(model))
        model.reshard()
    return seen


@rows("12.9", "12b.8", "12b.10", "12b.11")
def test_custom_communication(two: Pool) -> None:
    two.run(same, custom_communication, False)
    two.run(same, custom_communication, True)


def test_custom_communication_with_inductor(two: Pool) -> None:
    two.run(inductor_same, custom_communication, True, timeout=SLOW)


def custom_communication(api: Api, returns_work: bool) -> Any:
    model = api.units(net(), "0", "2")
    gather, reduce = LoggedGather(returns_work), LoggedReduce()
    returned = model[0].set_custom_all_gather(gather), model[0].set_custom_reduce_scatter(reduce)
    out = api.compile(model)(batch(requires_grad=True))
    in_forward = gather.calls[:]
    out.square().mean().backward()
    for _, keywords, *_ in (call for call in in_forward if call[0] == "gather"):
        keywords.remove("async_op")  # the one that may differ: False in stock, True in ours
    return returned, in_forward, reduce.calls, reduce.ops, grads(model)


@rows("12b.8", status="improved")
def test_work_of_a_custom_reduce_scatter(two: Pool) -> None:
    """Ours awaits it; stock does not look at it, so on CPU it reads what has not arrived."""
    two.run(each, work_of_a_custom_reduce_scatter)


def work_of_a_custom_reduce_scatter(api: Api) -> None:
    results = []
    for is_custom in (True, False):
        model = api.units(net(), "0")
        if is_custom:
            model.set_custom_reduce_scatter(LoggedReduce(returns_work=True))
        train_step(api.compile(model))
        results.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@rows("12b.11", "9b.1")
def test_custom_reduce_scatter_averages(two: Pool) -> None:
    two.run(same, custom_reduce_scatter_averages)


def custom_reduce_scatter_averages(api: Api) -> Any:
    model, reduce = api.fully_shard(net()), LoggedReduce()
    model.set_custom_reduce_scatter(reduce)
    train_step(api.compile(model))
    return reduce.ops


@needs_meshes_of_their_own
@rows("12.9", "12.10")
def test_several_groups(two: Pool) -> None:
    two.run(same, several_groups)


def several_groups(api: Api) -> Any:
    other = FSDPMeshInfo(mesh_of(2, 1, names=("a", "b"))["b"], shard_mesh_dim=0)
    model = net(depth=1)
    place = {model[0].weight: ShardPlacementResult(Shard(0), other)}
    api.fully_shard(model, shard_placement_fn=place.get)
    setters = (
        model.set_custom_all_gather,
        model.set_custom_reduce_scatter,
        model.set_all_reduce_hook,
    )
    return [(raised(lambda s=s: s(print)), message(lambda s=s: s(print))) for s in setters]


@rows("12b.12")
def test_custom_communication_of_one_rank(two: Pool) -> None:
    two.run(same, custom_communication_of_one_rank)


def custom_communication_of_one_rank(api: Api) -> Any:
    model = api.fully_shard(net(), mesh=mesh_of(2, 1, names=("a", "b"))["b"])
    gather, reduce = LoggedGather(), LoggedReduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    input_step(api.compile(model))
    return gather.calls, [c for c in reduce.calls if c[0] == "reduce"], grads(model)


@rows("12b.12", status="improved")
def test_no_allocation_for_one_rank(two: Pool) -> None:
    """A custom reduce-scatter is not asked for a buffer that nothing would be sent from."""
    two.run(each, no_allocation_for_one_rank)


def no_allocation_for_one_rank(api: Api) -> None:
    model = api.fully_shard(net(), mesh=mesh_of(2, 1, names=("a", "b"))["b"])
    reduce = LoggedReduce()
    model.set_custom_reduce_scatter(reduce)
    train_step(api.compile(model))
    assert reduce.calls == []


@rows("12.10", "12.11")
def test_all_reduce_hook(two: Pool) -> None:
    two.run(same, all_reduce_hook)


def test_all_reduce_hook_with_inductor(two: Pool) -> None:
    two.run(inductor_same, all_reduce_hook, timeout=SLOW)


def all_reduce_hook(api: Api) -> Any:
    model, call = net_of_units(api)
    calls: list[Any] = []

    def hook(reduced: Tensor) -> None:
        calls.append(plain(reduced))
        reduced.mul_(3.0).add_(1.0)

    returned = model[2].set_all_reduce_hook(hook), model[2].set_force_sum_reduction_for_comms(True)
    train_step(call)
    model.set_requires_gradient_sync(False)
    train_step(call, 1)
    unsynced = len(calls)
    model.set_requires_gradient_sync(True)
    train_step(call, 2)
    return returned, unsynced, calls, grads(model)


@rows("12.10", "12.11")
def test_all_reduce_hook_with_hsdp(four: Pool) -> None:
    four.run(close, all_reduce_hook_with_hsdp)


def all_reduce_hook_with_hsdp(api: Api) -> Any:
    model = api.units(net(), "0", mesh=mesh_of(2, 2, names=("replicate", "shard")))
    call = api.compile(model)
    calls: list[Any] = []
    found = raised(lambda: model.set_all_reduce_hook(print, stream=object()))

    def hook(reduced: Tensor) -> None:
        calls.append(plain(reduced))
        reduced.mul_(3.0)

    model.set_all_reduce_hook(hook)
    model.set_force_sum_reduction_for_comms(True)
    model.set_requires_all_reduce(False)
    train_step(call)
    before = len(calls)
    model.set_requires_all_reduce(True)
    train_step(call, 1)
    return found, before, calls, grads(model)


class Stream(torch.cpu.Stream):
    """The CPU's double of a stream: what it was told to wait for."""

    num_waits = 0

    def wait_stream(self, stream: Any) -> None:
        self.num_waits += 1


@rows("12.10")
def test_all_reduce_hook_on_a_stream(two: Pool) -> None:
    """It runs on the stream that was given, behind the reduction;
    so do hooks that are set later.
    """
    two.run(same, all_reduce_hook_on_a_stream)


def all_reduce_hook_on_a_stream(api: Api) -> Any:
    model = api.fully_shard(net())
    stream = Stream()
    seen: list[Any] = []

    def hook(reduced: Tensor) -> None:
        seen.append((torch.cpu.current_stream() is stream, stream.num_waits))
        reduced.mul_(3.0)

    model.set_all_reduce_hook(hook, stream=stream)
    call = api.compile(model)
    train_step(call)
    found = grads(model)
    model.set_all_reduce_hook(lambda reduced: hook(reduced))
    train_step(call, 1)
    assert torch.cpu.current_stream() is not stream
    return seen, found, grads(model)


@rows("12.11")
def test_all_reduce_hook_sees_the_mean(two: Pool) -> None:
    two.run(same, all_reduce_hook_sees_the_mean)


def all_reduce_hook_sees_the_mean(api: Api) -> Any:
    model = api.fully_shard(net())
    seen: list[Any] = []
    model.set_all_reduce_hook(lambda reduced: seen.append(plain(reduced)))
    train_step(api.compile(model))
    return seen


@rows("12.14", "12.16")
def test_divide_factor(two: Pool) -> None:
    two.run(same, divide_factor)


def divide_factor(api: Api) -> Any:
    model, call = net_of_units(api)
    model[0].set_gradient_divide_factor(2.0)
    for m in (model, model[2]):
        m.set_force_sum_reduction_for_comms(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(8.0)
    seen = [
        [(w.category.__name__, str(w.message)) for w in caught],
        train_step(call),
        plain(grads(model)),
    ]
    model.set_gradient_divide_factor(4.0)
    model.set_force_sum_reduction_for_comms(True)
    model[2].set_force_sum_reduction_for_comms(False)
    return seen, train_step(call, 1), grads(model)


@rows("12.17")
def test_unshard_in_backward(two: Pool) -> None:
    two.run(same, unshard_in_backward)
    two.run(same, unshard_in_backward_gathers)


def unshard_in_backward(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model[0].set_unshard_in_backward(False)
    call = api.compile(model)
    return train_step(call), train_step(call, 1), grads(model), is_sharded(model)


def unshard_in_backward_gathers(api: Api) -> Any:
    model, call = net_of_units(api)
    train_step(call)
    assert communications(lambda: train_step(call))["gather"] == (4 if api.is_compiled else 5)
    model[0].set_unshard_in_backward(False)
    return communications(lambda: train_step(call))


@rows("12.18")
def test_max_input_buffers(two: Pool) -> None:
    against_stock(two, same, max_input_buffers, "set_reduce_scatter_max_input_buffers")


def max_input_buffers(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    setter = model.set_reduce_scatter_max_input_buffers
    found = [
        (raised(lambda k=k: setter(k)), message(lambda k=k: setter(k)))
        for k in (True, 1.5, "2", None, 0, -1)
    ]
    returned = setter(3), model[2].set_reduce_scatter_max_input_buffers(2, recurse=False)
    call = api.compile(model)
    return found, returned, train_step(call), train_step(call, 1), grads(model)


@rows("12.19")
def test_separate_reduce_scatter_group(two: Pool) -> None:
    against_stock(two, same, separate_reduce_scatter_group, "set_separate_reduce_scatter_group")


def separate_reduce_scatter_group(api: Api) -> Any:
    model, call = net_of_units(api)
    gathers, reduces = LoggedGather(), LoggedReduce()
    model.set_custom_all_gather(gathers)
    model.set_custom_reduce_scatter(reduces)
    groups = dist.distributed_c10d._world.pg_map
    returned = model.set_separate_reduce_scatter_group()
    train_step(call)
    before = len(groups)
    model.set_separate_reduce_scatter_group(True, recurse=False)
    train_step(call, 1)
    added = len(groups) - before
    model.set_separate_reduce_scatter_group(False)
    train_step(call, 2)
    used = [len({c[-1] for c in reduces.calls if c[0] == "reduce"})]
    return returned, added, used, grads(model)


@rows("12.20")
def test_allocate_from_process_group(two: Pool) -> None:
    two.run(same, allocate_from_process_group)


def allocate_from_process_group(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    returned = [
        model.set_allocate_memory_from_process_group_for_comm(flag) for flag in (True, False, True)
    ]
    train_step(api.compile(model))
    model[0].set_custom_all_gather(LoggedGather())
    model[2].set_custom_reduce_scatter(LoggedReduce())
    setters = [
        m.set_allocate_memory_from_process_group_for_comm for m in (model, model[0], model[2])
    ]
    return returned, [raised(lambda s=s: s(True)) for s in setters], grads(model)


@rows("12.21")
def test_symmetric_memory_beside_a_custom_gather(two: Pool) -> None:
    against_stock(two, same, symmetric_memory_beside_a_custom_gather, "set_symm_mem_for_comm")


def symmetric_memory_beside_a_custom_gather(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    model[0].set_custom_all_gather(LoggedGather())
    refused = raised(model[0].set_symm_mem_for_comm)
    return refused, train_step(api.compile(model)), grads(model)


@rows("12.21", status="improved")
def test_symmetric_memory_needs_a_device(two: Pool) -> None:
    """The setter raises on a CPU; in stock a forward does, where torch is built with CUDA"""
    two.run(each, symmetric_memory_needs_a_device)


def symmetric_memory_needs_a_device(api: Api) -> None:
    model = api.units(net(), "0", "2")
    with pytest.raises(RuntimeError, match="NCCL's symmetric memory is CUDA memory; nothing was"):
        model[0].set_symm_mem_for_comm()
    train_step(api.compile(model))


@rows("12.21", status="improved")
@pytest.mark.parametrize("is_sum", [False, True])
def test_symmetric_memory(two: Pool, is_sum: bool) -> None:
    """Not run on a GPU: memory of the CPU plays symmetric memory. In a graph too; simulated, it is
    accepted
    """
    two.run(each, symmetric_memory, is_sum)


def symmetric_memory(api: Api, is_sum: bool) -> None:
    without, log, allocated = api.units(net(), "0", "2"), Counter(), {}

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(numel, dtype=dtype, device=device)
        allocated[made.data_ptr()] = weakref.ref(made.untyped_storage())
        return made

    def meet(tensor: Tensor, group: str) -> None:
        assert allocated[tensor.data_ptr()]() is not None, "not in symmetric memory"
        assert group == dist.group.WORLD.group_name
        log["met"] += 1

    with (
        mock.patch.object(symmetric, "DEVICES", ("cpu",)),
        mock.patch.object(symmetric, "use_backend", lambda name: log.update([name])),
        mock.patch.object(symmetric, "allocate", allocate),
        mock.patch.object(symmetric, "meet", meet),
    ):
        model = api.units(net(), "0", "2")
        for one in (without, model):
            one[0].set_force_sum_reduction_for_comms(is_sum)
        for _ in range(2):  # as often as one likes
            assert model[0].set_symm_mem_for_comm() is None
        memory = model[0].set_allocate_memory_from_process_group_for_comm
        assert message(lambda: memory(True)).endswith(
            "cannot be called after set_symm_mem_for_comm"
        )
        with pytest.raises(ValueError, match="backend='CUDA'; should be 'NCCL'"):
            model[0].set_symm_mem_for_comm("CUDA")
        call, call_without = api.compile(model), api.compile(without)
        for _ in range(2):
            assert torch.equal(input_step(call), input_step(call_without))
        described = str(compiled_fsdp.explain(model))
        counted = dict(log)
        replaced = api.units(net(), "0", "2")
        replaced[0].set_symm_mem_for_comm()
        replaced[0].set_custom_all_gather(LoggedGather())
        input_step(api.compile(replaced))
        assert "set_symm_mem_for_comm" not in str(compiled_fsdp.explain(replaced))
    # gathered in forward and for backward (the outermost unit's stays), and reduced
    assert counted == {"NCCL": 2, "met": 2 * (2 + 2 * is_sum)}
    assert "set_symm_mem_for_comm" in described
    for mine, its in zip(model.parameters(), without.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), its.grad.to_local())


@rows("12.22")
def test_reset_iter_state_needs_the_root(two: Pool) -> None:
    against_stock(two, same, reset_iter_state_needs_the_root, "reset_iter_state")


def reset_iter_state_needs_the_root(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(api.compile(model))
    return raised(model[0].reset_iter_state), model.reset_iter_state(), grads(model)


@rows("12.22", status="improved")
def test_reset_iter_state_before_lazy_init(two: Pool) -> None:
    """Ours knows the root from the start; stock raises an AttributeError, on the root too."""
    two.run(each, reset_iter_state_before_lazy_init)


def reset_iter_state_before_lazy_init(api: Api) -> None:
    model = api.units(net(), "0", "2")
    assert raised(model[0].reset_iter_state) == "RuntimeError"
    assert model.reset_iter_state() is None
    train_step(api.compile(model))


def boom(*args: Any) -> None:
    raise ValueError("boom")


@rows("12.23")
def test_reset_after_exception(two: Pool) -> None:
    two.run(eager_same if stock_has("reset_iter_state") else ours_eager, exceptions_inside)
    against_stock(two, same, exception_in_backward, "reset_iter_state")


def exception_in_backward(api: Api) -> Any:
    model, call = net_of_units(api)
    out = call(batch())
    out.register_hook(boom)
    found = raised(out.sum().backward)
    model.reset_iter_state()
    return (
        found,
        is_sharded(model),
        grads(model),
        [(train_step(call, step), plain(grads(model))) for step in (1, 2)],
    )


def exceptions_inside(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    handle = model[2].register_forward_hook(boom)
    found = [raised(lambda: model(batch()))]
    handle.remove()
    model.reset_iter_state()
    found += [is_sharded(model), train_step(model), plain(grads(model))]
    handle = model[1].register_forward_hook(lambda m, args, out: out.register_hook(boom))
    found.append(raised(lambda: model(batch()).sum().backward()))
    handle.remove()
    model.reset_iter_state()
    return found, is_sharded(model), communications(lambda: model(batch())), model(batch(step=3))


@rows("15.11", status="improved")
def test_goes_on_after_exception(two: Pool) -> None:
    """Without `reset_iter_state`, which stock needs: `zero_grad` drops what there is, and behind a
    forward that failed, `parameters` has the gradients.
    """
    two.run(ours_eager, goes_on)


def goes_on(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(model)
    expected = grads(model)
    handle = model[2].register_forward_hook(boom)
    raised(lambda: model(batch()))
    handle.remove()
    assert is_sharded(model)
    check_equal(grads(model), expected, "behind a forward")
    model.zero_grad()
    handle = model[1].register_forward_hook(lambda m, args, out: out.register_hook(boom))
    raised(lambda: model(batch()).sum().backward())
    handle.remove()
    model.zero_grad()
    train_step(model)
    check_equal(grads(model), expected, "behind a backward")


@rows("12.24", status="improved")
def test_reset_drops_unreduced_gradients(two: Pool) -> None:
    """As stock's documentation says; before torch 2.15 stock keeps what is on the unsharded
    parameters.
    """
    two.run(each, reset_drops_unreduced_gradients)
    skip_without("reset_iter_state")
    two.run(what_stock_drops)


def gradients_after_reset(api: Api, is_reset: bool) -> Any:
    model, call = net_of_units(api)
    if is_reset:
        model.set_requires_gradient_sync(False)
        train_step(call)
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
    train_step(call, 1)
    return [p.grad.to_local() for p in model.parameters()]


def reset_drops_unreduced_gradients(api: Api) -> None:
    pairs = zip(gradients_after_reset(api, True), gradients_after_reset(api, False), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def what_stock_drops() -> None:
    api = Api("stock")
    pairs = zip(gradients_after_reset(api, True), gradients_after_reset(api, False), strict=True)
    assert {torch.equal(a, b) for a, b in pairs} == {forgets_gradients()}


@rows("12.25")
def test_unshard_async_op(two: Pool) -> None:
    two.run(same, unshard_async_op)


def unshard_async_op(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    returned = model._set_unshard_async_op(True)
    call = api.compile(model)
    return returned, train_step(call), train_step(call, 1), grads(model), is_sharded(model)


@rows("12.26")
def test_setters_before_the_first_forward(two: Pool) -> None:
    against_stock(
        two,
        same,
        setters_before_the_first_forward,
        "set_reduce_scatter_unused_params",
        "set_reduce_scatter_max_input_buffers",
    )


def setters_before_the_first_forward(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    returned = [
        model.set_requires_gradient_sync(True),
        model.set_requires_all_reduce(True),
        model.set_reshard_after_forward(True),
        model.set_reshard_after_backward(True),
        model.set_is_last_backward(True),
        model.set_unshard_in_backward(True),
        model.set_modules_to_forward_prefetch([model[2]]),
        model.set_modules_to_backward_prefetch([model[0]]),
        model.set_gradient_divide_factor(2.0),
        model.set_force_sum_reduction_for_comms(True),
        model.set_reduce_scatter_unused_params(False),
        model.set_reduce_scatter_max_input_buffers(1),
        model.set_all_reduce_hook(lambda reduced: None),
        model.set_allocate_memory_from_process_group_for_comm(True),
    ]
    return returned, train_step(api.compile(model)), grads(model)


@rows("12b.1")
def test_forward_method_arguments(two: Pool) -> None:
    two.run(same, forward_method_arguments)


def forward_method_arguments(api: Api) -> Any:
    plain_module, model = Methods(), api.fully_shard(Methods())
    untouched = (
        api.register_fsdp_forward_method(plain_module, "encode"),
        "encode" in vars(plain_module),
    )
    missing = raised(lambda: api.register_fsdp_forward_method(model, "decode"))
    return untouched, api.register_fsdp_forward_method(plain_module, "decode"), missing


@rows("12b.3")
def test_forward_method(two: Pool) -> None:
    two.run(same, forward_method)


def forward_method(api: Api) -> Any:
    model = api.units(Methods(), "inner.0", "inner")
    hooked: list[str] = []
    model.register_forward_hook(lambda *args: hooked.append("forward"))
    api.register_fsdp_forward_method(model, "encode")
    names = model.encode.__name__, model.encode.__doc__, "encode" in vars(model)
    encode = api.compile(model.encode)
    encode(batch(), scale=0.5).sum().backward()
    encoded = is_sharded(model), plain(grads(model)), list(hooked)
    train_step(api.compile(model), 1)
    return names, encoded, grads(model)


class Event:
    """Behind an optimizer's step on a stream of its own: parameters are new once it is awaited."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step, self.num_waits = step, 0

    def wait(self, stream: Any = None) -> None:
        self.num_waits += 1
        self.step()


@rows("12.13", status="improved")
def test_post_optim_event(two: Pool) -> None:
    """The current stream waits, which gathers are behind; in stock gathers alone.
    Not run on a GPU.
    """
    two.run(post_optim_event)


def post_optim_event() -> None:
    """On CPU stock waits for nothing: compared with the loop without an event."""
    expected = with_event(lambda model: model, is_late=False)
    assert with_event(lambda model: model) == expected
    backend = "compiled_fsdp_eager"
    assert with_event(lambda model: torch.compile(model, backend=backend)) == expected
    larger = with_event(lambda model: torch.compile(lambda x: model(x) * 1.0, backend=backend))
    assert larger == expected
    model = compiled_fsdp.fully_shard(net())
    assert "has no wait()" in message(lambda: model.set_post_optim_event(3))


def with_event(compiled: Callable[[Any], Any], is_late: bool = True) -> list[float]:
    torch._dynamo.reset()
    model: Any = net()
    for part in (model[0], model):
        compiled_fsdp.fully_shard(part)
    call, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.1)
    losses, events = [], []
    for step in range(4):
        loss = call(batch(step=step)).square().mean()
        loss.backward()
        if is_late:
            events.append(Event(optimizer.step))
            model.set_post_optim_event(events[-1])
        else:
            optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(call(batch(step=9)).sum().item())
        optimizer.zero_grad()
    assert [event.num_waits for event in events] == [1] * len(events)
    return losses


@rows("12b.5", "12b.7")
def test_share_comm_ctx_arguments(two: Pool) -> None:
    two.run(same, share_comm_ctx_arguments)


def share_comm_ctx_arguments(api: Api) -> Any:
    one, other = api.fully_shard(net()), api.fully_shard(net(seed=8))
    found = raised(lambda: api.share_comm_ctx([one, nn.Linear(2, 2)])), api.share_comm_ctx([])
    returned = api.share_comm_ctx([one, other])
    calls = api.compile(one), api.compile(other)
    return found, returned, [train_step(call) for call in calls], grads(one), grads(other)


@rows("15.1")
def test_no_grad_and_eval(two: Pool) -> None:
    two.run(same, no_grad_and_eval)


def no_grad_and_eval(api: Api) -> Any:
    model, call = net_of_units(api, reshard_after_forward=True)
    call(batch())
    with torch.no_grad():
        seen = [
            communications(lambda: call(batch())),
            call(batch()),
            call(batch()).requires_grad,
            is_sharded(model),
        ]
    model.eval()
    return seen, train_step(call), grads(model)


@rows("15.2")
def test_inference_mode(two: Pool) -> None:
    two.run(same, inference_mode)


def inference_mode(api: Api) -> Any:
    model, call = net_of_units(api)
    loss = train_step(call)
    with torch.inference_mode():
        out = call(batch(step=1))
        seen = out.clone(), out.is_inference()
    return loss, seen, train_step(call, 2), grads(model)


@rows("15.2", status="improved")
def test_inference_mode_first(two: Pool) -> None:
    """Stock's first forward in inference mode leaves buffers that autograd refuses later."""
    two.run(each, inference_mode_first)


def inference_mode_first(api: Api) -> None:
    results = []
    for is_first in (True, False):
        model = api.units(net(), "0", "2")
        call = api.compile(model)
        if is_first:
            with torch.inference_mode():
                call(batch())
        results.append([train_step(call, 1), *(p.grad.to_local() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@rows("15.4")
def test_several_forwards(two: Pool) -> None:
    two.run(eager_same, several_forwards)
    two.run(compiled_close, several_forwards)
    two.run(same, several_forwards_of_a_function)


def compiled_close(observe: Any) -> None:
    same(
        observe, kinds=("compiled",), rtol=1e-5, atol=1e-7
    )  # every graph reduces its own gradients; stock sums them before


def several_forwards(api: Api) -> Any:
    model, call = net_of_units(api)
    outs = [call(batch(step=step)) for step in range(3)]
    sum(out.square().mean() for out in outs).backward()
    return plain(grads(model)), is_sharded(model), train_step(call, 3), grads(model)


def several_forwards_of_a_function(api: Api) -> Any:
    """One graph has all of them, and sums before it reduces."""
    model = api.units(net(), "0", "2")
    call = api.compile(lambda *batches: sum(model(x).square().mean() for x in batches))
    losses = []
    for step in range(2):
        losses.append(call(*(batch(step=3 * step + n) for n in range(3))))
        losses[-1].backward()
    return losses, is_sharded(model), grads(model)


@rows("15.5")
def test_several_backwards(two: Pool) -> None:
    two.run(same, several_backwards)


def several_backwards(api: Api) -> Any:
    model, call = net_of_units(api)
    loss = call(batch()).square().mean()
    seen = []
    for is_kept in (True, True, False):
        loss.backward(retain_graph=is_kept)
        seen += [plain(grads(model)), is_sharded(model)]
    return seen, train_step(call, 1), grads(model)


class Heads(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body, self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x).tanh()
        return {"a": self.a(x), "b": self.b(x)}


@rows("15.6")
def test_output_unused(two: Pool) -> None:
    """A graph gives zeros where stock gives None, as `torch.compile` does for any model."""
    two.run(same, output_unused, True)
    two.run(eager_exactly, output_unused)


def eager_exactly(observe: Any) -> None:
    same(observe, False, kinds=("eager",))


def output_unused(api: Api, zero_is_none: bool) -> Any:
    model = api.units(Heads(), "body", "a", "b", reshard_after_forward=False)
    call = api.compile(model)
    seen = []
    for step, key in enumerate("aba"):
        model.zero_grad()
        call(batch(step=step))[key].square().mean().backward()
        found = plain(grads(model))
        if zero_is_none:
            found = {
                n: g
                for n, g in found.items()
                if n.startswith((key, "body")) or (g is not None and g["local"].any())
            }
        seen += [is_sharded(model), found]
    return seen


class Checkpointed(nn.Module):
    """Every layer is recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = net()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@rows("15.7")
def test_activation_checkpointing(two: Pool) -> None:
    two.run(same, activation_checkpointing)
    two.run(eager_same, reentrant_checkpointing)


def activation_checkpointing(api: Api, use_reentrant: bool = False) -> Any:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = api.units(Checkpointed(use_reentrant), "layers.0", "layers.2", mp_policy=policy)
    call = api.compile(model)
    inputs = [input_step(call, step) for step in (0, 1)]
    return inputs, grads(model), is_sharded(model)


def reentrant_checkpointing(api: Api) -> Any:
    return activation_checkpointing(api, use_reentrant=True)


@rows("15.9")
def test_clip_grad_norm(two: Pool) -> None:
    two.run(same, clip_grad_norm)


def clip_grad_norm(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    train_step(api.compile(model))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return type(norm).__name__, norm.full_tensor(), grads(model)


@rows("15.13")
def test_replicate(two: Pool) -> None:
    two.run(same, replicate_on_sharded)


def replicate_on_sharded(api: Api) -> Any:
    return raised(lambda: replicate(api.fully_shard(net())))


@rows("15.14")
def test_pickle(two: Pool) -> None:
    two.run(same, pickle_wrapped)


def pickle_wrapped(api: Api) -> Any:
    return raised(lambda: pickle.dumps(api.fully_shard(net()))) is not None


@rows("16.1")
def test_no_environment_variables() -> None:
    """But for those that ask for dumps of graphs, records, checks after every pass, and a step
    without its communication; and the rank, which torchrun sets, and `simulate` and its sweeps in
    its place. `ahead.py` sets the one by which Inductor's kernels find torch.
    """
    sources = Path(compiled_fsdp.__file__).parent.rglob("*.py")
    found = {p.name for p in sources if "os.environ" in p.read_text() or "getenv" in p.read_text()}
    assert found == {
        "ablation.py",
        "ahead.py",
        "options.py",
        "settings.py",
        "simulate.py",
        "sweep.py",
        "replacement.py",
        "writer.py",
    }


class Lines(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@rows("16.2", status="eager")
def test_log(two: Pool) -> None:
    two.run(eager_same, log)


def log(api: Api) -> Any:
    model = api.units(net(), "0", "2")
    logger, lines = logging.getLogger("torch.distributed.fsdp.fully_shard"), Lines()
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        train_step(model)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    return sorted(set(lines.lines))
