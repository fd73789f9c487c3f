"""State dicts: names, sharing, round trips, the helpers of torch.distributed.checkpoint, exchange
with stock FSDP2.
"""

from __future__ import annotations

import copy
import io
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.harness import Options, batch_of, build, make, mesh_of, shard
from kit.models import loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from pathlib import Path

    from kit.pool import Pool

FULL = StateDictOptions(full_state_dict=True)
OPTIONS = Options("tied")


def steps(model: Any, call: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(call(*batch_of(OPTIONS.model, number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fresh(kind: str, options: Options = OPTIONS) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model, call, _ = make(kind, options)
    return model, call, torch.optim.AdamW(model.parameters(), lr=0.02)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Same names in the same order, same kind of tensor, same local bits."""
    if list(a) != list(b):
        return False
    for name, x in a.items():
        y = b[name]
        if isinstance(x, DTensor) != isinstance(y, DTensor):
            return False
        if isinstance(x, DTensor):
            if x.placements != y.placements or x.shape != y.shape:
                return False
            x, y = x.to_local(), y.to_local()
        if not torch.equal(x, y):
            return False
    return True


# -- one model


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_state_dict(two: Pool, kind: str) -> None:
    two.run(plain_state_dict, kind)


def plain_state_dict(kind: str) -> None:
    names = list(build(OPTIONS.model).state_dict())
    model, call, optimizer = fresh(kind)
    state = model.state_dict()
    assert list(state) == names
    assert all(isinstance(v, DTensor) and not v.requires_grad for v in state.values())
    before = {name: v.to_local().clone() for name, v in state.items()}
    steps(model, call, optimizer, range(2))
    # It aliases the live shards, before and after.
    for name, v in state.items():
        assert torch.equal(v.to_local(), model.get_parameter(name).to_local())
        assert not torch.equal(v.to_local(), before[name])
    # Dynamo's wrapper prefixes the names; the checkpoint helper takes it off.
    if kind == "compiled":
        assert list(call.state_dict()) == [f"_orig_mod.{name}" for name in names]
    canonical = get_model_state_dict(call)
    assert list(canonical) == names
    assert equal(dict(canonical), dict(state))


def copied_and_saved() -> None:
    """Parameters lie at offsets of a flat buffer, which torch must not take for addresses."""
    model, call, optimizer = fresh("eager")
    steps(model, call, optimizer, range(1))
    state = model.state_dict()
    assert all(
        state[name].to_local().data_ptr() == p.to_local().data_ptr()
        for name, p in model.named_parameters()
    )
    copied = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert equal(dict(state), dict(copied))
    assert equal(dict(state), dict(saved))
    before = {name: v.to_local().clone() for name, v in copied.items()}
    steps(model, call, optimizer, range(1))
    assert all(torch.equal(v.to_local(), before[name]) for name, v in copied.items())
    for other in (copied, saved):
        model.load_state_dict(other)
        assert equal(dict(model.state_dict()), dict(copied))
    model.load_state_dict(copy.deepcopy(copied), assign=True)
    assert all(math.isfinite(loss) for loss in steps(model, call, optimizer, range(1)))


def tied_saved_once() -> None:
    """As in a plain module, also where the weight is not the first of its buffer."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    fully_shard(model, mesh=mesh_of("1d"))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = [v.to_local() for v in torch.load(file, weights_only=False).values()]
    assert len(loaded) == 4
    assert len({v.untyped_storage().data_ptr() for v in loaded}) == 3
    with torch.no_grad():
        loaded[-1].add_(1)
    assert torch.equal(loaded[-1], loaded[-2])


def test_tied_weights_are_saved_once(two: Pool) -> None:
    two.run(tied_saved_once)


def modules_copied(apply: Any) -> None:
    """Modules that hold parameters of a unit around them, and are no unit: copied with DTensors of
    their own.
    """
    model = shard(build("odd"), Options("odd"), apply)
    for move in (lambda: model.float(), lambda: model.double().float()):
        move()
        plain = [m for m in model.modules() if m._parameters and not isinstance(m, StockFSDPModule)]
        assert plain
        for module in plain:
            before = {name: value.to_local().clone() for name, value in module.state_dict().items()}
            other = copy.deepcopy(module)
            assert type(other) in type(module).__mro__
            assert equal(dict(other.state_dict()), dict(module.state_dict()))
            assert all(
                isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in other.parameters()
            )
            with torch.no_grad():
                other.weight.add_(1.0)
            assert all(
                torch.equal(value.to_local(), before[name])
                for name, value in module.state_dict().items()
            )


@pytest.mark.parametrize("apply", [stock_fully_shard, fully_shard])
def test_modules_inside_a_unit_are_copied(two: Pool, apply: Any) -> None:
    two.run(modules_copied, apply)


def test_state_dict_is_copied_and_saved(two: Pool) -> None:
    two.run(copied_and_saved)


def test_state_dict_while_unsharded(two: Pool) -> None:
    two.run(while_unsharded)


def while_unsharded() -> None:
    """Between forward and backward, and after `unshard`: the sharded tensors all the same, and
    backward still works.
    """
    grads = []
    for apply in (stock_fully_shard, fully_shard):
        model = shard(build("odd"), Options("odd", reshard=False), apply)
        loss = loss_of(model(*batch_of("odd", 0)))
        state = model.state_dict()
        assert all(isinstance(v, DTensor) for v in state.values()), {
            n: type(v).__name__ for n, v in state.items()
        }
        loss.backward()
        grads.append({name: p.grad.to_local().clone() for name, p in model.named_parameters()})
        model.unshard()
        assert all(isinstance(v, DTensor) for v in model.state_dict().values())
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_load_state_dict(two: Pool, kind: str) -> None:
    two.run(load_round_trip, kind)


def load_round_trip(kind: str) -> None:
    model, call, optimizer = fresh(kind)
    objects = list(model.parameters())
    state = {name: v.clone() for name, v in model.state_dict().items()}
    optimizer_state = optimizer.state_dict()
    first = steps(model, call, optimizer, range(3))
    kept = {name: v.clone() for name, v in model.state_dict().items()}
    result = model.load_state_dict(state)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
    optimizer.load_state_dict(optimizer_state)
    assert steps(model, call, optimizer, range(3)) == first, (
        "the loaded values are those that are computed with"
    )
    assert equal(dict(model.state_dict()), kept)


def test_load_state_dict_assign(two: Pool) -> None:
    two.run(load_assign)


def load_assign() -> None:
    """`assign=True` replaces the parameters; the new ones are what is trained from then on."""
    losses = []
    for kind in ("stock", "eager", "compiled"):
        model, call, optimizer = fresh(kind)
        steps(model, call, optimizer, range(2))
        trained = {name: v.clone() for name, v in model.state_dict().items()}
        other, call, _ = fresh(kind)
        other.load_state_dict(trained, assign=True)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.02)
        losses.append(steps(other, call, optimizer, range(2, 5)))
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


# -- full state dicts


def test_full_state_dict(two: Pool) -> None:
    two.run(full_state)


def full_state() -> None:
    whole = build(OPTIONS.model)
    model, _, _ = fresh("eager")
    state = get_model_state_dict(model, options=FULL)
    for name, v in whole.state_dict().items():
        assert type(state[name]) is torch.Tensor
        assert torch.equal(state[name], v), name
    offloaded = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(offloaded) == (torch.distributed.get_rank() == 0)


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_set_full_state_dict(two: Pool, kind: str, broadcast: bool) -> None:
    two.run(set_full, kind, broadcast)


def set_full(kind: str, broadcast: bool) -> None:
    torch.manual_seed(99)
    source = type(build(OPTIONS.model))()
    with torch.no_grad():
        for p in source.parameters():
            torch.distributed.broadcast(p, 0)
    full = {name: v.clone() for name, v in source.state_dict().items()}
    expected = loss_of(source(*batch_of(OPTIONS.model, 0))).item()
    _, call, _ = fresh(kind)
    if broadcast and torch.distributed.get_rank():
        full = {}
    set_model_state_dict(
        call, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    )
    assert loss_of(call(*batch_of(OPTIONS.model, 0))).item() == expected


def test_set_full_state_dict_on_a_meta_model(two: Pool) -> None:
    two.run(set_full_meta)


def set_full_meta() -> None:
    """The usual way to load what does not fit into one process: meta, shard, load (assigned) or
    `to_empty` and load.
    """
    source = build("odd")
    expected = loss_of(source(*batch_of("odd", 0))).item()
    for way in ("assign", "to_empty"):
        for compiled in (False, True):
            with torch.device("meta"):
                model = build("odd")
            shard(model, Options("odd"), fully_shard)
            if way == "to_empty":
                model.to_empty(device="cpu")
            full = {name: v.clone() for name, v in source.state_dict().items()}
            set_model_state_dict(model, full, options=FULL)
            call = (
                torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
                if compiled
                else model
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = loss_of(call(*batch_of("odd", 0)))
            assert loss.item() == expected, way
            loss.backward()
            optimizer.step()
            assert loss_of(call(*batch_of("odd", 0))).item() < expected, way


# -- optimizers


def test_optimizer_state_dict(two: Pool) -> None:
    two.run(optimizer_state)


def optimizer_state() -> None:
    model, call, optimizer = fresh("compiled")
    steps(model, call, optimizer, range(2))
    sharded = get_optimizer_state_dict(model, optimizer)
    assert set(sharded["state"]) == {name for name, _ in model.named_parameters()}
    assert all(isinstance(s["exp_avg"], DTensor) for s in sharded["state"].values())
    through_wrapper = get_optimizer_state_dict(call, optimizer)
    assert set(through_wrapper["state"]) == set(sharded["state"])
    full = copy.deepcopy(
        get_optimizer_state_dict(model, optimizer, options=FULL)
    )  # `step` is the optimizer's own tensor
    for name, p in model.named_parameters():
        assert full["state"][name]["exp_avg"].shape == p.shape
        assert torch.equal(
            full["state"][name]["exp_avg"], sharded["state"][name]["exp_avg"].full_tensor()
        )
    # A full state goes back into a fresh optimizer, and training goes on as if nothing had
    # happened.
    weights = get_model_state_dict(model, options=FULL)
    expected = steps(model, call, optimizer, range(2, 4))
    other, call, optimizer = fresh("compiled")
    set_model_state_dict(other, weights, options=FULL)
    set_optimizer_state_dict(other, optimizer, full, options=FULL)
    assert steps(other, call, optimizer, range(2, 4)) == expected


def test_optimizer_state_before_the_first_step(two: Pool) -> None:
    two.run(empty_optimizer_state)


def empty_optimizer_state() -> None:
    """The helper makes a step with zero gradients to fill the state, and leaves no gradients and
    the same weights.
    """
    model, _, optimizer = fresh("eager")
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == set(before)
    for name, p in model.named_parameters():
        assert p.grad is None
        assert torch.equal(p.to_local(), before[name])


# -- checkpoints on disk


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("eager", "compiled"), ("compiled", "eager"), ("stock", "compiled"), ("compiled", "stock")],
)
def test_checkpoint_continues_bit_for_bit(
    two: Pool, tmp_path: Path, saver: str, loader: str
) -> None:
    two.run(checkpoint, str(tmp_path / "step"), saver, loader)


def checkpoint(path: str, saver: str, loader: str) -> None:
    model, call, optimizer = fresh(saver)
    steps(model, call, optimizer, range(2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    expected = steps(model, call, optimizer, range(2, 5))

    model, call, optimizer = fresh(loader)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert steps(model, call, optimizer, range(2, 5)) == expected


def test_checkpoint_of_two_ranks_loads_into_hsdp_of_four(
    two: Pool, four: Pool, tmp_path: Path
) -> None:
    full = two.run(save_weights, str(tmp_path / "weights"))[0]
    for loaded in four.run(load_weights, str(tmp_path / "weights")):
        assert all(torch.equal(full[name], loaded[name]) for name in full)


def save_weights(path: str) -> dict[str, Any]:
    model, call, optimizer = fresh("compiled")
    steps(model, call, optimizer, range(2))
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    return get_model_state_dict(model, options=FULL)


def load_weights(path: str) -> dict[str, Any]:
    model, call, _ = fresh("compiled", Options(OPTIONS.model, mesh="hsdp"))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    loss_of(call(*batch_of(OPTIONS.model, 0))).backward()
    return get_model_state_dict(model, options=FULL)
