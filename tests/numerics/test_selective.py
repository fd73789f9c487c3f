"""Selective activation checkpoints around units: what a policy keeps is the program's, whatever ops
our runtime calls meanwhile, and however often.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import CLOSE, check_equal, whole
from kit.oracle import BACKENDS
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from compiled_fsdp import fully_shard
from compiled_fsdp.torch_private.selective import SELECTIVE, unselected

if TYPE_CHECKING:
    from kit.pool import Pool

aten = torch.ops.aten
WIDTH = 8
# Ops that are kept; of the last, all but these.
KEPT: dict[str, tuple[Any, ...]] = {
    "mul": (aten.mul.Tensor,),
    "sum": (aten.sum.default, aten.sum.dim_IntList),
    "slice": (aten.slice.Tensor,),
    "copies": (aten._to_copy.default, aten.clone.default, aten.copy_.default),
    "comparisons": (aten.eq.Tensor, aten.ne.Tensor),
    "all but products": (aten.mm.default, aten.addmm.default),
}


def policy(name: str, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = (op in KEPT[name]) != name.startswith("all but")
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    """A unit with a parameter that the ranks cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.odd = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(7, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = self.scale * (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1))
        b = self.linear(a) * a.sum() + self.odd.sum() * self.scale.sum()
        c = torch.cat([b[:, :4], a[:, 4:]], 1).clone()
        return x + c.double().to(x.dtype) + (c == a).to(x.dtype)


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.contexts = partial(create_selective_checkpoint_contexts, partial(policy, name))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts)
        return x


@pytest.mark.parametrize("name", KEPT)
def test_policies(two: Pool, name: str) -> None:
    """More steps than a new unit is looked at."""
    two.run(policies, name)


def policies(name: str) -> None:
    found = {}
    for kind in ("unsharded", "eager", "compiled"):
        torch.manual_seed(0)
        model: Any = Model(name)
        if kind != "unsharded":
            for unit in (*model.layers, model):
                fully_shard(unit, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        call = model if kind != "compiled" else torch.compile(model, backend=BACKENDS[kind])
        found[kind] = []
        for step in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            call(x).square().mean().backward()
            found[kind].append([whole(p.grad) for p in model.parameters()])
            model.zero_grad()
    for kind in ("eager", "compiled"):
        check_equal(found[kind], found["unsharded"], kind, *CLOSE)


def test_only_these_modes_are_left_out() -> None:
    """Others stay where they are, also where it is left by an exception."""

    def stack() -> list[Any]:
        return [
            torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())
        ]

    @unselected
    def inside(fails: bool) -> list[Any]:
        if fails:
            raise KeyError
        return stack()

    assert inside(False) == []
    caching, cached = create_selective_checkpoint_contexts(partial(policy, "mul"))
    with FlopCounterMode(display=False), caching, FlopCounterMode(display=False), FakeTensorMode():
        with cached:
            before = stack()
            assert inside(False) == [m for m in before if not isinstance(m, SELECTIVE)]
            assert len(before) == len(inside(False)) + 2
            with pytest.raises(KeyError):
                inside(True)
            assert stack() == before
