"""Start the first all-gathers of the next step behind the updates that allow them, in the graph of
a whole step.

Before:

    %a0 = gather_ahead(%flat0, %flat0)
    %w0 = view(wait(%a0), shape0)
    %y = compute(%w0)
    update_(%g1, %flat1, offsets1, step)
    update_(%g0, %flat0, offsets0, step)

After:

    %a0 = gather_ahead(%flat0, %flat0)
    %w0 = view(wait(%a0), shape0)
    %y = compute(%w0)
    update_(%g0, %flat0, offsets0, step)
    gather_next(%flat0)
    update_(%g1, %flat1, offsets1, step)

So the wire works while the other units are updated, the user loads the next batch, and the next
step begins, whose `gather_ahead` finds the gather under way. Of the updates that wait for the last
reduction, those come first whose units are gathered first.

Requires: the final places of updates; gathers that may be under way already.
Ensures: each `gather_ahead` has one `gather_next` of the same piece, behind the updates of the
    buffer, in the order of forward; one of a buffer that the graph does not update (frozen), behind
    that of the gather before it, or, first of all, before that of the next.
Leaves alone: graphs that update none of these buffers. Updates that stand before the last
    wait, where they fill the time until it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import Builder, find, order, output
from compiled_fsdp.ir.meta import CommTag, get_tag
from compiled_fsdp.ir.schema import GATHER_AHEAD, GATHER_NEXT, UPDATE, UPDATE_MATRICES

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def gather_next(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    updates: dict[object, list[Node]] = {}
    for update in find(gm.graph, UPDATE, UPDATE_MATRICES):
        updates.setdefault(update.args[1], []).append(update)
    gathers = find(gm.graph, GATHER_AHEAD)
    first = next((node.args[1] for node in gathers if node.args[1] in updates), None)
    if first is None:
        return gm
    _sort_last(gm, [node.args[1] for node in gathers])
    behind: Node | None = None
    for gather in gathers:
        position = order(gm.graph)
        _, flat, *piece = gather.args
        last = [*updates.get(flat, ()), *(updates[first] if behind is None else [behind])]
        behind = max(last, key=lambda node: position[node])
        tag = get_tag(gather)
        assert tag is not None
        run = Builder(behind.next, behind, CommTag("next", tag.region, tag.specs))
        behind = run(GATHER_NEXT, flat, *piece)
    return gm


def _sort_last(gm: GraphModule, flats: list[object]) -> None:
    """Let updates behind the last wait come in the order in which forward gathers."""
    position, end = order(gm.graph), output(gm.graph)
    waited = max((position[node] for node in find(gm.graph, WAIT)), default=-1)
    last = [node for node in find(gm.graph, UPDATE) if position[node] > waited]
    place = {flat: i for i, flat in reversed([*enumerate(flats)])}
    for update in sorted(last, key=lambda node: place.get(node.args[1], len(flats))):
        grad: Node = update.args[0]  # type: ignore[assignment]
        if position[grad] > waited and list(grad.users) == [update]:
            end.prepend(grad)  # scaled for the update
        end.prepend(update)
