"""The graph of a whole training step: a forward and its backward in one, with the optimizer behind
them.

A joint graph is split as ever, so that the passes before it and torch's partitioner decide what is
computed and gathered again. Then what forward saves becomes a value inside of one graph, the
gradient of the loss is 1, and each flat gradient goes to an `update_` instead of to autograd. What
is left for autograd is a backward without a node, which nobody runs.

Of several micro-batches, the halves have all forwards and all backwards; here each backward comes
to stand behind its forward, so that the activations of one are alive at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.ir.descriptors import is_mesh, place_of_input, places_of, returned, set_returned
from compiled_fsdp.ir.graph import Builder, batches_of, find, output, placeholders, value
from compiled_fsdp.ir.meta import forget_heads, take_over
from compiled_fsdp.ir.schema import TO_LOWER, UNSHARD, param_spec, set_param_spec, traits_of
from compiled_fsdp.ir.spec import AGAIN, NEXT

from .scaling import scaled_one
from .step_gathers import gathered_first, gathered_last
from .step_updates import flat_grad_of, update
from .whole_step import INSTEAD, tangents_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.plan import Plan

    from .whole_step import WholeStep

    Halves = tuple[GraphModule, GraphModule]


def stitch(
    forward: GraphModule,
    backward: GraphModule,
    num_outputs: int,
    step: WholeStep,
    plan: Plan,
    *,
    is_fused: bool,
) -> Halves:
    """One graph of both halves, and a backward without a node.

    num_outputs: of the values that forward returns, how many are not for backward.
    plan: how large a bucket may be.
    is_fused: as for `driver.run_half`.

    Raises:
        NotImplementedError: a half has what the graph of a whole step cannot have; the text says
            what, and what to write instead.
    """
    graph, end = forward.graph, output(forward.graph)
    if plan.optimizer_state is None:
        step = replace(step, states=())
    pairs = returned(end)
    into = _saved(backward.graph, [node for node, _ in pairs[num_outputs:]], step)
    set_returned(end, pairs[:num_outputs])
    kept = gathered_last(graph, plan)
    tangents = tangents_of(backward.graph, step)
    places = places_of(tangents, end, num_outputs)
    inverse = pairs[places[0] - 1][0] if step.is_scaled else None
    into.update({tangent: _one(tangent, end, inverse) for tangent in tangents})
    _copy_nodes(backward, forward, into, kept)
    for node in find(graph, *TO_LOWER):
        set_param_spec(node, replace(param_spec(node), overlap=""))
    for node in gathered_first(graph, plan, step.max_ahead_bytes):
        set_param_spec(node, replace(param_spec(node), overlap=NEXT))
    inputs = {place_of_input(node): node for node in placeholders(graph)}
    grads = [
        flat_grad_of(into[node], kind, step, inputs)
        for node, kind in returned(output(backward.graph))
        if node and not is_mesh(kind)
    ]
    if not grads:
        raise NotImplementedError(
            f"{step.doing}: backward yields no gradient of any parameter of the model's units, so "
            "there is nothing to update. Compute the loss from the sharded model's output"
        )
    update(end, grads, step, inverse, is_fused=is_fused)
    if step.batches > 1:
        losses = [node for node in (pairs[place][0] for place in places) if node]
        _backwards_behind_forwards(graph, losses, [into[tangent] for tangent in tangents])
    nothing = _without_nodes(backward)
    for node in placeholders(graph):
        forget_heads(node)  # all losses are used
    graph.lint()
    forward.recompile()
    return forward, nothing


def _copy_nodes(
    backward: GraphModule,
    forward: GraphModule,
    into: dict[Node, Node],
    kept: Mapping[tuple[object, ParamSpec], Node],
) -> None:
    """Copy backward to the end of forward. into: what its inputs are there; after, all its nodes.
    kept: gathers of forward that it reads instead of its own.
    """
    graph, end = forward.graph, output(forward.graph)
    for node in backward.graph.nodes:
        if node in into:
            continue
        if node.op == "get_attr":
            name = f"backward_{node.target}".replace(".", "_")
            setattr(forward, name, getattr(backward, node.target))
            with graph.inserting_before(end):
                into[node] = graph.get_attr(name)
            take_over(into[node], node)
        elif node.target is UNSHARD and (into[node.args[0]], param_spec(node)) in kept:
            into[node] = kept[into[node.args[0]], param_spec(node)]
        elif node.op not in ("placeholder", "output"):
            with graph.inserting_before(end):
                into[node] = graph.node_copy(node, into.__getitem__)
            _gather_again(into[node])


def _saved(backward: Graph, saved: list[Node | None], step: WholeStep) -> dict[Node, Node]:
    """What each input of backward is in forward: first the symbols, then the tensors, each in
    order.
    """
    taken = [p for p in placeholders(backward) if not p.name.startswith("tangents")]
    given = [n for n in saved if n is not None and _is_symbol(n)]
    given += [n for n in saved if n is not None and not _is_symbol(n)]
    if len(taken) != len(given) or any(_type(a) != _type(b) for a, b in zip(taken, given)):  # noqa: B905
        raise NotImplementedError(
            f"{step.doing}: backward takes {[p.name for p in taken]}, which are not what forward "
            f"saves, {[n.name for n in given]}: states of random generators, as when dropout is "
            f"computed again on a GPU, are not supported in the graph of a whole step. {INSTEAD}"
        )
    return dict(zip(taken, given, strict=True))


def _backwards_behind_forwards(graph: Graph, losses: Sequence[Node], ones: Sequence[Node]) -> None:
    """Let the backward of each micro-batch stand between its forward and the next one's."""
    batch = batches_of(graph, losses, ones)
    backward, remaining = set(ones), set(losses)
    stage: dict[Node, int] = {}
    for node in graph.nodes:
        if not remaining or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
        own = 2 * batch[node] + (node in backward)
        stage[node] = max([own, *(stage[n] for n in node.all_input_nodes)])
        remaining.discard(node)
    end = output(graph)
    moved = [n for n in graph.nodes if n.op != "placeholder" and n is not end]
    for node in sorted(moved, key=lambda n: stage[n]):
        end.prepend(node)


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _type(node: Node) -> str:
    val = node.meta.get("val")
    return f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else type(val).__name__


def _one(tangent: Node, end: Node, inverse: Node | None) -> Node:
    """What `loss.backward()` begins with; of a scaled loss, behind its scale."""
    val = value(tangent)
    if inverse is not None:
        scale = inverse
        while scale.op != "placeholder":
            (scale,) = scale.all_input_nodes
        return scaled_one(Builder(end, tangent), val, scale)
    made = Builder(end, tangent)(
        torch.ops.aten.full.default,
        list(val.shape),
        1.0,
        dtype=val.dtype,
        device=val.device,
        pin_memory=False,
    )
    return made


def _gather_again(node: Node) -> None:
    """Say of a gather of backward that forward has gathered the same."""
    if traits_of(node.target).lowers_to == "gather":
        set_param_spec(node, replace(param_spec(node), reshard=AGAIN))


def _without_nodes(backward: GraphModule) -> GraphModule:
    """A backward of the same outputs, all of them None."""
    graph, end = Graph(), output(backward.graph)
    for node in placeholders(backward.graph):
        if node.name.startswith("tangents"):
            graph.node_copy(node)
    set_returned(graph.output(()), [(None, kind) for _, kind in returned(end)])
    return GraphModule(torch.nn.Module(), graph)
