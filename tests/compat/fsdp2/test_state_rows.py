"""Chapter 14 of the specification: state dicts, and the helpers of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from kit.compare import plain
from kit.oracle import (
    Api,
    batch,
    communications,
    each,
    grads,
    is_sharded,
    mesh_of,
    message,
    net,
    params,
    raised,
    rows,
    same,
    train_step,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from kit.pool import Pool

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def model_of(api: Api, seed: int = 7, **kwargs: Any) -> Any:
    """Two units, a buffer, and an ignored parameter."""
    model = net(seed=seed)
    model.register_buffer("scale", torch.tensor(float(seed)))
    return api.units(model, "0", ignored_params={model[4].bias}, **kwargs)


def full_state(seed: int = 11) -> dict[str, torch.Tensor]:
    """Plain tensors, the same on every rank, for `model_of`."""
    model = net(seed=seed)
    model.register_buffer("scale", torch.tensor(float(seed)))
    return model.state_dict()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def stepped(
    api: Api, model: Any, steps: int = 2
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Losses of some steps, and their optimizer."""
    call, optimizer, losses = api.compile(model), adam(model), []
    for step in range(steps):
        losses.append(train_step(call, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer


# -- torch.nn.Module


@rows("14.1", "14.9")
def test_state_dict(two: Pool) -> None:
    two.run(same, state_dict)


def state_dict(api: Api) -> Any:
    model, found = model_of(api), {}
    counts = communications(lambda: found.update(model.state_dict()))
    kinds = [
        (isinstance(v, DTensor), isinstance(v, nn.Parameter), v.requires_grad)
        for v in found.values()
    ]
    before = plain(found)
    stepped(api, model)
    named = dict(model.named_parameters())
    aliases = [
        torch.equal(plain(v)["local"], plain(named[n])["local"])
        for n, v in found.items()
        if isinstance(v, DTensor)
    ]
    return counts, kinds, before, found, aliases


@rows("14.2")
def test_state_dict_while_unsharded(two: Pool) -> None:
    two.run(same, while_unsharded)


def while_unsharded(api: Api) -> Any:
    model = model_of(api)
    call = api.compile(model)
    train_step(call)
    model.zero_grad()
    model.unshard()
    model[0].unshard()
    states, sharded = [model.state_dict()], [is_sharded(model)]
    loss = call(batch(step=1)).square().mean()
    states.append(model.state_dict())
    sharded.append(is_sharded(model))
    loss.backward()
    return plain(states), sharded, loss, grads(model)


@rows("14.2")
def test_state_dict_of_a_submodule(two: Pool) -> None:
    two.run(same, of_a_submodule)


def of_a_submodule(api: Api) -> Any:
    model = model_of(api)
    train_step(api.compile(model))
    model.unshard()
    model[0].unshard()
    state = plain(model[2].state_dict())
    return state, is_sharded(model)


@rows("14.5", "14.9")
def test_load_dtensors(two: Pool) -> None:
    two.run(same, load_dtensors)


def load_dtensors(api: Api) -> Any:
    model, other = model_of(api), model_of(api, seed=9)
    objects, call = list(model.parameters()), api.compile(model)
    kept = model.state_dict()
    saved = {n: v.clone() for n, v in kept.items()}
    first = train_step(call)
    model.unshard()
    result = model.load_state_dict(other.state_dict())
    found = [str(result), is_sharded(model), train_step(call), plain(params(model)), plain(kept)]
    model.load_state_dict(saved)
    is_kept = [a is b for a, b in zip(objects, model.parameters(), strict=True)]
    return found, is_kept, first, train_step(call), grads(model)


@rows("14.6")
def test_load_plain_tensors(two: Pool) -> None:
    two.run(same, load_plain)


def load_plain(api: Api) -> Any:
    model = model_of(api)
    text = message(lambda: model.load_state_dict(full_state()))
    mixed = "mixed torch.Tensor and DTensor" in text, "0.weight" in text, "4.bias" in text
    return raised(lambda: model.load_state_dict(full_state())), mixed, plain(params(model))


@rows("14.7")
def test_load_assign(two: Pool) -> None:
    two.run(same, load_assign)


def load_assign(api: Api) -> Any:
    source, model = model_of(api, seed=9), model_of(api)
    stepped(api, source)
    trained = {n: v.clone() for n, v in source.state_dict().items()}
    old = dict(model.named_parameters())
    model.load_state_dict(trained, assign=True)
    is_kept = [p is old[n] for n, p in model.named_parameters()]
    loaded = plain(params(model))
    losses, _ = stepped(api, model, 3)
    return is_kept, loaded, losses, params(model), is_sharded(model), model.state_dict()


@rows("14.7")
def test_load_assign_onto_meta(two: Pool) -> None:
    two.run(same, load_assign_onto_meta)


def load_assign_onto_meta(api: Api) -> Any:
    source = api.units(net(seed=9), "0")
    with torch.device("meta"):
        model = net()
    api.units(model, "0")
    model.load_state_dict({n: v.clone() for n, v in source.state_dict().items()}, assign=True)
    return stepped(api, model)[0], params(model)


@rows("14.7")
def test_load_assign_of_plain_tensors(two: Pool) -> None:
    two.run(same, load_assign_plain)


def load_assign_plain(api: Api) -> Any:
    return (
        raised(lambda: api.units(net(), "0").load_state_dict(net().state_dict(), assign=True))
        is not None
    )


@rows("14.7", status="improved")
def test_load_assign_of_plain_tensors_says_why(two: Pool) -> None:
    """Names the parameter and what to call; stock fails with an AttributeError on
    `_local_tensor`.
    """
    two.run(each, load_assign_says_why)


def load_assign_says_why(api: Api) -> None:
    ours, theirs = (
        message(
            lambda one=one: one.units(net(), "0").load_state_dict(net().state_dict(), assign=True)
        )
        for one in (api, Api("stock"))
    )
    assert "0.weight" in ours
    assert "distribute_tensor" in ours
    assert "_local_tensor" in theirs


@rows("14.9")
def test_early_dict_is_loaded_back(two: Pool) -> None:
    two.run(same, early_dict)


def early_dict(api: Api) -> Any:
    model = model_of(api)
    early = model.state_dict()
    model.load_state_dict({n: v.clone() for n, v in early.items()})
    stepped(api, model)
    model.load_state_dict(early)
    model.load_state_dict(early, assign=True)
    return plain(early), train_step(api.compile(model)), params(model)


# -- torch.distributed.checkpoint.state_dict, models


@rows("14.10", "14.11", "14.12")
def test_get_model_state_dict(two: Pool) -> None:
    two.run(same, get_model)


def get_model(api: Api) -> Any:
    model = model_of(api)
    call = api.compile(model)
    train_step(call)
    options = [
        None,
        FULL,
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ]
    states = [get_model_state_dict(m, options=o) for o in options for m in (model, call)]
    alias = states[0]["0.weight"].to_local().data_ptr() == model[0].weight.to_local().data_ptr()
    return states, alias, [[type(v).__name__ for v in state.values()] for state in states]


@rows("14.14", "14.15")
def test_set_model_state_dict(two: Pool) -> None:
    two.run(same, set_model)


def set_model(api: Api) -> Any:
    found = []
    for options in (FULL, FROM_RANK_0):
        model = model_of(api)
        call, objects = api.compile(model), list(model.parameters())
        train_step(call)
        # With FULL each rank distributes tensors of its own; otherwise only the first one's count.
        state = full_state(11 + (dist.get_rank() if options is FULL else 0))
        if options is FROM_RANK_0 and dist.get_rank():
            state = {}
        result = set_model_state_dict(call, state, options=options)
        is_kept = [a is b for a, b in zip(objects, model.parameters(), strict=True)]
        loaded = plain(params(model)), model.scale.clone()
        found.append((str(result), is_kept, loaded, train_step(call), is_sharded(model)))
    return found


@rows("14.14", "14.15")
def test_set_model_state_dict_hsdp(four: Pool) -> None:
    four.run(same, set_model_hsdp)


def set_model_hsdp(api: Api) -> Any:
    found = []
    for mesh in (mesh_of(2, 2, names=("r", "s")), mesh_of(4)):
        for options in (FULL, FROM_RANK_0):
            model = model_of(api, mesh=mesh)
            set_model_state_dict(
                model,
                full_state() if options is FULL or not dist.get_rank() else {},
                options=options,
            )
            found.append((plain(params(model)), get_model_state_dict(model, options=FULL)))
    return found


@rows("14.16")
def test_set_meta_model(two: Pool) -> None:
    two.run(same, set_meta)


def set_meta(api: Api) -> Any:
    found = []
    for options in (FULL, FROM_RANK_0):
        with torch.device("meta"):
            model = net(depth=3)
        api.units(model, "0", "2")
        state = net(depth=3, seed=3).state_dict()
        set_model_state_dict(
            model, state if options is FULL or not dist.get_rank() else {}, options=options
        )
        losses, _ = stepped(api, model)
        found.append((losses, plain(params(model)), is_sharded(model)))
    return found


@rows("14.17")
def test_errors(two: Pool) -> None:
    two.run(same, errors)


def errors(api: Api) -> Any:
    model = model_of(api)
    short, long = full_state(), full_state()
    del short["2.bias"]
    long["other"] = torch.ones(1)
    lax = StateDictOptions(full_state_dict=True, strict=False)
    only_broadcast = (
        raised(lambda: StateDictOptions(broadcast_from_rank0=True)),
        raised(
            lambda: set_model_state_dict(
                model, full_state(), options=StateDictOptions(broadcast_from_rank0=True)
            )
        ),
    )
    return (
        [
            raised(lambda s=s: set_model_state_dict(model, s, options=FULL))
            for s in (short, long, {})
        ],
        [str(set_model_state_dict(model, dict(s), options=lax)) for s in (short, long)],
        only_broadcast,
        raised(lambda: model.load_state_dict({})),
        str(model.load_state_dict({}, strict=False)),
    )


# -- torch.distributed.checkpoint.state_dict, optimizers


@rows("14.18")
def test_get_optimizer_state_dict(two: Pool) -> None:
    two.run(same, get_optimizer)


def get_optimizer(api: Api) -> Any:
    model = api.units(net(), "0")
    fresh = plain(get_optimizer_state_dict(model, adam(model)))
    no_grads = [p.grad for p in model.parameters()]
    _, optimizer = stepped(api, model)
    states = [get_optimizer_state_dict(model, optimizer, options=o) for o in (None, FULL)]
    kinds = [
        [type(v).__name__ for entry in state["state"].values() for v in entry.values()]
        for state in states
    ]
    return fresh, no_grads, states, kinds, params(model)


@rows("14.19")
def test_set_optimizer_state_dict(two: Pool) -> None:
    two.run(same, set_optimizer)


def set_optimizer(api: Api) -> Any:
    source, found = api.units(net(), "0"), []
    _, optimizer = stepped(api, source)
    for options, got in ((None, None), (FULL, FULL), (FROM_RANK_0, FULL)):
        state = get_optimizer_state_dict(source, optimizer, options=got)
        model = api.units(net(), "0")
        model.load_state_dict(source.state_dict())
        other = adam(model)
        set_optimizer_state_dict(model, other, state, options=options)
        train_step(model if options is FULL else api.compile(model))
        other.step()
        found.append(plain(params(model)))
    missing = get_optimizer_state_dict(source, optimizer, options=FULL)
    del missing["state"]["2.bias"]
    model = api.units(net(), "0")
    return found, raised(
        lambda: set_optimizer_state_dict(model, adam(model), missing, options=FULL)
    )


@rows("14.20")
def test_frozen_parameters(two: Pool) -> None:
    two.run(same, frozen)


def frozen(api: Api) -> Any:
    model = net()
    model[2].weight.requires_grad_(False)
    api.units(model, "0")
    _, optimizer = stepped(api, model)
    drop = StateDictOptions(ignore_frozen_params=True)
    states = get_model_state_dict(model, options=drop), get_model_state_dict(model)
    other = api.units(net(seed=9), "0")
    other[2].weight.requires_grad_(False)
    strict = raised(lambda: set_model_state_dict(other, dict(states[0]), options=drop))
    lax = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(other, dict(states[0]), options=lax)
    return (
        states,
        strict,
        list(get_optimizer_state_dict(model, optimizer, options=drop)["state"]),
        params(other),
    )
