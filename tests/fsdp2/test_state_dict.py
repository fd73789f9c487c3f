"""State dicts beyond the rows of the table: copied, saved, exchanged with stock FSDP2 by way of a
disk.
"""

from __future__ import annotations

import copy
import io
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.compare import check_equal, plain
from kit.harness import Options, batch_of, build, make, mesh_of, shard, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from pathlib import Path

    from kit.pool import Pool

OPTIONS = Options("tied")


def batches(start: int, stop: int) -> list[Any]:
    return [batch_of(OPTIONS.model, number) for number in range(start, stop)]


def fresh(kind: str, options: Options = OPTIONS) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model, call, _ = make(kind, options)
    return model, call, torch.optim.AdamW(model.parameters(), lr=0.02)


def copied_and_saved() -> None:
    """Parameters lie at offsets of a flat buffer, which torch must not take for addresses."""
    model, call, optimizer = fresh("eager")
    train(call, optimizer, batches(0, 1))
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
    check_equal(plain(copied), plain(state), "copied")
    check_equal(plain(saved), plain(state), "saved")
    before = {name: v.to_local().clone() for name, v in copied.items()}
    train(call, optimizer, batches(0, 1))
    assert all(torch.equal(v.to_local(), before[name]) for name, v in copied.items())
    for other in (copied, saved):
        model.load_state_dict(other)
        check_equal(plain(model.state_dict()), plain(copied), "loaded")
    model.load_state_dict(copy.deepcopy(copied), assign=True)
    assert all(math.isfinite(loss) for loss in train(call, optimizer, batches(0, 1)))


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


def as_stock_gives_it(apply: Any) -> list[tuple[str, type, torch.dtype, bool]]:
    """Of weights of one row, which one rank has and the other has not: two are tied, another is of
    the same shape; and of a frozen one that is asked for itself.
    """
    model = nn.Sequential(*(nn.Linear(6, 1, bias=False) for _ in range(3)), nn.Linear(6, 4))
    model[2].to(torch.bfloat16)
    model[3].requires_grad_(requires_grad=False)
    if apply is fully_shard:  # torch's refuses no tie, and forgets it
        model[1].weight = model[0].weight
    for layer in (model[2], model[3], model):
        apply(layer, mesh=mesh_of("1d"))
    values = {**model.state_dict(), **model.state_dict(prefix="kept.", keep_vars=True)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [
        (name, type(value), value.dtype, value is parameters.get(name.removeprefix("kept.")))
        for name, value in values.items()
    ]


def compare_state_dicts() -> None:
    assert as_stock_gives_it(fully_shard) == as_stock_gives_it(stock_fully_shard)


def test_values_of_a_state_dict(two: Pool) -> None:
    two.run(compare_state_dicts)


def modules_copied(apply: Any) -> None:
    """Modules that hold parameters of a unit around them, and are no unit: copied with DTensors of
    their own.
    """
    model = shard(build("odd"), Options("odd"), apply)
    for move in (lambda: model.float(), lambda: model.double().float()):
        move()
        inside = [
            m for m in model.modules() if m._parameters and not isinstance(m, StockFSDPModule)
        ]
        assert inside
        for module in inside:
            before = {name: value.to_local().clone() for name, value in module.state_dict().items()}
            other = copy.deepcopy(module)
            assert type(other) in type(module).__mro__
            check_equal(plain(other.state_dict()), plain(module.state_dict()), "copied")
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


def params_copied_and_saved() -> None:
    """Parameters themselves, their gradients, and an optimizer, which holds both."""
    model, call, optimizer = fresh("eager")
    train(call, optimizer, batches(0, 1))
    call(*batches(1, 2)[0]).backward()
    params: list[Any] = list(model.parameters())
    params[-1].note = ["kept"]
    file = io.BytesIO()
    torch.save([params, [p.grad for p in params], params[-1]], file)
    assert len(file.getvalue()) < 3 * sum(p.to_local().nbytes for p in params) + 4096 * len(params)
    file.seek(0)
    saved, grads, last = torch.load(file, weights_only=False)
    assert last is saved[-1]
    together, again = copy.deepcopy([params, params[-1]])
    assert again is together[-1]
    assert again.note == ["kept"]
    assert again.note is not params[-1].note
    stepped = copy.deepcopy(optimizer).param_groups[0]["params"]
    for p, s, g, t, o in zip(params, saved, grads, together, stepped, strict=True):
        assert all(isinstance(x, nn.Parameter) and x.requires_grad for x in (s, t, o))
        for found, wanted in ((s, p), (t, p), (o, p), (g, p.grad), (t.grad, p.grad)):
            assert found.to_local().data_ptr() != wanted.to_local().data_ptr()
            assert torch.equal(found.to_local(), wanted.to_local())


def test_parameters_are_copied_and_saved(two: Pool) -> None:
    two.run(params_copied_and_saved)


def test_state_dict_is_copied_and_saved(two: Pool) -> None:
    two.run(copied_and_saved)


def test_a_tied_model_assigned(two: Pool) -> None:
    two.run(assigned)


def assigned() -> None:
    """`assign=True` replaces the parameters, tied ones together; the new ones are what is trained
    from then on.
    """
    losses = []
    for kind in ("stock", "eager", "compiled"):
        model, call, optimizer = fresh(kind)
        train(call, optimizer, batches(0, 2))
        trained = {name: v.clone() for name, v in model.state_dict().items()}
        other, call, _ = fresh(kind)
        other.load_state_dict(trained, assign=True)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.02)
        losses.append(train(call, optimizer, batches(2, 5)))
    assert losses[0] == losses[1] == losses[2]


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
    train(call, optimizer, batches(0, 2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    expected = train(call, optimizer, batches(2, 5))

    model, call, optimizer = fresh(loader)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert train(call, optimizer, batches(2, 5)) == expected


class Normed(nn.Sequential):
    """A norm and a layer, whose parameters share a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        super().__init__(nn.LayerNorm(4), nn.Linear(4, 4))
        for p in self.parameters():
            nn.init.normal_(p)
        self.to(dtype)


def dtypes_and_values(model: nn.Module) -> list[Any]:
    return plain([(p.dtype, p) for p in model.parameters()])  # type: ignore[no-any-return]


def cast_in_part(apply: Any) -> Any:
    """A state dict of another dtype, which comes to the last parameter of a buffer first; one of
    two dtypes; a norm that is cast alone.
    """
    sources = [Normed(torch.float32), Normed(torch.float32)]
    models = [Normed(torch.bfloat16), Normed(torch.bfloat16)]
    for model in (sources[0], models[0]):
        apply([model[1], model[0]])
    for model in (sources[1], models[1]):
        apply(model)
    models[0].load_state_dict(sources[0].state_dict(), assign=True)
    state = sources[1].state_dict()
    state = {name: v.bfloat16() if name.startswith("0") else v for name, v in state.items()}
    models[1].load_state_dict(state, assign=True)
    model = apply(Normed(torch.bfloat16))
    model[0].float()
    return [dtypes_and_values(m) for m in (*models, model)], models[1], model


def compare_cast_in_part() -> None:
    found, *mixed = cast_in_part(fully_shard)
    check_equal(found, cast_in_part(stock_fully_shard)[0], "as stock")
    for model in mixed:
        with pytest.raises(TypeError, match=r"several now .*0\.weight, 0\.bias .*1\.weight"):
            model(torch.ones(2, 4))
        with pytest.raises(TypeError, match="several now"):
            model.unshard()
        model.float()
        model(torch.ones(2, 4)).sum().backward()


def test_parameters_of_a_buffer_that_are_cast_in_part(two: Pool) -> None:
    two.run(compare_cast_in_part)
