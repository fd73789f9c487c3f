"""Sizes that only data decides: what planning takes them for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.harness import IS_2_11
from moe import MoEConfig, MoEGPT, share_experts
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp import fully_shard, pipeline
from compiled_fsdp.ir.expected import SPLIT, _share, at_most, hint
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.planning.costs import nbytes

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp import Plan

CONFIG = MoEConfig(
    num_layers=1, width=16, num_heads=2, hidden=16, max_length=8, vocab=32, num_experts=4,
    expert_hidden=8,
)  # fmt: skip
ROUTED = 2 * 8 * CONFIG.top


@pytest.mark.skipif(IS_2_11, reason="its fake group leaves numbers of tokens as memory has them")
def test_tokens_are_taken_to_be_spread_evenly(fake_world: None) -> None:
    """As many come to a rank as it sends; its experts get as many each."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = MoEGPT(CONFIG)
    experts = share_experts(model, mesh)
    fully_shard(model.layers[0], mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    exchanged, split, sizes = [], [], []

    def look(gm: GraphModule, _: Plan) -> GraphModule:
        for node in gm.graph.nodes:
            if node.target is EXCHANGE and node.meta["val"].dim() == 2:
                exchanged.append(hint(node.meta["val"].shape[0]))
                sizes.append(nbytes(node))
            elif node.target is SPLIT and len(node.args[1]) == 2:
                split.append([hint(part.shape[0]) for part in node.meta["val"]])
        return gm

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pipeline(look, after="free"):
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(tokens, tokens)
    assert {*exchanged} == {ROUTED}
    assert {*sizes} == {ROUTED * CONFIG.width * 4.0}
    assert {*map(tuple, split)} == {(ROUTED // 2, ROUTED // 2)}


def test_memory_is_bounded_where_the_program_says_so() -> None:
    env = ShapeEnv()
    bounded, free = env.create_unbacked_symint(), env.create_unbacked_symint()
    torch._check(bounded >= 0)
    torch._check(bounded <= 12)
    assert at_most(16 * bounded) == 16 * 12
    assert hint(16 * bounded) == 16 * 12  # nothing is known of the mean
    assert at_most(16 * free) == hint(16 * free) == 0
    assert at_most(bounded + free) == 12  # a bound for one of two is none for both
    assert at_most(5) == 5
    _share(8, [bounded])
    assert (hint(bounded), at_most(bounded)) == (8, 12)
    _share(100, [other := env.create_unbacked_symint()])
    torch._check(other <= 30)
    assert hint(other) == 30  # no more than the program allows
    torch._check(free < 2**31)
    assert hint(env.create_unbacked_symint()) == hint(free) == 0  # says nothing


@pytest.mark.skipif(IS_2_11, reason="its mark_unbacked knows neither")
def test_what_the_program_expects_of_a_size_goes_first() -> None:
    """`mark_unbacked`: its hint, else its bound, are what an input's rows cost and need."""
    found: list[tuple[int, int]] = []

    def look(gm: GraphModule, inputs: object) -> Any:
        (given,) = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")[-1:]]
        found.append((hint(given.shape[0]), at_most(given.shape[0])))
        return gm.forward

    for options in ({"hint_override": 6, "max": 9}, {"max": 9}):
        torch._dynamo.reset()
        x = torch.ones(4, 2)
        torch._dynamo.decorators.mark_unbacked(x, 0, **options)
        torch.compile(lambda x: x * 2, backend=look, fullgraph=True)(x)
    assert found == [(6, 9), (9, 9)]


def test_torch_takes_a_size_for_what_is_expected_of_it() -> None:
    """But where the program has said something else: the others share what is left."""
    env = ShapeEnv()
    first, other, free = (env.create_unbacked_symint() for _ in range(3))
    _share(12, [first, other])
    assert env.var_to_hint_override == {first.node.expr: 6, other.node.expr: 6}
    said, rest = env.create_unbacked_symint(), env.create_unbacked_symint()
    env.var_to_hint_override[said.node.expr] = 10
    _share(12, [said, rest])
    assert (hint(said), hint(rest), hint(free)) == (10, 2, 0)
    assert env.var_to_hint_override[rest.node.expr] == 2
    assert free.node.expr not in env.var_to_hint_override


def test_a_size_that_is_known_stays() -> None:
    assert hint(7) == 7


def test_a_size_that_cannot_be_estimated_counts_nothing() -> None:
    env = ShapeEnv()
    size, other = env.create_unbacked_symint(), env.create_unbacked_symint()
    assert hint(size) == 0
    assert hint(size // other) == 0  # nothing is known of either: no division by zero


def test_what_is_noted_later_counts() -> None:
    """Also of an expression that was asked for before."""
    env = ShapeEnv()
    here, there = env.create_unbacked_symint(), env.create_unbacked_symint()
    assert hint(4 * (here + there)) == 0
    _share(12, [here, there])
    assert hint(4 * (here + there)) == 48
    other = env.create_unbacked_symint()
    assert hint(here + other) == 6
    _share(5, [other])
    assert hint(here + other) == 11
