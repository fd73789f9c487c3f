"""Chapters 1 to 4: the constructor, process groups, wrapping policies, ignored states,
initialisation.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
import torch.distributed.fsdp.wrap as stock_wrap
from kit.compare import plain
from kit.oracle_fsdp1 import (
    Api,
    Block,
    batch,
    close,
    each,
    eager_same,
    full,
    grads,
    mesh_of,
    net,
    outcome,
    params,
    rows,
    same,
    train_step,
    warned,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap

import compiled_fsdp
import compiled_fsdp.api
import compiled_fsdp.wrap

if TYPE_CHECKING:
    from kit.pool import Pool


@rows("1.1", "2.1", "3.1", "9.1", "12.2", "16.1")
def test_signature_and_names() -> None:
    ours, theirs = compiled_fsdp.FullyShardedDataParallel, stock.FullyShardedDataParallel
    a, b = (
        inspect.signature(ours.__init__).parameters,
        inspect.signature(theirs.__init__).parameters,
    )
    assert [(p.name, p.kind, p.default) for p in a.values()] == [
        (p.name, p.kind, p.default) for p in b.values()
    ]
    assert issubclass(ours, theirs)
    for name in stock.__all__:
        assert hasattr(compiled_fsdp, name), name
        assert name in compiled_fsdp.__all__ or name == "DataParallelMeshDims", name
    assert compiled_fsdp.FlatParameter is stock.FlatParameter
    for name in stock.api.__all__:
        assert (
            getattr(compiled_fsdp, name)
            is getattr(compiled_fsdp.api, name)
            is getattr(stock.api, name)
        ), name
    long_name = importlib.import_module(
        "compiled_fsdp.fully_sharded_data_parallel"
    )  # from where tutorials import
    assert long_name.__all__ == stock.fully_sharded_data_parallel.__all__
    for name in (*stock.api.__all__, "OptimStateKeyType", "FullyShardedDataParallel"):
        assert getattr(long_name, name) is getattr(compiled_fsdp, name), name
    assert compiled_fsdp.wrap.__all__ == sorted(stock_wrap.__all__)
    assert all(
        getattr(compiled_fsdp.wrap, name) is getattr(stock_wrap, name)
        for name in stock_wrap.__all__
    )
    scaler = inspect.signature(compiled_fsdp.sharded_grad_scaler.ShardedGradScaler.__init__)
    assert list(scaler.parameters)[1:] == [
        "device",
        "init_scale",
        "backoff_factor",
        "growth_factor",
        "growth_interval",
        "enabled",
        "process_group",
    ]


@rows("1.2", "1.3", "1.13", "1.14", "1.15", "1.16", "1.17", "1.18", "5.13", "5.14")
def test_construction(two: Pool) -> None:
    two.run(eager_same, construction)


def construction(api: Api) -> Any:
    found: list[Any] = []
    with warned() as given:
        found.append(
            outcome(
                lambda: type(api.FSDP(nn.ModuleList([nn.Linear(2, 2)]), device_id="cpu")).__name__
            )
        )
        found.append(
            outcome(
                lambda: list(
                    params(api.FSDP(net(), None, ShardingStrategy.NO_SHARD, device_id="cpu"))
                )
            )
        )
    found.append(given)
    mesh = mesh_of(2)
    found.append(outcome(lambda: api.wrap(net(), process_group=dist.group.WORLD, device_mesh=mesh)))
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.ones(()))
    found.append(outcome(lambda: api.wrap(scalar)))
    empty = api.wrap(nn.Tanh())
    found += [empty._flat_param, empty(batch()), list(empty.state_dict())]
    model = api.wrap(net(), use_orig_params=False)
    found += [
        type(model.module).__name__.replace("FSDP", ""),
        list(params(model)),
        type(model[0]).__name__,
    ]
    inner = api.wrap(checkpoint_wrapper(net()))
    found += [type(inner.module).__name__.replace("FSDP", ""), list(params(inner))]
    found += [outcome(lambda: model.nothing), list(params(api.wrap(net(), use_orig_params=True)))]
    return found


@rows("1.4")
def test_needs_a_device_id(two: Pool) -> None:
    two.run(eager_same, needs_a_device_id)


def needs_a_device_id(api: Api) -> Any:
    return outcome(lambda: api.FSDP(net())), outcome(lambda: api.FSDP(net().to("meta")))


@rows("1.9")
def test_device_id(two: Pool) -> None:
    two.run(eager_same, device_id)


def device_id(api: Api) -> Any:
    model = api.FSDP(net(), device_id=torch.device("cpu"))
    return [str(p.device) for p in model.parameters()], str(model.compute_device)


@rows("1.12")
def test_one_rank(two: Pool) -> None:
    two.run(eager_same, one_rank)


def one_rank(api: Api) -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    with warned() as given:
        model = api.FSDP(net(), groups[dist.get_rank()], device_id="cpu", use_orig_params=True)
        loss = train_step(model)
    return given, model.sharding_strategy, loss, grads(model)


@rows("1.20", status="improved")
def test_marks(two: Pool) -> None:
    """`_fsdp_use_orig_params` is always True, since Dynamo alone asks and traces both ways; ignored
    modules are not marked.
    """
    two.run(each, marks)


def marks(api: Api) -> None:
    model = net()
    ignored = model[3]
    api.wrap(model, ignored_modules=[ignored], use_orig_params=False)
    assert model._is_fsdp_managed_module
    assert model._fsdp_use_orig_params
    assert model[1].a._is_fsdp_managed_module
    assert not hasattr(ignored, "_is_fsdp_managed_module")


@rows("2.6", "2.7", "2.12")
def test_groups(two: Pool) -> None:
    two.run(eager_same, groups_and_meshes)


def groups_and_meshes(api: Api) -> Any:
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    mesh = mesh_of(2)
    found = [
        outcome(lambda: api.wrap(net(), device_mesh=mesh, **hybrid)),
        outcome(lambda: api.wrap(net(), process_group=dist.group.WORLD, **hybrid)),
        outcome(lambda: api.wrap(net(), process_group=(dist.group.WORLD,), **hybrid)),
        outcome(lambda: api.wrap(net(), **hybrid)),
    ]
    model = api.wrap(net(), device_mesh=mesh, use_orig_params=True)
    return found, model.world_size, train_step(model), grads(model)


@rows("2.7")
def test_hybrid_groups(four: Pool) -> None:
    four.run(close, hybrid_groups)


def hybrid_groups(api: Api) -> Any:
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    strategy = ShardingStrategy.HYBRID_SHARD
    model = api.wrap(
        net(), process_group=(shard, replicate), sharding_strategy=strategy, use_orig_params=True
    )
    return train_step(api.compile(model)), grads(model)


@rows("2.9", "2.11", status="improved")
def test_hybrid_without_groups(two: Pool) -> None:
    """On a CPU every rank is a node; stock divides gradients there without adding them, ours
    averages them.
    """
    two.run(each, hybrid_without_groups)


def hybrid_without_groups(api: Api) -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    model = api.blocks(sharding_strategy=strategy, use_orig_params=True)
    plain = api.blocks(sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    train_step(api.compile(model))
    train_step(api.compile(plain))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def wrapped(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, stock.FullyShardedDataParallel)
    ]


@rows("3.2", "3.3", "3.4", "3.7", "3.9", "3.10", "3.11", "3.12", "3.17")
def test_policies(two: Pool) -> None:
    two.run(eager_same, policies)


def policies(api: Api) -> Any:
    p = stock_wrap if api.is_stock else compiled_fsdp.wrap
    asked: list[Any] = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, Block)

    size = functools.partial(p.size_based_auto_wrap_policy, min_num_params=50)
    shared = nn.Sequential(block := Block(3), block, nn.Linear(3, 3))
    attention = nn.Sequential(nn.MultiheadAttention(8, 2), nn.ModuleList([nn.Linear(8, 8)]))
    choices: dict[str, tuple[nn.Module, Any]] = {
        "callable": (net(), policy),
        "always": (net(), p.always_wrap_policy),
        "lambda": (
            net(),
            functools.partial(
                p.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)
            ),
        ),
        "transformer": (
            net(),
            functools.partial(p.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ),
        "size": (net(), size),
        "leaf": (attention, size),
        "classes": (net(), p.ModuleWrapPolicy({Block})),
        "shared": (shared, p.ModuleWrapPolicy({Block})),
        "custom": (
            net(),
            p.CustomPolicy(lambda m: {"forward_prefetch": True} if isinstance(m, Block) else False),
        ),
        "bad": (net(), p.CustomPolicy(lambda m: "yes")),
        "nested": (nn.Sequential(api.wrap(net())), p.ModuleWrapPolicy({Block})),
    }
    found: dict[str, Any] = {}
    for name, (module, chosen) in choices.items():
        found[name] = outcome(
            lambda module=module, chosen=chosen: wrapped(api.wrap(module, auto_wrap_policy=chosen))
        )
    custom = api.wrap(net(), auto_wrap_policy=choices["custom"][1])
    ignoring = net()
    ignored = api.wrap(
        ignoring, auto_wrap_policy=p.ModuleWrapPolicy({Block}), ignored_modules=[ignoring[1]]
    )
    own = all(
        type(m) is api.FSDP
        for m in custom.modules()
        if isinstance(m, stock.FullyShardedDataParallel)
    )
    return (
        found,
        asked,
        custom.forward_prefetch,
        custom[1].forward_prefetch,
        wrapped(ignored),
        own,
        repr(choices["classes"][1]).split("(")[1],
    )


class Mixed(nn.Module):
    """Batch norm between layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.norm, self.b = nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


@rows("3.14", "3.15")
def test_policies_and_precision(two: Pool) -> None:
    two.run(same, policies_and_precision)


def policies_and_precision(api: Api) -> Any:
    with warned() as given:
        policy = ModuleWrapPolicy({nn.Linear})
        model = api.FSDP(
            Mixed(),
            auto_wrap_policy=policy,
            mixed_precision=MixedPrecision(torch.bfloat16),
            device_id="cpu",
            use_orig_params=True,
        )
    call = api.compile(model)
    found = [sorted(given), wrapped(model), train_step(call), plain(grads(model))]
    # The hooks around batch norm keep nothing that a graph guards on.
    with torch._dynamo.config.patch(error_on_recompile=True):
        found += [
            train_step(call, 1),
            plain(grads(model)),
            model.eval().norm(torch.ones(2, 6, dtype=torch.bfloat16)).dtype,
        ]
    frozen = net()
    frozen[1].a.weight.requires_grad_(False)
    found.append(outcome(lambda: api.blocks(frozen, use_orig_params=False))[0])
    frozen = net()
    frozen[1].a.weight.requires_grad_(False)
    with warned() as given:
        partly = api.FSDP(
            frozen,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id="cpu",
        )
    return found, given, train_step(api.compile(partly)), grads(partly)


@rows("3.18")
def test_wrap_and_enable_wrap(two: Pool) -> None:
    two.run(eager_same, wrap_and_enable_wrap)


def wrap_and_enable_wrap(api: Api) -> Any:
    outside = wrap(nn.Linear(2, 2))
    with enable_wrap(wrapper_cls=api.FSDP, device_id="cpu", use_orig_params=True):
        inside = wrap(nn.Linear(3, 4), forward_prefetch=True)
        nested = outcome(lambda: enable_wrap(wrapper_cls=api.FSDP).__enter__())
    return (
        type(outside).__name__,
        type(inside) is api.FSDP,
        inside.forward_prefetch,
        inside._use_orig_params,
        nested,
    )


@rows("4.1", "4.2", "4.5")
def test_ignored(two: Pool) -> None:
    two.run(same, ignored)


def ignored(api: Api) -> Any:
    model, other = net(), net()
    found = [
        outcome(lambda: api.wrap(model, ignored_modules=[model[0]], ignored_states=[model[1]]))[0],
        outcome(lambda: api.wrap(model, ignored_states=[model[0], model[1].a.weight]))[0],
        outcome(lambda: api.wrap(model, ignored_modules=[model[0].weight]))[0],
        outcome(lambda: api.wrap(model, ignored_modules=3))[0],
        outcome(lambda: api.wrap(nn.Sequential(inner := api.wrap(net())), ignored_modules=[inner]))[
            0
        ],
    ]
    with warned() as given:
        api.FSDP(other, ignored_modules=[other], device_id="cpu")
    found.append(given)
    for ignore in (
        {"ignored_modules": [1]},
        {"ignored_states": [1]},
        {"ignored_states": "weights"},
    ):
        model = net()
        given = (
            list(model[1].parameters()) if ignore.get("ignored_states") == "weights" else [model[1]]
        )
        sharded = api.wrap(model, use_orig_params=True, **{key: given for key in ignore})
        found += [
            train_step(api.compile(sharded)),
            grads(sharded),
            [tuple(p.shape) for p in sharded.parameters()],
        ]
    return found


@rows("4.8", "4.10")
def test_meta(two: Pool) -> None:
    two.run(eager_same, meta)


def meta(api: Api) -> Any:
    with torch.device("meta"):
        model, again, bad = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(3, 3),
            nn.Linear(2, 2),
        )
        odd = nn.Sequential(nn.Linear(2, 2), Odd())
    torch.manual_seed(5)
    first = full(api, api.wrap(model))
    calls: list[str] = []

    def init(module: nn.Module) -> None:
        calls.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        nn.init.constant_(module.weight, 2.0)
        nn.init.zeros_(module.bias)

    second = full(api, api.wrap(again, param_init_fn=init))
    found = [first, second, calls, outcome(lambda: api.wrap(bad, param_init_fn=3))]
    with warned() as given:
        found.append(outcome(lambda: api.FSDP(odd, device_id="cpu"))[0])
    return found, given


class Odd(nn.Module):
    """No way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


@rows("4.12")
def test_sync_module_states(two: Pool) -> None:
    two.run(eager_same, sync_module_states)


def sync_module_states(api: Api) -> Any:
    return outcome(lambda: api.wrap(net(), sync_module_states=True))
