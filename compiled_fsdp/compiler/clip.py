"""Clipping by the global norm of all gradients, as nodes of the graph of a whole step: what
`torch.nn.utils.clip_grad_norm_` computes, op by op.

    %n = cat([shard_norms(%flat_grad, %flat, offsets), ...])         # of this rank's shards
    %s = wait(all_reduce(pow(%n, 2), "sum"))
    %t = vector_norm(pow(%s, 0.5))                                   # the global norm
    %c = minimum(mul(reciprocal(add(%t, 1e-6)), clip), 1)
    %g = mul(%flat_grad, %c)                                         # of each flat gradient

The unit reads each shard without the zeros that fill it up, as the loop does: they would change the
order of additions, and the graph is the same on every rank. For a compiler the norms are nodes
(`vector_norm(%g)`), and it reads the zeros too: its last bits are its own in any case.

Parameters that other ranks gather (experts on a mesh of their own) have norms of their own, put
together in the end:

    %t = vector_norm(cat([%t0, %t1]))

With tensor parallelism the norms of all parameters are put together over one axis of the mesh after
the other, as DTensor does it; one that an axis does not cut is divided by the root of its size:

    %n = cat([%norm0, div(%norm1, sqrt(2))])                         # %g1 is whole on axis "tp"
    %s = pow(wait(all_reduce(pow(%n, 2), "sum", "dp")), 0.5)
    %s = pow(wait(all_reduce(pow(%s, 2), "sum", "tp")), 0.5)
    %t = vector_norm(%s)

The norm of a parameter that no unit has is `vector_norm(%grad)`; it lies on the axes that cut it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import value
from compiled_fsdp.ir.schema import SHARD_NORMS
from compiled_fsdp.torch_private.norms import in_groups

from .scaling import scaled_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Node

    from compiled_fsdp.ir.graph import Builder
    from compiled_fsdp.ir.spec import ParamSpec

aten = torch.ops.aten
EPSILON = 1e-6  # clip_grad_norm_'s
# Of a parameter: its unit's, and its own, which several models in one step may have alike.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """A mesh of parameters that are DTensors by themselves: tensor-parallel ones, or experts.

    axes: the axes that cut any of them: group and size, in the order of the mesh.
    cut: of each parameter that is a DTensor by itself, the groups that cut it; others are cut by
        the group that gathers them.
    """

    axes: tuple[tuple[str, int], ...]
    cut: tuple[tuple[Name, tuple[str, ...]], ...]


Axes = tuple[tuple[str, int], ...]


class FlatGrad(NamedTuple):
    """A reduced flat gradient in a graph, its flat buffer, and the parameters that it is of.

    fqn, axes: of a parameter that no unit has, which is `flat` itself: its name, and the groups
        that cut it. There are no specs then.
    is_hosted: whether what the optimizer remembers of these is to rest on the host.
    """

    node: Node
    flat: Node
    specs: list[ParamSpec]
    fqn: str = ""
    axes: Axes = ()
    is_hosted: bool = False

    @property
    def offsets(self) -> list[int]:
        """Where they begin."""
        return [spec.offset for spec in self.specs]


def clipped(
    run: Builder,
    grads: Sequence[FlatGrad],
    max_norm: float,
    order: Sequence[Name],
    *,
    is_fused: bool,
    meshes: Sequence[MeshAxes] = (),
) -> list[Node]:
    """The gradients times one coefficient, which keeps their global norm from exceeding
    `max_norm`.

    order: the parameters, in which their norms are put together.
    is_fused: in ops that a compiler makes kernels of, where some of torch's no longer are.
    meshes: of parameters that several axes cut.
    """
    norm = _fused_norm if is_fused else _norm
    norms = _by_axes(run, grads, order, meshes, is_fused=is_fused)
    found = []
    for axes, local in norms.items():
        shards_of = _stacked(run, local)
        for group, size in axes:
            if size > 1:
                squares = run(aten.pow.Tensor_Scalar, shards_of, 2)
                summed = run(comm.WAIT, run(comm.ALL_REDUCE, squares, "sum", group))
                shards_of = run(aten.pow.Tensor_Scalar, summed, 0.5)
        found.append(norm(run, shards_of))
    total = found[0] if len(found) == 1 else norm(run, _stacked(run, found))
    inverse = run(aten.reciprocal.default, run(aten.add.Tensor, total, EPSILON))
    factor = run(aten.mul.Tensor, inverse, max_norm)
    val = value(factor)
    one = run(aten.full.default, [], 1.0, dtype=val.dtype, device=val.device, pin_memory=False)
    factor = run(aten.minimum.default, factor, one)
    return [scaled_by(run, grad.node, factor) for grad in grads]


def _by_axes(
    run: Builder,
    grads: Sequence[FlatGrad],
    order: Sequence[Name],
    meshes: Sequence[MeshAxes],
    *,
    is_fused: bool,
) -> dict[Axes, list[Node]]:
    """The norm of each parameter on this rank, by the axes over which they are put together, those
    of one dtype behind each other as torch has them.
    """
    norm = _fused_norm if is_fused else _norm
    place = {name: i for i, name in enumerate(order)}
    own_norms = _fused_norms if is_fused else _norms
    cut = {name: (mesh, by) for mesh in meshes for name, by in mesh.cut}
    of_group = {group: mesh for mesh in reversed(meshes) for group, _ in mesh.axes}
    shards: list[tuple[int, Node, Axes]] = []
    for grad in grads:
        if grad.fqn:
            shards.append((place["", grad.fqn], norm(run, grad.node), grad.axes))
            continue
        for own, spec in zip(own_norms(run, grad), grad.specs, strict=True):
            name = (spec.unit, spec.fqn)
            axes: Axes = ((spec.group, spec.group_size),)
            mesh, by = cut.get(name, (of_group.get(spec.group), (spec.group,)))
            if mesh is not None:
                axes = mesh.axes
                for size in [size for group, size in axes if group not in by]:
                    own = run(aten.div.Tensor, own, size**0.5)
            shards.append((place[name], own, axes))
    shards.sort(key=lambda shard: shard[0])
    norms: dict[Axes, list[Node]] = {}
    for at in in_groups([value(own).dtype for _, own, _ in shards], value(shards[0][1]).device):
        _, own, axes = shards[at]
        norms.setdefault(axes, []).append(own)
    return norms


def _norms(run: Builder, grad: FlatGrad) -> list[Node]:
    found = run(SHARD_NORMS, grad.node, grad.flat, grad.offsets)
    return [run(aten.slice.Tensor, found, 0, i, i + 1) for i in range(len(grad.offsets))]


def _fused_norms(run: Builder, grad: FlatGrad) -> list[Node]:
    ends = [(spec.offset, spec.offset + spec.shard_numel) for spec in grad.specs]
    return [_fused_norm(run, run(aten.slice.Tensor, grad.node, 0, *each)) for each in ends]


def _norm(run: Builder, x: Node) -> Node:
    result: Node = run(aten.linalg_vector_norm.default, x)
    return result


def _fused_norm(run: Builder, x: Node) -> Node:
    squares = run(aten.sum.default, run(aten.mul.Tensor, x, x))
    result: Node = run(aten.sqrt.default, squares)
    return result


def _stacked(run: Builder, norms: Sequence[Node]) -> Node:
    result: Node = run(aten.cat.default, [run(aten.reshape.default, n, [1]) for n in norms])
    return result
