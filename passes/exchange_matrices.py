"""Let matrices travel to their owners, and back, while others are orthogonalized and while backward
goes on, in the graph of a whole step.

Before:

    %p1 = momentum_(%g1, %flat1, offsets1, step)
    %x = compute(%g1)
    %p0 = momentum_(%g0, %flat0, offsets0, step)
    %v1 = wait(to_owners(%p1, numels1, owners1))
    %o1 = orthogonalize(%v1, %flat1, offsets1, owners1, step)
    %u1 = wait(from_owners(%o1, numels1, owners1))
    update_matrices_(%u1, %flat1, offsets1, step)
    %v0 = wait(to_owners(%p0, numels0, owners0))
    %o0 = orthogonalize(%v0, %flat0, offsets0, owners0, step)
    %u0 = wait(from_owners(%o0, numels0, owners0))
    update_matrices_(%u0, %flat0, offsets0, step)

After:

    %p1 = momentum_(%g1, %flat1, offsets1, step)
    %t1 = to_owners(%p1, numels1, owners1)
    %x = compute(%g1)
    %p0 = momentum_(%g0, %flat0, offsets0, step)
    %t0 = to_owners(%p0, numels0, owners0)
    %v1 = wait(%t1)
    %o1 = orthogonalize(%v1, %flat1, offsets1, owners1, step)
    %f1 = from_owners(%o1, numels1, owners1)
    %v0 = wait(%t0)
    %o0 = orthogonalize(%v0, %flat0, offsets0, owners0, step)
    %f0 = from_owners(%o0, numels0, owners0)
    %u1 = wait(%f1)
    update_matrices_(%u1, %flat1, offsets1, step)
    %u0 = wait(%f0)
    update_matrices_(%u0, %flat0, offsets0, step)

So no exchange is awaited where it was started: matrices are orthogonalized behind the start of the
next unit's, and updated behind the start of the next unit's way back. Two exchanges each way are
under way at most.

Requires: the final places of momenta.
Ensures: each way to owners starts where its momentum is there; what is orthogonalized stands behind
    the next start of such a way, and updates behind the next start of a way back.
Leaves alone: graphs that update nothing whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import MOMENTUM, TO_OWNERS, UPDATE_MATRICES

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def exchange_matrices(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    ways = [_way(momentum) for momentum in find(gm.graph, MOMENTUM)]
    last = []
    for start, *_ in ways:
        last.append(_put(start[1:], start[0]))
    for stage in (1, 2):
        before, last = last, []
        for number, way in enumerate(ways):
            following = before[number + 1 : number + 2] or last[-1:] or before
            last.append(_put(way[stage], following[0]))
    return gm


def _way(momentum: Node) -> list[list[Node]]:
    """From a momentum to the update: what is to start at once, what is to be computed at the owner,
    and what follows when it is back.
    """
    way = [momentum]
    while way[-1].target is not UPDATE_MATRICES:
        (following,) = way[-1].users
        way.append(following)
    at = 2 if way[1].target is TO_OWNERS else 1
    back = 2 if at == 2 else 1
    return [way[:at], way[at:-back], way[-back:]]


def _put(nodes: list[Node], behind: Node) -> Node:
    """Move nodes behind another; returns the last of all these."""
    for node in nodes:
        behind.append(node)
        behind = node
    return behind
