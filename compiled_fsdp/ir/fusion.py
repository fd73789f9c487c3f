"""Fusion by Inductor, as far as memory goes: which values of a graph never get a buffer.

A pointwise value is computed inside the kernels that read it, if only generated kernels nearby read
it. Which ops are pointwise is what torch's tag says and what Inductor lowers as such without it.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .collectives import CONVERT
from .graph import aliases, is_view
from .meta import get_tag
from .schema import traits_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node

aten = torch.ops.aten
CONSTANT = (aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default)
# What Inductor turns into writes over an argument, after the passes,
# where it stands in the outer graph.
BECOME_WRITES = frozenset(
    (
        aten.copy.default,
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.as_strided_scatter.default,
    )
)
POINTWISE = (  # by Inductor's lowering, without torch's tag
    *CONSTANT,
    CONVERT,
    aten.cat.default,
    aten.clone.default,
    aten.copy.default,
    aten.constant_pad_nd.default,
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.where.self,
)
GENERATED = (  # kernels that Inductor generates, other than pointwise ones
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.argmax.default,
    aten.mean.dim,
    aten.prod.dim_int,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
)
# What is generated too, by name: Inductor registers it when it is imported, and puts it into graphs
# for a device.
GENERATED_ON_DEVICES = ("prims::prepare_softmax_online",)
MOST_READS = 8  # Inductor's limit on what a value may be computed from before it gets a buffer


def inlined(graph: Graph) -> set[Node]:
    """Values that Inductor computes inside the kernels that read them: pointwise, and read only by
    generated kernels before the next call of a library's.
    """
    segment = segments(graph)
    found: set[Node] = set()
    for node in graph.nodes:
        if is_pointwise(node):
            users = readers(node)
            is_near = node.target in CONSTANT or all(segment[r] == segment[node] for r in users)
            if is_near and all(is_generated(r) for r in users):
                found.add(node)
        elif is_read_strided(node):
            found.add(node)
    return found


def segments(graph: Graph) -> dict[Node, int]:
    """For each node, how many calls of a library's kernels are before it."""
    found: dict[Node, int] = {}
    calls = 0
    for node in graph.nodes:
        found[node] = calls
        calls += (
            node.op == "call_function"
            and not is_generated(node)
            and node.target is not operator.getitem
            and traits_of(node.target).price == "kernel"  # others are no reason to split a chain
        )
    return found


def readers(node: Node) -> list[Node]:
    """Returns what reads a value or a view of it."""
    return [u for alias in aliases(node) for u in alias.users if not is_view(u)]


def is_generated(node: Node) -> bool:
    """Whether Inductor generates the kernel, and so can read its inputs as they lie."""
    return is_pointwise(node) or _is_reduction(node.target) or is_view(node)


def is_read_strided(node: Node) -> bool:
    """Whether kernels read this in the bucket that brought it (`passes/read_strided.py`)."""
    tag = get_tag(node)
    return node.target is aten.reshape.default and tag is not None and tag.kind == "gather"


def is_pointwise(node: Node) -> bool:
    """Whether Inductor computes each element of the result by itself."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    tag = get_tag(node)
    if node.target is aten.clone.default and tag is not None and tag.kind == "gather":
        # a call of `copy_columns`, so that the bucket need not live until the copy is read
        return False
    return _is_pointwise(node.target)


@cache
def _is_reduction(target: Any) -> bool:
    if target in GENERATED:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.name() in GENERATED_ON_DEVICES


@cache
def _is_pointwise(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or op in POINTWISE
