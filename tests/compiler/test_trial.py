"""Trials: halves in which parameters are kept, made of halves in which none is, are what the
partitioner makes under that plan.
"""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.harness import Options, batch_of, build, shard
from torch import nn

from compiled_fsdp import MixedPrecisionPolicy, fully_shard, planned
from compiled_fsdp.compiler import backend, budget, driver
from compiled_fsdp.compiler.trial import copied, is_settled, schedule, split, with_kept
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import UNSHARD
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.memory import profile_step

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.compiler.partition import Halves
    from compiled_fsdp.planning.plan import Plan

HALF_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "policy", "has_autocast"),
    [
        ("llama", HALF_PRECISION, False),
        ("llama", MixedPrecisionPolicy(), True),
        ("moe", MixedPrecisionPolicy(), True),
        ("conv", MixedPrecisionPolicy(), False),
        ("frozen", HALF_PRECISION, True),
        ("read_twice", MixedPrecisionPolicy(), False),
        ("called_twice", MixedPrecisionPolicy(), True),
    ],
)
@pytest.mark.usefixtures("fake_world")
def test_the_same_as_partitioned_anew(name, policy, has_autocast):
    """For some and for all parameters kept: the same ops in the same order, and the same bytes
    alive at each.
    """
    compared = []

    def compare(gm: Any, plan: Plan, *, is_fused: bool, step: object) -> Plan:
        specs = [ParamSpec.of(node.args[1:]) for node in find(gm.graph, UNSHARD)]
        params = list(dict.fromkeys((s.unit, s.fqn) for s in specs if s.reshard == "gather"))
        dropped = split(gm, plan)
        assert is_settled(dropped)
        for share in (0.3, 0.6, 1.0):
            under = replace(
                plan,
                kept=tuple(sorted(random.Random(0).sample(params, round(share * len(params))))),
            )
            halves, expected = with_kept(dropped, under.kept), split(gm, under)
            assert ops_of(halves) == ops_of(expected)
            found, right = (
                schedule(halves, under, is_fused=is_fused),
                schedule(expected, under, is_fused=is_fused),
            )
            for mine, theirs in zip(found.profiles, right.profiles, strict=True):
                assert mine.curve.during == theirs.curve.during, mine.title
            compared.append(len(under.kept))
        return plan

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = shard(build(name), Options(name, policies=(policy,)), fully_shard)
    around = torch.autocast("cpu", torch.bfloat16) if has_autocast else nullcontext()
    with planned(memory_budget=0.5), mock.patch.object(driver, "fit_budget", compare), around:
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(*batch_of(name, 0))
    assert compared[-1]


def ops_of(halves: Halves) -> list[list[str]]:
    return [
        [str(node.target) for node in half.graph.nodes if node.op == "call_function"]
        for half in halves
    ]


class Scaled(nn.Module):
    """The weight meets an activation in a chain of products: dropped, it makes computing them again
    free; kept, it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale = self.weight, x.detach().abs().mean().to(self.weight.dtype)
        for _ in range(12):
            weight = weight * scale
        return torch.tanh(nn.functional.linear(x.float(), weight.float())).to(x.dtype)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (self.weight * self.mask.to(self.weight.dtype)))


def final_peak(
    blocks: list[nn.Module], x: torch.Tensor, policy: MixedPrecisionPolicy, **changes: Any
) -> int:
    """Bytes above rest at the peak of the final graphs of these blocks, by the memory model."""
    graphs: list[Graph] = []

    def run_half(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
        graphs.append(copied(original(gm, is_fused=is_fused)).graph)
        return gm

    torch._dynamo.reset()
    model = nn.Sequential(*blocks)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=True, mp_policy=policy)
    original = backend.run_half
    with mock.patch.object(backend, "run_half", run_half), planned(**changes):
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        call(x.requires_grad_()).float().square().mean().backward()
    return profile_step(*graphs).peak


class ReadsInBackward(torch.autograd.Function):
    """Forward has no use for the weight's values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return grad @ weight, grad.T @ grad


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReadsInBackward.apply(x, self.weight)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("block", [Scaled, Masked, Backwards])
def test_a_line_that_moves_is_drawn_anew(block):
    def peak(room: float) -> int:
        return final_peak(
            [block() for _ in range(4)], torch.randn(4, 64), HALF_PRECISION, memory_budget=room
        )

    room = (peak(0.0) + peak(1.0)) // 2
    anew = []
    with (
        mock.patch("compiled_fsdp.planning.plan_fields.LEAST_BUDGET", 0),
        mock.patch.object(
            budget,
            "split",
            lambda gm, plan, step=None: anew.append(plan.kept) or split(gm, plan, step),
        ),
    ):
        assert peak(room) <= room
    assert anew[0] == ()
    assert any(anew), "a trial that keeps something is split anew"


@pytest.mark.usefixtures("fake_world")
def test_units_in_parts_may_fit_where_whole_ones_do_not():
    """A trial of a plan that leaves parts to costs gathers whole units, unless nothing fits: then
    it looks at parts too.
    """

    def peak(**changes: Any) -> int:
        blocks = [
            nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))) for _ in range(3)
        ]
        costs = Costs(3e10, 8e9, 2e-6, (("0", Link(1e-6, 1e9)),))
        return final_peak(
            blocks, torch.randn(512, 256), MixedPrecisionPolicy(), costs=costs, **changes
        )

    whole, parts = peak(split_bytes=0), peak(split_bytes=None)
    room = (parts + whole) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak(split_bytes=None, memory_budget=room) <= room < whole
    with pytest.warns(UserWarning, match=r"memory_budget is .* MB, and a step needs"):
        peak(split_bytes=None, memory_budget=parts // 2)
