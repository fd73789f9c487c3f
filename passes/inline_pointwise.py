"""Compute cheap values again in the region that reads them, where a region before it would
otherwise write them to memory.

Before:

    %silu = sigmoid(%gate)
    %grad_w = mm(%grad, mul(%silu, %up))
    %w = view(wait(all_gather(%flat)), shape)
    %grad_up = mul(mm(%grad, %w), %silu)

After:

    %silu = sigmoid(%gate)
    %grad_w = mm(%grad, mul(%silu, %up))
    %w = view(wait(all_gather(%flat)), shape)
    %again = sigmoid(%gate)
    %grad_up = mul(mm(%grad, %w), %again)

Both sides of the wait will be calls of regions. Within a graph Inductor does so by itself: it puts
pointwise nodes into all kernels that read them. Over the border of a call it cannot, and what
passes one is written and read: here of an activation, in fp32 where it is rounded later.

Requires: the graph in its final order.
Ensures: what a region reads instead takes no more bytes than what it read, and was in memory when
that was made, so that no more memory is needed anywhere; the numbers are those of the same kernels
without regions.
Leaves alone: values that others read too; those computed of parameters, which would live on, and of
what the graph writes to; all that `outline` does not call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import move_before
from compiled_fsdp.ir.inlined import inlined_into
from compiled_fsdp.ir.repeats import find_repeats
from compiled_fsdp.ir.storage import storage_of, written_by

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.ir.spans import Span
    from compiled_fsdp.planning.plan import Plan


def inline_pointwise(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    if plan.regions == "off" or context_of(gm).inline:
        return gm
    repeats = find_repeats(gm.graph)
    home = {node: span for span in repeats.spans for node in span.nodes}
    written = {storage_of(n) for node in gm.graph.nodes for n in written_by(node)}
    for group in repeats.groups:
        found = [inlined_into(span, home, written) for span in group]
        # else the spans would not be equal any more
        if found[0] and len({tuple(n.target for n in nodes) for nodes in found}) == 1:
            for span, nodes in zip(group, found, strict=True):
                _inline(span, nodes)
    return gm


def _inline(span: Span, nodes: list[Node]) -> None:
    """Copy nodes to the begin of a span, for it to read."""
    first = span.nodes[span.num_moved]
    move_before(span.nodes[: span.num_moved], first)
    copies: dict[Node, Node] = {}
    with first.graph.inserting_before(span.nodes[0]):
        for node in nodes:
            copies[node] = first.graph.node_copy(node, lambda n: copies.get(n, n))
    for node, copied in copies.items():
        node.replace_all_uses_with(copied, lambda user: user in span.inside)
