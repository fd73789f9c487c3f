"""What calls of a unit's subgraph hand through is read where it came from."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from kit.passes_harness import Hand, aten, numel, unit
from torch.fx import GraphModule

from compiled_fsdp.compiler.read_past_calls import read_past_calls
from compiled_fsdp.ir.graph import output
from compiled_fsdp.ir.origins import key_of
from compiled_fsdp.ir.subgraphs import INVOKE

if TYPE_CHECKING:
    from torch.fx import Node


def calls_of(name: str) -> GraphModule:
    """Two calls; the subgraph returns its result, its second argument, a view of that, a view of
    the result, the result again, and a value that nobody reads.
    """
    inner = Hand()
    x, w = inner.input("x", 4, 4), inner.input("w", 4, 4)
    product = inner(aten.mm.default, x, w)
    view = inner(aten.permute.default, w, [1, 0])
    unread = inner(aten.sin.default, product)
    rows = inner(aten.slice.Tensor, product, 0, 0, 2)
    outer = Hand()
    outer.mode = inner.mode
    weights = [outer.input(f"w{i}", 4, 4) for i in range(2)]
    return called(name, inner, (product, w, view, rows, product, unread), outer, weights)


def called(
    name: str, inner: Hand, results: tuple[Node, ...], outer: Hand, weights: list[Node]
) -> GraphModule:
    """A subgraph of `x` and a weight, called of each of `weights`, whose last result is unread."""
    value = outer.input("x", 4, 4)
    root = torch.nn.Module()
    setattr(root, name, GraphModule(torch.nn.Module(), inner.returns(*results).graph))
    found: list[Node] = []
    for weight in weights:
        with outer.graph.inserting_before(outer.end):
            region = outer.graph.get_attr(name)
            call = outer.graph.call_function(INVOKE, (region, name, value, weight))
            call.meta["val"] = tuple(node.meta["val"] for node in results)
            reads = [
                outer.graph.call_function(operator.getitem, (call, i)) for i in range(len(results))
            ]
        for read, kept in zip(reads, call.meta["val"], strict=True):
            read.meta["val"] = kept
        value = reads[0]
        found += reads[:-1]
    outer.end.args = (tuple(found),)
    return GraphModule(root, outer.graph)


def text_of(gm: GraphModule) -> list[str]:
    return [
        str(node.format_node()).split(" : ")[0] for node in gm.graph.nodes if node.op != "output"
    ]


def test_arguments_and_views_of_them() -> None:
    gm = calls_of("partitioned_fw_fsdp_unit_0_0")
    arguments = gm.graph.find_nodes(op="placeholder")
    read_past_calls(gm)
    gm.graph.lint()
    calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
    results: tuple[Node, ...] = output(gm.graph).args[0]  # type: ignore[assignment]
    first, w0, v0, rows0, again0, second, w1, v1, rows1, again1 = results
    assert [again0, again1] == [first, second]
    for rows, product in ((rows0, first), (rows1, second)):
        assert (rows.target, rows.args) == (aten.slice.Tensor, (product, 0, 0, 2))
        assert key_of(rows.meta["val"]) == key_of(product.meta["val"])
    assert [first.args, second.args] == [(calls[0], 0), (calls[1], 0)]
    assert [w0, w1] == arguments[:2]
    for view, weight in ((v0, w0), (v1, w1)):
        assert (view.target, view.args) == (aten.permute.default, (weight, [1, 0]))
        assert key_of(view.meta["val"]) == key_of(weight.meta["val"])
    body = gm.get_submodule("partitioned_fw_fsdp_unit_0_0")
    assert [node.name for node in output(body.graph).args[0]] == ["mm_default"]  # type: ignore[arg-type, union-attr]
    assert not body.graph.find_nodes(op="call_function", target=aten.sin.default)
    made = [call.meta["val"][0] for call in calls]
    assert key_of(made[0]) != key_of(made[1]), "each call has storages of its own"
    assert first.meta["val"] is made[0]
    assert second.meta["val"] is made[1]
    gm.recompile()
    x, *weights = (torch.randn(4, 4) for _ in range(3))
    values = gm(*weights, x)
    torch.testing.assert_close(values[5], x @ weights[0] @ weights[1])
    torch.testing.assert_close(values[8], values[5][:2])


def cast_in_calls(
    num_parameters: int, *, is_computed: bool = False
) -> tuple[list[object], list[str]]:
    """Two calls of a subgraph that casts its second argument, a parameter in so many: the targets
    of the values of the first one (its result, the cast, a view of that, and the cast added to the
    first argument), and what the subgraph still returns.

    is_computed: the others are no inputs of the graph, but sines of these.
    """
    inner = Hand()
    x, w = inner.input("x", 4, 4), inner.input("w", 4, 4)
    cast = inner(aten._to_copy.default, w, dtype=torch.bfloat16)
    view = inner(aten.permute.default, cast, [1, 0])
    mixed = inner(aten.add.Tensor, x, cast)
    product = inner(aten.mm.default, x, mixed)
    outer = Hand()
    outer.mode = inner.mode
    specs = unit("layer", {"w": (4, 4)})
    weights = [
        outer.unshard(outer.input(f"flat{i}", numel(specs)), specs[0])
        if i < num_parameters
        else outer.input(f"w{i}", 4, 4)
        for i in range(2)
    ]
    if is_computed:
        weights[num_parameters:] = [outer(aten.sin.default, w) for w in weights[num_parameters:]]
    name = "partitioned_fw_fsdp_unit_0_0"
    gm = called(name, inner, (product, cast, view, mixed, product), outer, weights)
    read_past_calls(gm)
    gm.graph.lint()
    read = list(output(gm.graph).args[0])[:4]  # type: ignore[call-overload]
    body = gm.get_submodule(name)
    returned = [node.name for node in output(body.graph).args[0]]  # type: ignore[arg-type, union-attr]
    return [each.target for each in read], returned


def test_casts_of_parameters() -> None:
    """As `torch.autocast` makes them: backward reads a cast of the parameter, which can be gathered
    again; what comes of other values, too, is handed over.
    """
    made = [aten._to_copy.default, aten.permute.default]
    targets, returned = cast_in_calls(2)
    assert targets == [operator.getitem, *made, operator.getitem]
    assert returned == ["mm_default", "add_tensor"]


def test_weights_and_constants() -> None:
    inner = Hand()
    x, w = inner.input("x", 4, 4), inner.input("w", 4, 4)
    with inner.graph.inserting_before(inner.end), inner.mode:
        factor = inner.graph.call_function(aten.full.default, ([4, 4], 2.0))
        factor.meta["val"] = torch.full([4, 4], 2.0)
    scaled = inner(aten.mul.Tensor, w, factor)
    product = inner(aten.mm.default, x, scaled)
    outer = Hand()
    outer.mode = inner.mode
    weights = [outer.input(f"w{i}", 4, 4) for i in range(2)]
    name = "partitioned_fw_fsdp_unit_0_0"
    gm = called(name, inner, (product, scaled, product), outer, weights)
    read_past_calls(gm)
    assert [node.target for node in list(output(gm.graph).args[0])[:2]] == [  # type: ignore[call-overload]
        operator.getitem,
        aten.mul.Tensor,
    ]
    body = gm.get_submodule(name)
    assert [node.name for node in output(body.graph).args[0]] == ["mm_default"]  # type: ignore[arg-type, union-attr]


def test_casts_of_inputs_of_the_graph() -> None:
    """A mask, say, is there in backward as well."""
    assert cast_in_calls(1) == cast_in_calls(0) == cast_in_calls(2)


def test_casts_of_other_values() -> None:
    """Where it is neither in one of the calls, a cast is saved as it is."""
    targets, returned = cast_in_calls(1, is_computed=True)
    assert targets == [operator.getitem] * 2 + [aten.permute.default, operator.getitem]
    assert returned == ["mm_default", "_to_copy_default", "add_tensor"]


def test_subgraphs_of_others() -> None:
    """A user's nested regions stay as they are."""
    gm = calls_of("subgraph_0")
    before = text_of(gm)
    read_past_calls(gm)
    assert text_of(gm) == before
