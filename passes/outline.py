"""Let the compiler compile equal layers once: computation that repeats between collectives becomes
calls of one subgraph.

Before:

    %w0 = view(wait(all_gather(%flat0)), shape)
    %y0 = mm(compute(%x), %w0)
    %w1 = view(wait(all_gather(%flat1)), shape)
    %y1 = mm(compute(%y0), %w1)
    %w2 = view(wait(all_gather(%flat2)), shape)
    %y2 = mm(compute(%y1), %w2)

After:

    %w0 = view(wait(all_gather(%flat0)), shape)
    %y0 = getitem(invoke_subgraph(%fsdp_region_0, "fsdp_region_0", %x, %w0), 0)
    %w1 = view(wait(all_gather(%flat1)), shape)
    %y1 = getitem(invoke_subgraph(%fsdp_region_0, "fsdp_region_0", %y0, %w1), 0)
    %w2 = view(wait(all_gather(%flat2)), shape)
    %y2 = getitem(invoke_subgraph(%fsdp_region_0, "fsdp_region_0", %y1, %w2), 0)

Collectives, waits, marks, steps and whatever else has an effect stay where they are, in the outer
graph; what stands between two of them is a candidate (`ir/spans.py`), and equal candidates (the
same ops, shapes, dtypes, strides, options) share a subgraph, which Inductor lowers once and calls
as a function. Copies out of a bucket are made in it, of the bucket: one node in the outer graph for
all parameters of a layer.

Requires: the graph in its final order.
Ensures: with every call replaced by what it calls, the graph computes what it did, in the same
order, but for pointwise values that stand behind the collective after them.
Where only data decides a size, the subgraph has a symbol of its own for it, whatever the layer's
is (`ir/unknown_sizes.py`).

Leaves alone: what does not repeat; what has an unknown size that is no function of its inputs' or
that a program with dynamic shapes has given it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, GraphModule

from compiled_fsdp.ir.graph import erase_all, move_before, move_behind, output, placeholders, value
from compiled_fsdp.ir.meta import keep_strides, rename_sizes, take_over
from compiled_fsdp.ir.repeats import find_repeats, widened
from compiled_fsdp.ir.spans import Span, may_lose_dims
from compiled_fsdp.ir.storage import may_alias
from compiled_fsdp.ir.subgraphs import INVOKE, REGION, unit_called_by

from .base import context_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from torch.fx import Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten


def outline(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    if plan.regions == "off" or context_of(gm).inline:
        return gm
    repeats = find_repeats(gm.graph)
    if not repeats.groups:
        return gm
    for span in repeats.spans:
        if span.num_moved < len(span.nodes):
            move_before(span.nodes[: span.num_moved], span.nodes[span.num_moved])
        move_behind(span.left_out, span.nodes[-1])
    groups = [widened(group) for group in repeats.groups]
    flat = [{i for s in g for i, n in enumerate(s.inputs) if may_lose_dims(n)} for g in groups]
    for number, group in enumerate(groups):
        name = f"{REGION}{number}"
        # spans made anew: they may read results of calls by now
        setattr(gm, name, _subgraph(gm, Span(group[0].nodes), flat[number]))
        with gm.graph.inserting_before(group[0].nodes[0]):
            region = gm.graph.get_attr(name)
        for span in group:
            _call(region, name, Span(span.nodes), flat[number])
    erase_all(n for n in gm.graph.find_nodes(op="get_attr") if not n.users)
    return gm


def _subgraph(gm: GraphModule, span: Span, flat: AbstractSet[int]) -> GraphModule:
    """The span as a graph of its own, with strides of its results as they are.

    flat: which inputs cross the border with one dim; see `may_lose_dims`.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    fresh = span.names.fresh()
    for i, node in enumerate(span.inputs):
        copies[node] = graph.placeholder(f"arg{i}_1")
        copies[node].meta["val"] = value(node).view(-1) if i in flat else node.meta["val"]
    for node in (span.inputs[i] for i in sorted(flat)):
        copies[node] = _viewed(copies[node], value(node).shape)
    results_of: dict[Node, list[Node]] = {}  # of calls of units, which are copied in
    for node in span.nodes:
        if (body := unit_called_by(node)) is not None:
            results_of[node] = _copy_in(graph, body, [copies[n] for n in node.args[2:]])  # type: ignore[index]
        elif node.args and node.args[0] in results_of:
            copies[node] = results_of[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if span.names.are_needed:
        for node in copies.values():
            rename_sizes(node, lambda size: span.names.inside(size, fresh))
    results = [_viewed(copies[n], [-1]) if may_lose_dims(n) else copies[n] for n in span.outputs]
    values = tuple(node.meta["val"] for node in results)
    end = graph.output(tuple(results))
    end.meta["val"] = values
    keep_strides(end, [value.stride() for value in values])
    graph.eliminate_dead_code()
    return GraphModule(gm, graph)


def _copy_in(graph: Graph, body: Graph, arguments: list[Node]) -> list[Node]:
    """Put what a unit's graph computes of arguments into another; returns its results there."""
    copies = dict(zip(placeholders(body), arguments, strict=True))
    for node in body.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return [copies[result] for result in output(body).args[0]]  # type: ignore[union-attr, index]


def _call(region: Node, name: str, span: Span, flat: AbstractSet[int]) -> None:
    """Let a call stand for a span; views of it that others read are made of the call's results."""
    graph, outputs = region.graph, span.outputs
    results: dict[Node, Node] = {}
    with graph.inserting_before(span.nodes[-1].next):
        inputs = [_viewed(n, [-1]) if i in flat else n for i, n in enumerate(span.inputs)]
        call = graph.call_function(INVOKE, (region, name, *inputs))
        values = [value(node) for node in outputs]
        call.meta["val"] = tuple(
            each.view(-1) if may_lose_dims(node) else each
            for node, each in zip(outputs, values, strict=True)
        )
        for i, node in enumerate(outputs):
            results[node] = result = graph.call_function(operator.getitem, (call, i))
            take_over(result, node)
            if may_lose_dims(node):
                result.meta["val"] = call.meta["val"][i]
                results[node] = _viewed(result, values[i].shape)
        for node in _views(span):
            results[node] = graph.node_copy(node, lambda n: results.get(n, n))
    for node, result in results.items():
        node.replace_all_uses_with(
            result, lambda user: user not in span.inside and user not in results.values()
        )
    erase_all(span.nodes)


def _viewed(node: Node, shape: Sequence[int]) -> Node:
    """A view of a value that crosses the border of a call with one dim, or has done so."""
    view = node.graph.call_function(aten.view.default, (node, list(shape)))
    take_over(view, node)
    view.meta["val"] = value(node).view(shape)
    return view


def _views(span: Span) -> list[Node]:
    """The views in a span that others read, and what they are views of in it, in order."""
    found: set[Node] = set()
    for node in span.nodes:
        if span.is_read_outside(node):
            while may_alias(node) and node.args[0] in span.inside:
                found.add(node)
                node = node.args[0]  # type: ignore[assignment]
    return [node for node in span.nodes if node in found]
