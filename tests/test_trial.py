"""Trials: halves in which parameters are kept, made of halves in which none is, are what the partitioner makes under that plan."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from harness import Options, batch_of, build, shard

from compiled_fsdp import MixedPrecisionPolicy, budget, fully_shard, planned
from compiled_fsdp.graph import find
from compiled_fsdp.schema import UNSHARD
from compiled_fsdp.spec import ParamSpec
from compiled_fsdp.trial import schedule, split, with_kept

if TYPE_CHECKING:
    from compiled_fsdp.partition import Halves
    from compiled_fsdp.plan import Plan

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
    """For some and for all parameters kept: the same ops in the same order, and the same bytes alive at each."""
    compared = []

    def compare(gm: Any, plan: Plan, *, is_fused: bool) -> Plan:
        specs = [ParamSpec.of(node.args[1:]) for node in find(gm.graph, UNSHARD)]
        params = list(dict.fromkeys((s.unit, s.fqn) for s in specs if s.reshard == "gather"))
        dropped = split(gm, plan)
        for share in (0.3, 0.6, 1.0):
            under = replace(plan, kept=tuple(sorted(random.Random(0).sample(params, round(share * len(params))))))
            halves, expected = with_kept(dropped, under.kept), split(gm, under)
            assert ops_of(halves) == ops_of(expected)
            found, right = schedule(halves, under, is_fused=is_fused), schedule(expected, under, is_fused=is_fused)
            for half in ("forward", "backward"):
                assert getattr(found.profile, half).curve.during == getattr(right.profile, half).curve.during, half
            compared.append(len(under.kept))
        return plan

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = shard(build(name), Options(name, policies=(policy,)), fully_shard)
    around = torch.autocast("cpu", torch.bfloat16) if has_autocast else nullcontext()
    with planned(memory_budget=0.5), mock.patch.object(budget, "fit_budget", compare), around:
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(*batch_of(name, 0))
    assert compared[-1]


def ops_of(halves: Halves) -> list[list[str]]:
    return [[str(node.target) for node in half.graph.nodes if node.op == "call_function"] for half in halves]
