"""What backward computes again: fewer bytes saved, the same numbers, and nobody else's graphs or
settings touched.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from gpt import GPT, GPTConfig
from torch._inductor.compile_fx import compile_fx

from compiled_fsdp import Plan, fully_shard, planned
from compiled_fsdp.compiler import backend
from compiled_fsdp.compiler.partition import Partitioner, install_partitioner

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch.fx import GraphModule


def test_recomputing_saves_bytes_and_changes_no_number(two: Pool) -> None:
    for losses, grads, saved in two.run(train_both_ways):
        assert losses[0] == losses[1]
        assert all(map(torch.equal, grads[0], grads[1]))
        assert saved[0] < 0.8 * saved[1], f"{saved} bytes saved, with recomputation and without"


def train_both_ways() -> tuple[list[list[float]], list[list[torch.Tensor]], list[int]]:
    saved: list[int] = []
    original = backend.partition

    def partition(*arguments: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = original(*arguments, **options)
        kept = [
            n.meta["val"]
            for n in backward.graph.nodes
            if n.op == "placeholder" and not n.name.startswith(("tangents", "primals"))
        ]
        saved.append(sum(t.numel() * t.itemsize for t in kept if isinstance(t, torch.Tensor)))
        return forward, backward

    losses, grads = [], []
    backend.partition = partition  # type: ignore[assignment]
    try:
        for recompute in (True, False):
            torch.manual_seed(0)
            model = GPT(GPTConfig(num_layers=1, width=64, num_heads=2, hidden=256))
            for block in model.layers:
                fully_shard(block)
            call = torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)
            tokens = torch.arange(64).view(2, 32)
            with planned(recompute=recompute):
                steps = [call(tokens, tokens) for _ in range(2)]
                torch.stack(steps).sum().backward()
            losses.append([loss.item() for loss in steps])
            grads.append([p.grad.to_local() for p in model.parameters()])
    finally:
        backend.partition = original
    return losses, grads, saved


def test_a_users_partitioner_stays() -> None:
    theirs = Partitioner()
    with inductor_config.patch(custom_partitioner_fn=theirs):
        install_partitioner()
        assert inductor_config.custom_partitioner_fn is theirs


def test_other_graphs_are_split_as_torch_does() -> None:
    """The setting is changed for our graphs alone."""
    seen = []

    class Watched(Partitioner):
        def __call__(
            self, gm: GraphModule, joint_inputs: Any, **options: Any
        ) -> tuple[GraphModule, GraphModule]:
            halves = super().__call__(gm, joint_inputs, **options)
            seen.append(functorch_config.ban_recompute_materialized_backward)
            return halves

    def as_it_is(gm: GraphModule, *_: Any, **__: Any) -> Any:
        return make_boxed_func(gm.forward)

    inductor = partial(compile_fx, inner_compile=as_it_is)
    with inductor_config.patch(custom_partitioner_fn=Watched(), force_disable_caches=True):
        x = torch.ones(4, requires_grad=True)
        torch.compile(lambda x: x.sin().cos(), backend=inductor)(x).sum().backward()
    assert seen == [True]
    assert x.grad is not None


def test_bad_value() -> None:
    with pytest.raises(ValueError, match="Plan: recompute=1; should be True or False, or 'budget'"):
        Plan(recompute=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recompute='budget' with memory_budget=None; .* Set one"):
        Plan(recompute="budget")
