"""`FullyShardedDataParallel` compiled: how many graphs, what they communicate and keep, how far
ahead, and under Inductor.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.compare import check_equal, plain
from kit.graphs import captured
from kit.oracle_fsdp1 import (
    Api,
    Block,
    adam,
    batch,
    full,
    grads,
    hybrid_mesh,
    loss_of,
    net,
    same,
    train_step,
)
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import compiled_fsdp
from compiled_fsdp import planned
from compiled_fsdp.ir.collectives import GATHERS, STARTS
from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.graph import find, is_backward, output, value
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.wire import gloo

if TYPE_CHECKING:
    from kit.pool import Pool


def test_one_graph_each_way(two: Pool, four: Pool) -> None:
    two.run(one_graph_each_way)
    four.run(one_graph_each_way_hybrid)


def one_graph_each_way(**options: Any) -> None:
    for strategy, use_orig_params in (
        (ShardingStrategy.FULL_SHARD, True),
        (ShardingStrategy.FULL_SHARD, False),
        (ShardingStrategy.NO_SHARD, False),
    ):
        count(sharding_strategy=strategy, use_orig_params=use_orig_params)


def one_graph_each_way_hybrid() -> None:
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2
    count(sharding_strategy=strategy, device_mesh=hybrid_mesh(), use_orig_params=True)


def count(**options: Any) -> None:
    """Three units: gathers in forward, again in backward where they were dropped, one reduction
    each; no recompiles.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    strategy = options["sharding_strategy"]
    model = Api("compiled").blocks(**options)
    call, optimizer = Api("compiled").compile(model), adam(model)
    with captured() as graphs, torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            train_step(call, step)
            optimizer.step()
            optimizer.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [is_backward(graph) for graph in graphs] == [False, True]
    is_sharded = strategy is not ShardingStrategy.NO_SHARD
    is_dropped = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    assert [len(find(graph, *GATHERS)) for graph in graphs] == [3 * is_sharded, 2 * is_dropped]
    reductions = [n for n in find(graphs[1], *STARTS) if n.target not in GATHERS]
    assert len(reductions) == 3 * (
        is_sharded + (options.get("device_mesh") is not None or not is_sharded)
    )
    assert not find(graphs[1], torch.ops.fsdp.flatten_grad.default)
    if (
        is_dropped
    ):  # of the two blocks; the root keeps its parameters until backward, as stock's does
        saved = [n for n in saved_for_backward(output(graphs[0])) if value(n).dim() == 1]
        sizes = [m._flat_param._unpadded_unsharded_size.numel() for m in (model[1], model[2])]
        assert all(value(n).numel() not in sizes for n in saved)


@pytest.mark.usefixtures("fake_world")
def test_no_copy_out() -> None:
    """What is gathered is the flat parameter, of which all parameters are views: no copy, in no
    bucket.
    """
    model = Api("compiled").blocks(use_orig_params=True)
    with captured() as graphs, planned(bucket_bytes=0):
        train_step(Api("compiled").compile(model))
    copies = (
        torch.ops.aten.clone.default,
        torch.ops.aten.cat.default,
        torch.ops.fsdp.copy_columns.default,
    )
    for graph in graphs:
        for region in find_regions(graph, "gather"):
            assert not [n for n in region.nodes if n.target in copies]


def test_small_units_share_collectives(two: Pool) -> None:
    two.run(sharing)


def sharing() -> None:
    """With the default plan the three small units travel together, and train the same."""
    found = []
    for size in (0, 1 << 20):
        torch._dynamo.reset()
        model = Api("compiled").blocks(use_orig_params=True)
        with captured() as graphs, planned(bucket_bytes=size):
            train_step(Api("compiled").compile(model))
        found.append(([len(find(graph, *GATHERS)) for graph in graphs], plain(grads(model))))
    assert found[0][0] == [3, 2]
    assert sum(found[1][0]) < 5
    for name, grad in found[0][1].items():
        assert (grad is None and found[1][1][name] is None) or torch.equal(grad, found[1][1][name])


@pytest.mark.usefixtures("fake_world")
def test_prefetch_bounds_the_plan() -> None:
    """How many gathers are under way at once in backward: two with BACKWARD_PRE, one without; in
    forward what the limit allows.
    """
    found = {}
    for prefetch, limit in (
        (BackwardPrefetch.BACKWARD_PRE, True),
        (BackwardPrefetch.BACKWARD_POST, False),
        (None, True),
    ):
        torch._dynamo.reset()
        wrapped = Api("compiled").blocks(
            net_of(4), backward_prefetch=prefetch, limit_all_gathers=limit, use_orig_params=True
        )
        with captured() as graphs, planned(prefetch=4, backward_prefetch=4):
            train_step(Api("compiled").compile(wrapped))
        found[prefetch, limit] = [most_under_way(graph) for graph in graphs]
    pre = BackwardPrefetch.BACKWARD_PRE
    assert {key: value[0] for key, value in found.items()} == {
        key: 3 if key[1] else 5 for key in found
    }
    assert {key: value[1] for key, value in found.items()} == {
        key: 2 if key[0] is pre else 1 for key in found
    }


def net_of(blocks: int) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), *(Block(5) for _ in range(blocks)), nn.Linear(5, 2))


def most_under_way(graph: Any) -> int:
    regions = [r for r in find_regions(graph, "gather") if r.starts]
    starts, waits = {r.starts[0] for r in regions}, {r.waits[0] for r in regions}
    most = now = 0
    for node in graph.nodes:
        now += (node in starts) - (node in waits)
        most = max(most, now)
    return most


def test_inside_a_larger_function(two: Pool) -> None:
    two.run(inside_a_larger_function)


def inside_a_larger_function() -> None:
    """The loss is compiled too, and a part that Dynamo cannot trace runs eagerly between graphs:
    the same gradients.
    """
    expected = Api("eager").blocks(use_orig_params=True)
    loss = train_step(expected)
    model = Api("eager").blocks(use_orig_params=True)

    @torch.compile(backend="compiled_fsdp_eager", fullgraph=True)
    def whole(x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    found = whole(batch())
    found.backward()
    assert torch.equal(found, loss)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
    for p in (*model.parameters(), *expected.parameters()):
        p.grad = None
    train_step(expected, 1)
    whole(batch(1)).backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
    torch._dynamo.reset()
    broken = net()
    broken[1] = Breaks(broken[1])
    sharded = Api("eager").wrap(broken, use_orig_params=True)
    train_step(torch.compile(sharded, backend="compiled_fsdp_eager"))
    plain_model = Api("eager").wrap(net(), use_orig_params=True)
    train_step(plain_model)
    for a, b in zip(sharded.parameters(), plain_model.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_blocks_compiled_by_themselves(two: Pool) -> None:
    two.run(blocks_compiled)


def blocks_compiled() -> None:
    """The eager runtime gathers, compiled blocks read views of what it gathered; its order of
    additions is the eager one.

    So they do when activation checkpointing runs them once more in backward: it is the same code,
    not one that gathers.
    """
    for use_orig_params, is_checkpointed in (
        (True, False),
        (False, False),
        (True, True),
        (None, True),
    ):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = []
        for is_compiled in (False, True):
            model = net()
            for i in (1, 2):
                if is_compiled:
                    model[i].compile(backend="compiled_fsdp_eager")
                if is_checkpointed:
                    model[i] = checkpoint_wrapper(model[i])
            sharded = whole_and_blocks(model, use_orig_params)
            losses = [train_step(sharded, step) for step in range(2)]
            found.append((losses, plain(grads(sharded))))
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert num_graphs == 1, (use_orig_params, is_checkpointed, num_graphs)
        assert found[0][0] == found[1][0]
        check_equal(found[1][1], found[0][1], "compiled against not")


def whole_and_blocks(model: nn.Sequential, use_orig_params: bool | None) -> Any:
    """Wrapped by FSDP1; None: by `fully_shard`."""
    if use_orig_params is not None:
        api = Api("eager")
        for i in (1, 2):
            model[i] = api.wrap(model[i], use_orig_params=use_orig_params)
        return api.wrap(model, use_orig_params=use_orig_params)
    for i in (1, 2):
        compiled_fsdp.fully_shard(model[i])
    return compiled_fsdp.fully_shard(model)


class Breaks(nn.Module):
    """Breaks the graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


def test_inductor(two: Pool) -> None:
    two.run(inductor, timeout=600.0)


def inductor() -> None:
    """Under the default backend: rounding of fused kernels."""
    same(steps, kinds=("inductor",), rtol=1e-4, atol=1e-5)


def steps(api: Api) -> Any:
    model = api.blocks(use_orig_params=True)
    call, optimizer = api.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        losses.append(train_step(call, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_penalty_on_parameters(two: Pool) -> None:
    """Outside of forward autograd itself gives a shard its gradient, to which the reduced one is
    added, in one backward with it or after it.
    """
    two.run(same, penalty)


def penalty(api: Api) -> Any:
    model = api.blocks(use_orig_params=True)
    call, optimizer = api.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, where in enumerate(("before", "behind", "apart")):
        early = sum(p.square().sum() for p in model.parameters())
        loss = loss_of(call, step)
        late = sum(p.square().sum() for p in model.parameters())
        if where == "apart":
            early.backward()
        (loss + {"before": early, "behind": late, "apart": 0}[where]).backward()
        optimizer.step()
        found.append((loss.detach(), full(api, model)))
        optimizer.zero_grad()
    return found


def test_ablation(two: Pool) -> None:
    two.run(ablation)


def ablation() -> None:
    """Both front ends, eager and compiled: what is faked sends nothing, the other kind as ever."""
    kinds = {"FSDP_USE_FAKE_ALL_GATHER": "all_gather", "FSDP_USE_FAKE_REDUCE": "all_to_all"}
    for front_end, (name, faked) in itertools.product(("fsdp1", "fsdp2"), kinds.items()):
        with mock.patch.dict(os.environ, {name: "1"}):
            model: Any = net()
            if front_end == "fsdp1":
                model = Api("eager").blocks(model, use_orig_params=True)
            else:
                model = compiled_fsdp.fully_shard(model, reshard_after_forward=True)
        for call in (model, torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)):
            with mock.patch.object(gloo, "_exchange", wraps=gloo._exchange) as exchange:
                train_step(call)
            sent = {arguments.args[0] for arguments in exchange.call_args_list}
            assert sent == set(kinds.values()) - {faked}, (front_end, name, sent)
        torch._dynamo.reset()


def test_model_is_freed(two: Pool) -> None:
    two.run(model_is_freed)


def model_is_freed() -> None:
    for use_orig_params in (True, False):
        model = Api("eager").blocks(use_orig_params=use_orig_params)
        train_step(model)
        dead = weakref.ref(model), weakref.ref(model._flat_param)
        del model
        gc.collect()
        assert [reference() for reference in dead] == [None, None]


def test_what_is_not_there(two: Pool) -> None:
    two.run(what_is_not_there)


def what_is_not_there() -> None:
    model = Api("eager").blocks(use_orig_params=True)
    with pytest.raises(NotImplementedError, match="FullyShardedDataParallel"):
        compiled_fsdp.overlap_optimizer(model, adam(model))
    wrong: dict[str, Any] = {
        "sharding_strategy": "FULL_SHARD",
        "cpu_offload": True,
        "backward_prefetch": "pre",
        "mixed_precision": torch.bfloat16,
    }
    untouched = net()
    before = dict(untouched.named_parameters())
    for name, given in wrong.items():
        with pytest.raises(
            TypeError,
            match=f"{name} must be a torch.distributed.fsdp.*got.*Sequential is as it was",
        ):
            Api("eager").wrap(untouched, **{name: given})
    with pytest.raises(TypeError, match=r"module must be an nn\.Module"):
        Api("eager").wrap(3)  # type: ignore[arg-type]
    after = dict(untouched.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


class Fails(Block):
    """Raises where it is told to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return super().forward(x)


def after_exception(kind: str, use_orig_params: bool) -> None:
    """A forward that raises inside of an instance, caught, between two steps: the second step is
    that of a model which never raised.
    """
    found = []
    for raises in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(3, 5), Block(5), Fails(5), nn.Linear(5, 2))
        api = Api(kind)
        model = api.wrap(
            module,
            auto_wrap_policy=ModuleWrapPolicy({Block, Fails}),
            use_orig_params=use_orig_params,
        )
        call, optimizer = api.compile(model), adam(model)
        for step in range(2):
            if raises and step:
                for _ in range(2):
                    with pytest.raises((ValueError, Unsupported), match="three rows"):
                        call(batch(9, 3))
            train_step(call, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(full(api, model))
    check_equal(*found, f"{kind}, use_orig_params={use_orig_params}")


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_an_exception_in_forward(two: Pool, kind: str) -> None:
    two.run(after_exception, kind, True)
    two.run(after_exception, kind, False)


def test_evaluated_first(two: Pool) -> None:
    two.run(evaluated_first)


def evaluated_first() -> None:
    """In inference mode, before anything else: what the first forward makes is written to when the
    model is trained, and when it is saved. Stock fails at the first training step.
    """
    for use_orig_params in (True, False):
        wanted, found = (
            after_evaluation(mode, use_orig_params)
            for mode in (torch.no_grad, torch.inference_mode)
        )
        check_equal(found, wanted, f"{use_orig_params=}")


def after_evaluation(mode: Any, use_orig_params: bool) -> list[Any]:
    api = Api("eager")
    model = api.blocks(use_orig_params=use_orig_params)
    with mode():
        model(batch())
    optimizer = adam(model)
    loss = train_step(model)
    optimizer.step()
    return [loss, full(api, model), plain(model.state_dict())]
