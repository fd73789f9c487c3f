"""Nodes of graphs while a model of ours is compiled: the same as torch creates, without looking
through plain arguments for symbols.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.fx.graph as fx_graph
from torch import nn
from torch.fx import Graph, symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from compiled_fsdp import fully_shard, pipeline
from compiled_fsdp.compiler import trial
from compiled_fsdp.torch_private import graphs

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp import Plan

needs_it = pytest.mark.skipif(
    not graphs.LOOKS_FOR_SYMBOLS, reason="this torch creates nodes without looking for symbols"
)
ADD = torch.ops.aten.add.Tensor


def step(backend: Any) -> None:
    torch._dynamo.reset()
    net = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    torch.compile(net, backend=backend, fullgraph=True)(torch.ones(2, 4)).sum().backward()


@needs_it
@pytest.mark.usefixtures("fake_world")
def test_while_compiling_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = pytree.tree_iter

    def counted(tree: Any, is_leaf: Any = None) -> Any:
        looked.append(1)
        return original(tree, is_leaf)

    counts = []

    def create(gm: GraphModule, plan: Plan) -> None:
        first = next(iter(gm.graph.nodes))
        monkeypatch.setattr(pytree, "tree_iter", counted)
        with gm.graph.inserting_after(first):
            made = gm.graph.call_function(ADD, (first, [1, 2.0, first, None]), {"alpha": 1})
        monkeypatch.setattr(pytree, "tree_iter", original)
        gm.graph.erase_node(made)
        counts.append(len(looked))

    with pipeline(create, after="free"):
        step("compiled_fsdp_eager")
    assert counts == [0, 0]
    assert fx_graph.pytree is pytree

    def failing(gm: GraphModule, _: object) -> GraphModule:
        assert fx_graph.pytree is not pytree
        raise RuntimeError("not today")

    with pytest.raises(Exception, match="not today"):
        step(failing)
    assert fx_graph.pytree is pytree


@needs_it
def test_symbols_are_found_wherever_they_are() -> None:
    symbol = ShapeEnv().create_unbacked_symint()
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((symbol,), {}),
        (([1, symbol],), {}),
        ((1, {"a": [symbol]}), {}),
        (((1, (2, symbol)),), {}),
        ((1,), {"alpha": symbol}),
    ]

    def warned(args: Any, kwargs: Any) -> bool:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Graph().call_function(ADD, args, kwargs)
        return bool(said)

    by_torch = [warned(*each) for each in arguments]
    assert all(by_torch)
    assert graphs.with_quick_nodes()
    assert not graphs.with_quick_nodes(), "who has put it in takes it out"
    try:
        assert [warned(*each) for each in arguments] == by_torch
        assert not warned((1, [2, 3.0], (torch.float32, None)), {"alpha": "x"})
    finally:
        graphs.without_quick_nodes()


def test_copies_are_torchs() -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        z = torch.cat([x, y], dim=1)[:, 1:3]
        return z, [x + 1, z.sum()]

    graph = symbolic_trace(compute).graph
    for i, node in enumerate(graph.nodes):
        node.meta["val"] = i
    expected = Graph()
    expected.output(expected.graph_copy(graph, {}))
    found = trial.copied_graph(graph)
    assert str(found) == str(expected)
    pairs = list(zip(found.nodes, graph.nodes, strict=True))[:-1]
    assert [(n.name, n.target, n.type, n.meta) for n, _ in pairs] == [
        (n.name, n.target, n.type, n.meta) for _, n in pairs
    ]
    assert all(n.meta is not before.meta for n, before in pairs), "each has a dict of its own"
    found.lint()
