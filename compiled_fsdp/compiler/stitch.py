"""The graph of a whole training step: a forward and its backward in one, with the optimizer behind
them.

A joint graph is split as ever, so that the passes before it and torch's partitioner decide what is
computed and gathered again. Then what forward saves becomes a value inside of one graph, the
gradient of the loss is 1, and each flat gradient goes to an `update_` instead of to autograd. What
is left for autograd is a backward without a node, which nobody runs.

Where forward turns into backward, dropping parameters and gathering them again at once would gain
nothing: backward reads what forward has gathered last.

Of several micro-batches, the halves have all forwards and all backwards; here each backward comes
to stand behind its forward, so that the activations of one are alive at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_fsdp.ir.graph import (
    Builder,
    batch_leaves,
    batches_of,
    find,
    output,
    placeholders,
    sum_leaves,
    value,
)
from compiled_fsdp.ir.meta import (
    forget_heads,
    input_of,
    is_mesh,
    is_state_hosted,
    made_at,
    place_of_input,
    places_of,
    real_input,
    returned,
    set_returned,
    take_over,
)
from compiled_fsdp.ir.regions import together
from compiled_fsdp.ir.schema import (
    REDUCE_GRAD,
    TO_LOWER,
    UNSHARD,
    UPDATE,
    param_spec,
    set_param_spec,
    traits_of,
)
from compiled_fsdp.ir.spec import AGAIN, NEXT
from compiled_fsdp.wire.ignored import ignored_of

from .clip import Axes, FlatGrad, MeshAxes, Name, clipped
from .matrices import updated_whole
from .scaling import found_inf, scaled_one, unscaled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compiled_fsdp.ir.matrices import Matrix
    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.plan import Plan

    Halves = tuple[GraphModule, GraphModule]

INSTEAD = "Write the loop instead: loss.backward(), optimizer.step(), optimizer.zero_grad()"


@dataclass(frozen=True, slots=True)
class WholeStep:
    """What `compile_step` wants of a graph.

    name: by which `update_` finds the optimizer.
    clip: the largest global norm of the gradients; None: they are not clipped.
    order: all parameters by unit and name, in the order in which their norms are put together.
    meshes: of parameters that are tensor-parallel, or experts of several axes, if there are any.
    units: of the model, by what they are called in graphs; none: any.
    batches: micro-batches whose gradients are added up.
    reduces_once: whether they are added up before they are reduced.
    is_scaled: whether losses are scaled; before them, the graph returns the inverse of the scale.
    unscales: whether gradients are unscaled in the graph, not by the optimizer.
    scaler_group: over which ranks agree on gradients that are inf or NaN, beside the groups that
        gradients are reduced over, and their number.
    max_ahead_bytes: of full parameters that are gathered for the next step.
    captures: whether it is to be captured as a CUDA graph.
    matrices: that are updated whole, each at its owner.
    held_by: with a scaler and several optimizers, which of them holds each parameter.
    ignored: parameters that no unit has, by their place among the inputs of what Dynamo has
        captured: name, and groups that cut them; see `of_inputs`.
    states: of each parameter, what its optimizer remembers of it that may rest on the host: names
        of tensors of its shape and dtype.
    doing: what the user did, for errors.
    """

    name: str
    clip: float | None = None
    order: tuple[Name, ...] = ()
    meshes: tuple[MeshAxes, ...] = ()
    units: tuple[str, ...] = ()
    batches: int = 1
    reduces_once: bool = False
    is_scaled: bool = False
    unscales: bool = False
    scaler_group: tuple[str, int] = ("", 1)
    max_ahead_bytes: int = 0
    captures: bool = False
    matrices: tuple[Matrix, ...] = ()
    held_by: tuple[tuple[Name, int], ...] = ()
    ignored: tuple[tuple[int, str, Axes], ...] = ()
    states: tuple[tuple[Name, tuple[str, ...]], ...] = ()
    doing: str = "compile_step"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WholeStep | None:
        """From the options of a backend; None if they are not about a whole step."""
        wanted: Mapping[str, Any] | None = (options.get("options") or {}).get("whole_step")
        if wanted is None:
            return None
        meshes = tuple(MeshAxes(*mesh) for mesh in wanted.get("meshes", ()))
        return cls(**{**wanted, "meshes": meshes})

    def of_inputs(self, captured: GraphModule) -> WholeStep:
        """The same, of a graph of Dynamo's, some of whose inputs no unit has."""
        found = [ignored_of(real_input(node)) for node in placeholders(captured.graph)]
        ours = [(i, p) for i, p in enumerate(found) if p is not None and self.name in p.on_update]
        return replace(self, ignored=tuple((i, p.fqn, p.axes) for i, p in ours))

    def check(self, joint: GraphModule) -> None:
        """Check that a joint graph is one of this step.

        Raises:
            NotImplementedError: it is not; the text says what to write instead.
        """
        _tangents(joint.graph, self)


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
    kept = _gathered_last(graph, plan)
    tangents = _tangents(backward.graph, step)
    places = places_of(tangents, end, num_outputs)
    inverse = pairs[places[0] - 1][0] if step.is_scaled else None
    into.update({tangent: _one(tangent, end, inverse) for tangent in tangents})
    _copy_nodes(backward, forward, into, kept)
    for node in find(graph, *TO_LOWER):
        set_param_spec(node, replace(param_spec(node), overlap=""))
    for node in _first_gathered(graph, plan, step.max_ahead_bytes):
        set_param_spec(node, replace(param_spec(node), overlap=NEXT))
    inputs = {place_of_input(node): node for node in placeholders(graph)}
    grads = [
        _flat_grad(into[node], kind, step, inputs)
        for node, kind in returned(output(backward.graph))
        if node and not is_mesh(kind)
    ]
    if not grads:
        raise NotImplementedError(
            f"{step.doing}: backward yields no gradient of any parameter of the model's units, so "
            "there is nothing to update. Compute the loss from the sharded model's output"
        )
    _update(end, grads, step, inverse, is_fused=is_fused)
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


def _update(
    end: Node, grads: list[FlatGrad], step: WholeStep, inverse: Node | None, *, is_fused: bool
) -> None:
    """Unscale the gradients, clip them, and let each go to its update, at the end."""
    run, told = Builder(end, grads[-1].node), []
    updated = [grad.node for grad in grads]
    if inverse is not None:
        told = [found_inf(run, _by_optimizer(run, grads, step), _groups_that_agree(grads, step))]
    if inverse is not None and step.unscales:
        updated = unscaled(run, updated, inverse)
    if step.clip is not None:
        to_clip = [grad._replace(node=node) for node, grad in zip(updated, grads, strict=True)]
        updated = clipped(
            run, to_clip, step.clip, step.order, is_fused=is_fused, meshes=step.meshes
        )
    matrices = {(matrix.unit, matrix.fqn): matrix for matrix in step.matrices}
    states = dict(step.states)
    for node, grad in zip(updated, grads, strict=True):
        run, owned = Builder(end, grad.node), []
        if grad.fqn:
            run(UPDATE, node, grad.flat, [], step.name, *told)
            continue
        alone, numel = [], 0
        for spec in grad.specs:
            matrix = matrices.get((spec.unit, spec.fqn))
            if matrix is None:
                alone.append(spec.offset)
                numel += len(states.get((spec.unit, spec.fqn), ())) * spec.shard_numel
            else:
                owned.append((spec, matrix))
        remembered: list[Any] = [told[0] if told else None, numel, grad.is_hosted]
        if alone:
            more = remembered if numel else told
            run(UPDATE, node, grad.flat, sorted(alone), step.name, *more)
        updated_whole(run, node, grad.flat, owned, step.name, told)


def _by_optimizer(run: Builder, grads: list[FlatGrad], step: WholeStep) -> list[list[Node]]:
    """The gradients of each optimizer; of a flat gradient that belongs to several, the parts."""
    if not step.held_by:
        return [[grad.node for grad in grads]]
    numbers = dict(step.held_by)
    found: list[list[Node]] = [[] for _ in range(1 + max(numbers.values()))]
    for grad in grads:
        parts = [(numbers[spec.unit, spec.fqn], spec) for spec in grad.specs]
        holders = {number for number, _ in parts} or {numbers["", grad.fqn]}
        if len(holders) == 1:
            found[holders.pop()].append(grad.node)
            continue
        for number, spec in parts:
            end = spec.offset + spec.shard_numel
            part = run(torch.ops.aten.slice.Tensor, grad.node, 0, spec.offset, end)
            found[number].append(part)
    return found


def _groups_that_agree(grads: list[FlatGrad], step: WholeStep) -> dict[str, int]:
    """The groups over which some gradient differs, and the number of their ranks."""
    specs = [spec for grad in grads for spec in grad.specs]
    groups = {spec.group: spec.group_size for spec in specs}
    for axes in [mesh.axes for mesh in step.meshes] + [grad.axes for grad in grads]:
        groups |= dict(axes)
    if step.ignored:  # replicas need not have the same gradients of those
        groups |= {spec.replicate_group: spec.replicate_size for spec in specs}
    name, size = step.scaler_group
    if size > max(groups.values()):
        groups[name] = size
    return groups


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


def _gathered_last(forward: Graph, plan: Plan) -> dict[tuple[object, ParamSpec], Node]:
    """The parameters that are to be gathered again of the last unit that forward gathers, and of
    those before it that fit into a bucket with it, for each micro-batch: by flat buffer and
    settings.

    Also those of the bucket before, if by its distance backward would gather it while forward still
    computes with the last: the new buffer would be there when the old one is dropped. Not where
    fewer than two other units are left, since then backward has nothing to gather ahead.
    """
    batches: dict[int, dict[str, list[Node]]] = {}
    for node in find(forward, UNSHARD):
        spec = param_spec(node)
        if spec.reshard == "gather" and spec.group_size > 1:
            batches.setdefault(spec.batch, {}).setdefault(spec.unit, []).append(node)
    distance = plan.distance("backward_prefetch")
    is_early = distance is not None and distance >= 1 and plan.memory_budget is None
    kept: list[Node] = []
    for units in batches.values():
        last = _last_units(units, plan)
        names = {param_spec(node).unit for node in last}
        others = {name: nodes for name, nodes in units.items() if name not in names}
        before = _last_units(others, plan) if is_early else []
        is_left = len(others) >= len({param_spec(node).unit for node in before}) + 2
        kept += [*last, *(before if is_left else ())]
    return {(node.args[0], param_spec(node)): node for node in kept}


def _first_gathered(graph: Graph, plan: Plan, room: float) -> list[Node]:
    """The parameters of the units that forward gathers first, while they are no larger than `room`
    bytes: they may be gathered when the step before has updated them. Not under a memory budget.

    Up to the first unit that has several buffers or shares a gather with others, or is gathered
    otherwise than by the plain collective from where it is computed with: what is gathered for the
    next step goes over the wire before that, and forward would wait for all of it.
    """
    units: dict[str, list[Node]] = {}
    for node in find(graph, UNSHARD):
        spec = param_spec(node)
        if spec.reshard != AGAIN and not spec.batch and spec.group_size > 1:
            units.setdefault(spec.unit, []).append(node)
    if plan.memory_budget is not None or not units:
        return []
    limit = plan.bucket_limit(param_spec(next(iter(units.values()))[0]).group)
    found: list[Node] = []
    for bucket in together(units.values(), _full_bytes, limit):
        (nodes, *others), specs = bucket, [param_spec(node) for node in bucket[0]]
        room -= _full_bytes(nodes)
        is_plain = not any(s.gather_algorithm or s.device or s.forward_after for s in specs)
        flat, *flats = {cast("Node", node.args[0]) for node in nodes}
        is_one = not others and not flats and flat.op == "placeholder"
        if room < 0 or not (is_plain and is_one):
            break
        found += nodes
    return found


def _full_bytes(nodes: Sequence[Node]) -> int:
    return sum(param_spec(node).full_bytes() for node in nodes)


def _last_units(units: dict[str, list[Node]], plan: Plan) -> list[Node]:
    kept: list[Node] = []
    for nodes in reversed(units.values()):
        joined = [*kept, *nodes]
        limit = plan.bucket_limit(param_spec(nodes[0]).group)
        if kept and _full_bytes(joined) > limit:
            break
        kept = joined
    return kept


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


def _tangents(backward: Graph, step: WholeStep) -> list[Node]:
    """The gradients of the losses, one for each micro-batch.

    Raises:
        NotImplementedError: there are others, or fewer.
    """
    found = [p for p in placeholders(backward) if p.name.startswith("tangents")]
    count = step.batches
    if len(found) != count or any(value(p).numel() != 1 for p in found):
        shapes = [list(value(p).shape) for p in found]
        each = " for each micro-batch" if count > 1 else ""
        made = [f"{list(value(p).shape)}{made_at(p, output(backward))}" for p in found]
        raise NotImplementedError(
            f"{step.doing}: values of the shapes {shapes} require a gradient behind loss_fn; it "
            f"should be one{each}, the loss, of one element. They are: {'; '.join(made)}. Let "
            "loss_fn return the loss alone, and write to no input, buffer or attribute of a module "
            "what requires a gradient (torch.nn.utils.weight_norm and spectral_norm do; those of "
            "torch.nn.utils.parametrizations do not)"
        )
    return found


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
    """What backward gathers, forward has gathered before."""
    if traits_of(node.target).lowers_to == "gather":
        set_param_spec(node, replace(param_spec(node), reshard=AGAIN))


def _flat_grad(
    root: Node, kind: object, step: WholeStep, inputs: Mapping[int | None, Node]
) -> FlatGrad:
    """A gradient that backward returns, as the flat gradient that it has to be, or that of a
    parameter that no unit has.

    inputs: of the graph, by their place in what Dynamo has captured.
    """
    place = input_of(kind)
    for number, fqn, axes in step.ignored:
        if place == number:
            return _own_grad(root, inputs[place], fqn, axes, step)
    terms = [term for of_batch in batch_leaves(root) for term in sum_leaves(of_batch)]
    if any(term.target is not REDUCE_GRAD for term in terms):
        raise NotImplementedError(
            f"{step.doing}: backward yields a gradient of shape {list(value(root).shape)} that is "
            f"of no parameter of the model's ({kind}): an input that requires a gradient, or a "
            "parameter of another module. Detach the inputs, freeze the other module or make it a "
            f"part of the model, or leave {step.doing} out. {INSTEAD}"
        )
    specs = {replace(param_spec(term), batch=0): None for term in terms}
    for spec in specs:
        if step.units and spec.unit not in step.units:
            raise NotImplementedError(
                f"{step.doing}: backward yields a gradient of {spec.fqn} in unit "
                f"{spec.unit.split('#')[0]}, which was no part of the model that was given. Freeze "
                "that model for this step (requires_grad_(False)), or detach what it computes; if "
                f"it was put into the model since, call {step.doing} again. {INSTEAD}"
            )
        if spec.sync != "reduce" or spec.is_accumulating:
            raise NotImplementedError(
                f"{step.doing}: gradients of {spec.fqn} are not reduced in every backward "
                "(set_requires_gradient_sync, set_requires_all_reduce, or a pipeline schedule), "
                f"and a step without gradients updates nothing. {INSTEAD}"
            )
    flat: Any = terms[0].args[1]
    return FlatGrad(root, flat, list(specs), is_hosted=any(map(is_state_hosted, terms)))


def _own_grad(root: Node, param: Node, fqn: str, axes: Axes, step: WholeStep) -> FlatGrad:
    own, grad = value(param), value(root)
    if own.shape != grad.shape:
        raise NotImplementedError(
            f"{step.doing}: the gradient of {fqn}, of which this rank has {list(own.shape)}, is of "
            f"shape {list(grad.shape)}: its placements are other than the parameter's. Let "
            f"to_local(grad_placements=...) say the parameter's own. {INSTEAD}"
        )
    return FlatGrad(root, param, [], fqn, axes)


def _without_nodes(backward: GraphModule) -> GraphModule:
    """A backward of the same outputs, all of them None."""
    graph, end = Graph(), output(backward.graph)
    for node in placeholders(backward.graph):
        if node.name.startswith("tangents"):
            graph.node_copy(node)
    set_returned(graph.output(()), [(None, kind) for _, kind in returned(end)])
    return GraphModule(torch.nn.Module(), graph)
