"""Let Inductor call the copies into a bucket, and what divides the sums that a reduction yields,
instead of compiling a kernel for each set of sizes and places.

Before:

    %rows = cat([reshape(%d0, [N, n0]), reshape(%d1, [N, n1])], 1)
    %s = wait(reduce_scatter(reshape(%rows, [N * (n0 + n1)])))
    %g0 = div(slice(%s, 0, 0, n0), world)
    mark_grads_(%g0, %flat0, offsets0)
    %g1 = div(slice(%s, 0, n0, n0 + n1), world)
    mark_grads_(%g1, %flat1, offsets1)

After (no node changes, only a mark on the cat and each div): the same. Inductor calls them, where
the first would be two loops in a kernel together with whatever else is computed there, a kernel for
each such neighbourhood, and the others a kernel each.

Requires: every copy into and out of a bucket stands in the graph.
Ensures: what joins pieces that are in memory, or makes a flat gradient of sums, is marked.
Leaves alone: graphs of other devices than the CPU, whose kernels are compiled sooner than called. A
    bucket of which a generated kernel would write more than a sixteenth in place, as one whose
    gradients are cast. What another generated kernel reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.fusion import is_generated, readers
from compiled_fsdp.ir.graph import CAT, find, value
from compiled_fsdp.ir.meta import call_library, get_tag
from compiled_fsdp.ir.origins import source_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten
MOST_GENERATED = 1 / 16  # of a bucket, which would be written in place


def call_copies(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for node in find(gm.graph, CAT, aten.div.Tensor, aten.clone.default):
        if get_tag(node) is None or value(node).device.type != "cpu":
            continue
        is_copy = _joins(node) if node.target is CAT else _is_finish(node)
        if is_copy and not any(map(is_generated, readers(node))):
            call_library(node)
    return gm


def _joins(cat: Node) -> bool:
    """Whether most of what it joins is in memory before."""
    pieces: list[Node] = cat.args[0]  # type: ignore[assignment]
    generated = sum(value(piece).nbytes for piece in pieces if is_generated(_origin(piece)))
    return generated <= value(cat).nbytes * MOST_GENERATED


def _origin(node: Node) -> Node:
    """The node in whose storage a value lies."""
    place = node, 0
    while (source := source_of(*place)) is not None:
        place = source
    return place[0]


def _is_finish(node: Node) -> bool:
    """Whether it makes a flat gradient of what has been summed up, or of a part of it."""
    tag, summed = get_tag(node), node.all_input_nodes[0]
    if summed.target is aten.slice.Tensor:
        summed = summed.all_input_nodes[0]
    return tag is not None and tag.kind == "reduce" and summed.target is WAIT
