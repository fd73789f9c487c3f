"""Chapters 12 and 13: state dicts of models and of optimizers, also from one front end to the
other.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal, plain
from kit.oracle_fsdp1 import (
    ALL_KINDS,
    STRATEGIES,
    Api,
    adam,
    each,
    eager_same,
    full,
    mesh_of,
    net,
    outcome,
    rows,
    same,
    train_step,
    warned,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    StateDictType,
)

import compiled_fsdp

if TYPE_CHECKING:
    from kit.pool import Pool

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def shown(value: Any) -> Any:
    """A state dict with sharded tensors as this rank's pieces."""
    if isinstance(value, ShardedTensor):
        pieces = [
            [s.metadata.shard_offsets, s.tensor.detach().clone()] for s in value.local_shards()
        ]
        return {"size": list(value.size()), "pieces": pieces}
    if isinstance(value, dict):
        return {str(k): shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [shown(v) for v in value]
    return plain(value)


def quietly(run: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(*args, **kwargs)


def typed(api: Any, model: Any, kind: StateDictType, *configs: Any) -> Any:
    warnings.simplefilter("ignore")
    return api.FSDP.state_dict_type(model, kind, *configs)


@rows("12.1", "12.3", "12.4", "12.7")
def test_types(two: Pool) -> None:
    two.run(eager_same, types)


def types(api: Api) -> Any:
    model, fsdp = api.blocks(), api.FSDP
    found = [plain(fsdp.get_state_dict_type(model))]
    with warned() as given:
        found.append(
            plain(
                fsdp.set_state_dict_type(
                    model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)
                )
            )
        )
    found += [given, plain(fsdp.get_state_dict_type(model))]
    found += [
        outcome(lambda: quietly(fsdp.set_state_dict_type, model, FULL, LocalStateDictConfig()))
    ]
    found += [
        outcome(
            lambda: quietly(
                fsdp.set_state_dict_type, model, FULL, None, LocalOptimStateDictConfig()
            )
        )
    ]
    quietly(fsdp.set_state_dict_type, model[1], LOCAL)
    found += [
        outcome(lambda: fsdp.get_state_dict_type(model))[0],
        outcome(lambda: quietly(fsdp.set_state_dict_type, model, FULL))[0],
    ]
    found += [
        quietly(fsdp.set_state_dict_type, nn.Linear(1, 1), FULL),
        fsdp.get_state_dict_type(nn.Linear(1, 1)),
    ]
    other = api.blocks()
    with typed(api, other, SHARDED):
        found.append(plain(fsdp.get_state_dict_type(other)))
    return found, plain(fsdp.get_state_dict_type(other))


@rows("12.6", status="improved")
def test_type_is_restored_after_an_exception(two: Pool) -> None:
    """Restored after an exception too; stock leaves the inner settings."""
    two.run(each, type_is_restored)


def type_is_restored(api: Api) -> None:
    model = api.blocks()
    with pytest.raises(KeyError), typed(api, model, SHARDED):
        raise KeyError
    assert api.FSDP.get_state_dict_type(model).state_dict_type is FULL


class Buffered(nn.Module):
    """A float buffer, an integer one, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 5)
        self.c = nn.Linear(5, 5, bias=False)
        self.c.weight = self.b.weight
        self.register_buffer("scale", torch.tensor([1.0, 1 / 3]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(self.a(x)))) * self.scale[1]


@rows("12.8", "12.10", "12.12", "12.13", "12.17", "12.19", "12.20", "12.21", "9.8")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_model(two: Pool, use_orig_params: bool) -> None:
    two.run(model_rows, use_orig_params)


def model_rows(use_orig_params: bool) -> None:
    for strategy in STRATEGIES:
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        kinds = ALL_KINDS if strategy is STRATEGIES[0] else ("eager",)
        same(lambda api, options=options: model_state(api, **options), kinds=kinds)


def model_state(api: Api, **options: Any) -> Any:
    found: list[Any] = []
    for make in (net, Buffered):
        model = api.blocks(
            make(),
            mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16),
            **options,
        )
        train_step(api.compile(model))
        for kind in (FULL, SHARDED):
            with typed(api, model, kind), warned() as given:
                state = model.state_dict()
                found += [shown(state), sorted(set(given))]
            other = api.blocks(net(seed=9) if make is net else make(), **options)
            with typed(api, other, kind):
                result = other.load_state_dict(state)
                found += [list(result), full(api, other)]
                if kind is FULL:
                    broken = {
                        **{k: v for k, v in state.items() if "weight" not in k},
                        "odd": torch.ones(1),
                    }
                    found.append([list(x) for x in other.load_state_dict(broken, strict=False)])
        with typed(api, model, FULL, FullStateDictConfig(rank0_only=True)):
            found.append(shown(model.state_dict()))
    model = net()
    partly = api.blocks(model, ignored_modules=[model[3]], **options)
    with typed(api, partly, FULL, FullStateDictConfig(rank0_only=True)):
        found.append(shown(partly.state_dict()))
    return found


@rows("12.14", "12.16")
def test_local(two: Pool) -> None:
    two.run(eager_same, local)


def local(api: Api) -> Any:
    model, other = api.blocks(), api.blocks(net(seed=9))
    with typed(api, model, LOCAL), typed(api, other, LOCAL):
        state = model.state_dict()
        found = [shown(state), list(other.load_state_dict(state))]
        missing = {k: v for k, v in state.items() if not k.startswith("1.")}
        plain_state = {k: torch.ones(3) for k in state}
        found += [
            outcome(lambda: other.load_state_dict(missing))[0],
            outcome(lambda: other.load_state_dict(plain_state))[0],
        ]
    found.append(full(api, other))
    meshed = api.blocks(device_mesh=mesh_of(2))
    with typed(api, meshed, LOCAL) if False else warned():
        found.append(outcome(lambda: quietly(api.FSDP.set_state_dict_type, meshed, LOCAL)))
    return found, outcome(lambda: list(meshed.state_dict()))


@rows("12.9", status="improved")
def test_offloaded(two: Pool) -> None:
    """Works where everything is on the CPU already; stock crashes there."""
    two.run(each, offloaded)


def offloaded(api: Api) -> None:
    for use_orig_params in (True, False):
        model = api.blocks(use_orig_params=use_orig_params)
        expected = model.state_dict()
        for kind, config in (
            (FULL, FullStateDictConfig(offload_to_cpu=True)),
            (SHARDED, ShardedStateDictConfig(offload_to_cpu=True)),
        ):
            with typed(api, model, kind, config):
                state = model.state_dict()
                assert list(state) == list(expected)
                if kind is FULL:
                    assert all(torch.equal(state[k], expected[k]) for k in expected)
        with typed(api, model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            assert bool(model.state_dict()) == (dist.get_rank() == 0)


@rows("12.18")
def test_with_a_mesh(two: Pool) -> None:
    two.run(eager_same, with_a_mesh)


def with_a_mesh(api: Api) -> Any:
    mesh = mesh_of(2)
    model, other = (api.blocks(net(seed=s), device_mesh=mesh, use_orig_params=True) for s in (7, 9))
    optimizer = adam(model)
    train_step(model)
    optimizer.step()
    with typed(api, model, SHARDED), typed(api, other, SHARDED):
        state = model.state_dict()
        other.load_state_dict(state)
        return shown(state), full(api, other), shown(api.FSDP.optim_state_dict(model, optimizer))


def trained(api: Any, seed: int = 7, *, compiles: bool = True, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer after two steps; one that only loads has them eagerly."""
    model = api.blocks(net(seed=seed), **options)
    call, optimizer = api.compile(model) if compiles else model, adam(model)
    for step in range(2):
        train_step(call, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@rows("13.1", "13.2", "13.4", "13.9", "13.12", "13.13", "13.14", "13.15")
def test_optimizer(two: Pool) -> None:
    two.run(optimizer_rows)


def optimizer_rows() -> None:
    same(optimizer_state, *STRATEGIES, kinds=("eager",))
    same(optimizer_state, STRATEGIES[0], kinds=("compiled",))


def optimizer_state(api: Api, *strategies: Any) -> Any:
    found: list[Any] = []
    fsdp = api.FSDP
    for strategy in strategies:
        model, optimizer = trained(api, sharding_strategy=strategy)
        other, loaded = trained(api, seed=9, compiles=False, sharding_strategy=strategy)
        for kind in (FULL, SHARDED):
            with typed(api, model, kind), typed(api, other, kind):
                state = fsdp.optim_state_dict(model, optimizer)
                found.append(shown(state))
                mine = fsdp.optim_state_dict_to_load(other, loaded, state)
                found.append(shown(mine))
                loaded.load_state_dict(mine)
                fsdp.optim_state_dict_to_load(
                    other, loaded, fsdp.optim_state_dict(model, optimizer), load_directly=True
                )
                found.append(
                    outcome(
                        lambda o=other, x=loaded: fsdp.optim_state_dict_to_load(
                            o, x, {"param_groups": []}
                        )
                    )[0]
                )
        with typed(
            api,
            model,
            FULL,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True),
        ):
            found.append(shown(fsdp.optim_state_dict(model, optimizer)))
        found += [train_step(other, 5), full(api, other)]
        with warned() as given:
            whole = fsdp.full_optim_state_dict(model, optimizer)
            found.append(shown(whole))
            found.append(shown(fsdp.sharded_optim_state_dict(model, optimizer)))
            found.append(
                shown(
                    fsdp.shard_full_optim_state_dict(
                        fsdp.full_optim_state_dict(model, optimizer, rank0_only=False),
                        other,
                        optim=loaded,
                    )
                )
            )
            found.append(
                shown(
                    fsdp.scatter_full_optim_state_dict(
                        whole if dist.get_rank() == 0 else None, other, optim=loaded
                    )
                )
            )
            found.append(
                shown(
                    fsdp.flatten_sharded_optim_state_dict(
                        fsdp.sharded_optim_state_dict(model, optimizer), other, loaded
                    )
                )
            )
            found.append(
                outcome(
                    lambda m=model, o=optimizer: fsdp.full_optim_state_dict(m, o, optim_input=[])
                )[0]
            )
            found.append(
                outcome(
                    lambda m=model, o=optimizer: fsdp.full_optim_state_dict(m, o, optim_input=[3])
                )[0]
            )
        found.append(sorted(set(given)))
    return found


@rows("13.2", status="improved")
def test_optimizer_of_originals(two: Pool) -> None:
    """Each state has its own values; stock's FULL one of original parameters has the last state's
    for all on the CPU.
    """
    two.run(each, optimizer_of_originals)


def optimizer_of_originals(api: Api) -> None:
    model, optimizer = trained(api, use_orig_params=True)
    flat, reference = trained(api, compiles=False, use_orig_params=False)
    for kind in (FULL, SHARDED):
        with typed(api, model, kind), typed(api, flat, kind):
            ours, theirs = (
                api.FSDP.optim_state_dict(model, optimizer),
                api.FSDP.optim_state_dict(flat, reference),
            )
            a, b = shown(ours)["state"], shown(theirs)["state"]
            assert {k: sorted(v) for k, v in a.items()} == {k: sorted(v) for k, v in b.items()}
            for name in a:
                for key in ("exp_avg", "exp_avg_sq") if kind is FULL else ():
                    assert torch.equal(a[name][key], b[name][key]), (name, key)
            other, loaded = trained(api, seed=9, compiles=False, use_orig_params=True)
            with typed(api, other, kind):
                loaded.load_state_dict(api.FSDP.optim_state_dict_to_load(other, loaded, ours))
                again = api.FSDP.optim_state_dict(other, loaded)
                check_equal(shown(again)["state"], a, f"{kind} loaded and saved again")


@rows("13.6", "13.7", "13.8", "13.10")
def test_optimizer_errors(two: Pool) -> None:
    two.run(eager_same, optimizer_errors)


def optimizer_errors(api: Api) -> Any:
    fsdp = api.FSDP
    model, optimizer = trained(api)
    state = quietly(fsdp.optim_state_dict, model, optimizer)
    found = []
    name = "1.a.weight"
    for change in (
        {"exp_avg": torch.ones(2)},
        {"step": torch.tensor(9.0)},
        {"odd": torch.ones(7, 5)},
        {"exp_avg": torch.ones(7, 5).double()},
    ):
        broken = {**state, "state": {**state["state"], name: {**state["state"][name], **change}}}
        found.append(
            outcome(lambda b=broken: fsdp.optim_state_dict_to_load(model, optimizer, b))[0]
        )
    without = {
        **state,
        "state": {k: v for k, v in state["state"].items() if not k.startswith("1.")},
    }
    found.append(shown(fsdp.optim_state_dict_to_load(model, optimizer, without)))
    partial = {**state, "state": {k: v for k, v in state["state"].items() if k != name}}
    found.append(outcome(lambda: shown(fsdp.optim_state_dict_to_load(model, optimizer, partial))))
    odd = {**optimizer.state_dict()}
    odd["state"] = {**odd["state"], "mine": {"x": 1}}
    with warned() as given:
        found.append(outcome(lambda: list(fsdp.optim_state_dict(model, optimizer, odd)["state"])))
    mixed = nn.Sequential(
        api.wrap(nn.Linear(2, 2), use_orig_params=True), api.wrap(nn.Linear(2, 2))
    )
    found.append(outcome(lambda: fsdp.optim_state_dict(mixed, adam(mixed)))[0])
    if dist.get_rank() == 1:
        optimizer.state.clear()
    found.append(outcome(lambda: fsdp.optim_state_dict(model, optimizer))[0])
    return found, sorted(set(given))


@rows("13.16")
def test_rekey(two: Pool) -> None:
    two.run(eager_same, rekey)


def rekey(api: Api) -> Any:
    fsdp = api.FSDP
    model, optimizer = trained(api)
    named = quietly(fsdp.full_optim_state_dict, model, optimizer, rank0_only=False)
    local = net()
    plain_optimizer = adam(local)
    by_id = fsdp.rekey_optim_state_dict(
        named, OptimStateKeyType.PARAM_ID, local, optim=plain_optimizer
    )
    plain_optimizer.load_state_dict(by_id)
    back = fsdp.rekey_optim_state_dict(
        by_id, OptimStateKeyType.PARAM_NAME, local, optim=plain_optimizer
    )
    same_type = fsdp.rekey_optim_state_dict(
        by_id, OptimStateKeyType.PARAM_ID, local, optim=plain_optimizer
    )
    broken = {**by_id, "state": {**by_id["state"], "x": {}}}
    error = outcome(
        lambda: fsdp.rekey_optim_state_dict(
            broken, OptimStateKeyType.PARAM_ID, local, optim=plain_optimizer
        )
    )
    return shown(by_id), shown(back), same_type is by_id, error[0]


@rows("13.17")
def test_checkpoint_helpers(two: Pool) -> None:
    two.run(same, checkpoint_helpers)


def checkpoint_helpers(api: Api) -> Any:
    found: list[Any] = []
    for use_orig_params in (True, False):
        model, optimizer = trained(api, use_orig_params=use_orig_params)
        other, loaded = trained(api, seed=9, compiles=False, use_orig_params=use_orig_params)
        with warned() as given:
            for whole in (True, False):
                options = StateDictOptions(full_state_dict=whole)
                state, optim = (
                    get_model_state_dict(model, options=options),
                    get_optimizer_state_dict(model, optimizer, options=options),
                )
                found += [shown(state), shown(optim)]
                set_model_state_dict(other, state, options=options)
                set_optimizer_state_dict(other, loaded, optim, options=options)
                found += [
                    full(api, other),
                    shown(get_optimizer_state_dict(other, loaded, options=options)),
                ]
        found += [given, [train_step(other, 3), full(api, other)]]
    return found


@rows("12.17", "12.18", "12.19")
def test_checkpoints_cross_over(two: Pool) -> None:
    two.run(cross_over)


def cross_over() -> None:
    """Written by stock FSDP1, ours and `fully_shard`, read by each of them: the same parameters,
    optimizer state and next step.
    """
    mesh = mesh_of(2)

    def fsdp2(seed: int) -> Any:
        model = net(seed=seed)
        for block in (model[1], model[2]):
            compiled_fsdp.fully_shard(block, mesh=mesh)
        return compiled_fsdp.fully_shard(model, mesh=mesh)

    makers: dict[str, Any] = {"fsdp2": fsdp2}
    for api in (Api("stock"), Api("eager")):
        makers[api.kind] = lambda seed, api=api: api.blocks(
            net(seed=seed), device_mesh=mesh, use_orig_params=True
        )
    for writer, make in makers.items():
        model = make(7)
        optimizer = adam(model)
        train_step(model)
        optimizer.step()
        optimizer.zero_grad()
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        saved = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }
        dcp.save(saved, checkpoint_id=folder[0])
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        loss = train_step(model, 1)
        for reader, remake in makers.items():
            other = remake(9)
            fresh = adam(other)
            state = {
                "model": get_model_state_dict(other),
                "optim": get_optimizer_state_dict(other, fresh),
            }
            dcp.load(state, checkpoint_id=folder[0])
            set_model_state_dict(other, state["model"])
            set_optimizer_state_dict(other, fresh, state["optim"])
            found = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
            assert all(torch.equal(found[k], whole[k]) for k in whole), (writer, reader)
            torch.testing.assert_close(train_step(other, 1), loss, rtol=0, atol=0)
            state_of = get_optimizer_state_dict(
                other, fresh, options=StateDictOptions(full_state_dict=True)
            )["state"]
            expected = get_optimizer_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True)
            )["state"]
            for name in expected:
                assert torch.equal(state_of[name]["exp_avg_sq"], expected[name]["exp_avg_sq"]), (
                    writer,
                    reader,
                    name,
                )
