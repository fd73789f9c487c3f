"""A part of an optimizer's step, on the local tensors of DTensors, is what the optimizer's own step
does to the DTensors: values, what it remembers, in which form, and what autograd is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp.frontend import parts

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.01)}),
    (optim.Adamax, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "maximize": True}),
    (optim.ASGD, {}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
]
# Torch, at 2.13, has no rule for what these do to DTensors.
LOCAL_ALONE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adagrad, {"fused": True}),
    (optim.Rprop, {}),
    (optim.Rprop, {"foreach": True}),
    (optim.SGD, {"fused": True, "momentum": 0.9}),
]
pytestmark = pytest.mark.usefixtures("fake_world")
NAMES = [f"{kind.__name__}{sorted(options)}" for kind, options in KINDS]


def params() -> list[nn.Parameter]:
    """Of one rank of 2, which has nothing of one of them; the last gets no gradient."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    shapes = [((8, 3), (4, 3)), ((5,), (3,)), ((1, 7), (0, 7)), ((2, 1), (1, 1))]
    return [
        nn.Parameter(
            DTensor.from_local(torch.randn(own), mesh, [Shard(0)], shape=shape, stride=stride)
        )
        for shape, own in shapes
        for stride in [torch.empty(shape).stride()]
    ]


def give_grads(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params[:-1]:
        like: Any = param
        local = torch.randn(like.to_local().shape)
        param.grad = DTensor.from_local(
            local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )


def is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def shown(optimizer: optim.Optimizer, params: list[nn.Parameter]) -> Iterator[Any]:
    """Everything that can be told apart."""
    for param in params:
        yield "", param.shape, param.placements, param.to_local()
        for name, value in sorted(optimizer.state.get(param, {}).items()):
            if isinstance(value, DTensor):
                yield name, value.shape, value.stride(), value.placements, value.to_local()
            else:
                yield name, type(value), value


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=NAMES)
def test_as_on_dtensors(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    own, theirs = params(), params()
    part, whole = (kind(given, **options) for given in (own, theirs))  # type: ignore[call-arg]
    for step in range(3):
        versions = [p._version for p in (*own, *theirs)]
        for given in (own, theirs):
            give_grads(given, step)
        parts.step_part(part, kind, {id(p) for p in own[:2]})
        parts.step_part(part, kind, {id(p) for p in own[2:]})
        whole.step()
        for ours, stocks in zip(shown(part, own), shown(whole, theirs), strict=True):
            assert ours[:-1] == stocks[:-1]
            assert is_same(ours[-1], stocks[-1]), ours[0]
        written = [p._version > v for p, v in zip((*own, *theirs), versions, strict=True)]
        assert written[: len(own)] == written[len(own) :]


@pytest.mark.parametrize(("kind", "options"), LOCAL_ALONE)
def test_as_on_plain_tensors(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    """Steps that a loop over DTensors cannot take: each element is stepped by itself."""
    own = params()
    shards: Any = own
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in shards]
    part, whole = (kind(given, **options) for given in (own, plain))  # type: ignore[call-arg]
    for step in range(4):
        give_grads(own, step)
        for mine, theirs in zip(shards[:-1], plain, strict=False):
            theirs.grad = mine.grad.to_local()
        parts.step_part(part, kind, {id(p) for p in own})
        whole.step()
        for mine, theirs in zip(shards, plain, strict=True):
            assert torch.equal(mine.to_local(), theirs)


def test_no_dtensor_is_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what it is for: once there is state, no operation runs on DTensors."""
    own = params()
    optimizer = optim.AdamW(own, fused=True)
    give_grads(own, 0)
    monkeypatch.setattr(DTensor, "_op_dispatcher", None)
    parts.step_part(optimizer, optim.AdamW, {id(p) for p in own})
    assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in own[:-1])


def test_what_autograd_is_to_see_is_torchs_own() -> None:
    """`differentiable=True`: the step of the parameters themselves, with what torch says of it."""
    own = params()
    optimizer = optim.SGD(own, differentiable=True)
    give_grads(own, 0)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        parts.step_part(optimizer, optim.SGD, {id(p) for p in own})
