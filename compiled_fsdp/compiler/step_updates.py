"""What becomes of the gradients in the graph of a whole step: each flat gradient is unscaled and
clipped, and goes to an `update_` instead of to autograd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.descriptors import input_of
from compiled_fsdp.ir.graph import Builder, batch_leaves, sum_leaves, value
from compiled_fsdp.ir.meta import is_state_hosted
from compiled_fsdp.ir.schema import REDUCE_GRAD, UPDATE, param_spec

from .clip import FlatGrad, clipped
from .matrices import updated_whole
from .scaling import found_inf, unscaled
from .whole_step import INSTEAD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.fx import Node

    from compiled_fsdp.ir.spec import ParamSpec

    from .clip import Axes
    from .whole_step import WholeStep


def flat_grad_of(
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
        _check_reduced(spec, step)
    flat: Any = terms[0].args[1]
    return FlatGrad(root, flat, list(specs), is_hosted=any(map(is_state_hosted, terms)))


def _check_reduced(spec: ParamSpec, step: WholeStep) -> None:
    """Check that the gradient of a parameter is one that the step updates with.

    Raises:
        NotImplementedError: the parameter is of another model, or not every backward reduces.
    """
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


def _own_grad(root: Node, param: Node, fqn: str, axes: Axes, step: WholeStep) -> FlatGrad:
    """The gradient of a parameter that no unit has, as its update takes it."""
    own, grad = value(param), value(root)
    if own.shape != grad.shape:
        raise NotImplementedError(
            f"{step.doing}: the gradient of {fqn}, of which this rank has {list(own.shape)}, is of "
            f"shape {list(grad.shape)}: its placements are other than the parameter's. Let "
            f"to_local(grad_placements=...) say the parameter's own. {INSTEAD}"
        )
    return FlatGrad(root, param, [], fqn, axes)


def update(
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
