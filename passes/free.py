"""End the life of every gathered or received buffer where it is last used, as a node.

Before:

    %v = wait(all_gather(%flat))
    %w = view(%v, shape)
    %y = mm(%x, %w)

After:

    %v = wait(all_gather(%flat))
    %w = view(%v, shape)
    %y = mm(%x, %w)
    free(%v)

The no-Inductor backend drops its reference there, and with it the storage. Inductor frees by
liveness at the same place, and gets the graph without these nodes.

Requires: the final order of collectives.
Ensures: each awaited all-gather and all-to-all has one `free` after the last use of it and of its
    views.
Leaves alone: buffers that the graph returns (kept for backward), results that become gradients, and
    what the user gathers and awaits more than once, so that several names stand for one buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import Builder, aliases, find, order, output
from compiled_fsdp.ir.schema import FREE, traits_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def free(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    position = order(gm.graph)
    for buffer, last in [(b, _last_use(b, position)) for b in _buffers(gm)]:
        if last is not None:
            Builder(last.next, last)(FREE, buffer)
    return gm


def _buffers(gm: GraphModule) -> list[Node]:
    """Waits whose result is a buffer made for the communication, and that nobody else awaits."""
    waits = [w for w in find(gm.graph, WAIT) if traits_of(w.all_input_nodes[0].target).is_buffer]
    return [w for w in waits if len(w.all_input_nodes[0].users) == 1]


def _last_use(buffer: Node, position: dict[Node, int]) -> Node | None:
    """The last reader of the buffer or a view of it, a collective until it is awaited; None if the
    graph returns one.
    """
    users = [u for alias in aliases(buffer) for u in (alias, *alias.users)]
    users += [wait for u in users if traits_of(u.target).starts for wait in u.users]
    if output(buffer.graph) in users:
        return None
    return max(users, key=lambda n: position[n])
