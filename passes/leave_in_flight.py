"""Leave the last reductions of backward in flight: whoever reads the gradient waits, at best the
optimizer, unit by unit.

Before:

    %rows1 = compute(%x)
    %r1 = reduce_scatter(%rows1)
    %rows0 = compute(%rows1)
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)
    mark_grads_(%g0, %flat0, offsets0)

After:

    %rows1 = compute(%x)
    %r1 = reduce_scatter(%rows1)
    %rows0 = compute(%rows1)
    %r0 = reduce_scatter(%rows0)
    reduce_later_(%r1, %flat1, offsets1)
    reduce_later_(%r0, %flat0, offsets0)

Requires: the final order of reductions; their waits may be anywhere.
Ensures: from the last reduction backwards, as many as fit into twice the bytes of the largest have
    no last wait any more. The graph returns None for their flat gradients, and hands over to the
    unit what is under way. The order of starts is unchanged, and nothing is started later: with
    HSDP only the wait for the all-reduce is left out.
Leaves alone: units that did not ask for it (`overlap`), or have an all-reduce hook, which may
    communicate; reductions without a collective; gradients that something else reads; reductions
    that send memory which is not the graph's own (an input, or a tensor that it returns), since
    others may write to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import Builder, downstream, erase_all, output, value
from compiled_fsdp.ir.quantized import codes_of_reduction
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import MARK_GRADS, REDUCE_LATER
from compiled_fsdp.planning.planner import UNITS_IN_FLIGHT

from .base import consume

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def leave_in_flight(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for region in decide(gm.graph):
        consume(gm, unit=region.spec.unit)
        _leave(region, output(gm.graph))
    return gm


def decide(graph: Graph) -> list[Region]:
    """The last reductions, in the order of their starts."""
    regions = [r for r in find_regions(graph, "reduce") if r.starts]
    regions.sort(key=lambda r: r.starts[0])
    sizes = [r.sent_bytes for r in regions]
    room = UNITS_IN_FLIGHT * max(sizes, default=0)
    found: list[Region] = []
    for region, size in zip(reversed(regions), reversed(sizes), strict=True):
        room -= size
        if room < 0:
            break
        if region.spec.overlap and not region.spec.hook and _is_private(region):
            found.insert(0, region)
    return found


def _is_private(region: Region) -> bool:
    """Whether nobody but the unit reads the result, and nobody outside can write to what is
    sent.
    """
    end = output(region.result.graph)
    if {user.target for user in region.result.users} != {MARK_GRADS, end.target}:
        return False
    sent = {value(n).untyped_storage()._cdata for n in region.starts[-1].all_input_nodes}
    outside = [n for n in region.result.graph.nodes if n.op == "placeholder"] + end.all_input_nodes
    return all(value(n).untyped_storage()._cdata not in sent for n in outside if _is_tensor(n))


def _is_tensor(node: Node) -> bool:
    return hasattr(node.meta.get("val"), "untyped_storage")


def _leave(region: Region, end: Node) -> None:
    """Put one op in the place of the last wait, of what depends on it, and of the gradient that is
    returned.
    """
    root = region.result
    (mark,) = [user for user in root.users if user.target is MARK_GRADS]
    wait = region.waits[-1]
    _, flat, offsets = mark.args
    codes = codes_of_reduction(region.tag.specs)
    run = Builder(end, wait, region.tag)
    run(REDUCE_LATER, wait.args[0], flat, offsets, codes, *region.spec.args())
    end.args = (tuple(None if entry is root else entry for entry in end.args[0]),)  # type: ignore[union-attr]
    mark.graph.erase_node(mark)
    after = downstream(wait)
    erase_all([wait, *(n for n in region.nodes if n in after)])
