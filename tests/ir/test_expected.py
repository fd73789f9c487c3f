"""Sizes that only data decides: what planning takes them for."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    assert hint(16 * bounded) == 0  # nothing is known of the mean
    assert at_most(16 * free) == hint(16 * free) == 0
    assert at_most(bounded + free) == 0  # a bound for one of two is none
    assert at_most(5) == 5


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
