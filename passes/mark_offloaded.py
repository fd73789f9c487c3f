"""Mark the saved activations that are to be in host memory from forward to backward, since the
memory budget has no room for them.

Before:

    %a = mm(%x, %w)                      # plan.offloaded has "a"
    %h = silu(%a)
    %y = mm(%h, %v)
    %dh = mm(%tangents_1, %u)
    %da = silu_backward(%dh, %a)         # reads what forward saves

After (no node changes, only a mark): the same. Where the graph is split, forward returns a copy
of %a on the host, and backward copies it back (`compiler/offload.py`).

Requires: nothing; names that the graph does not have are of another graph of the same plan.
Ensures: the nodes that allocate what is to be on the host are marked.
Leaves alone: all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.meta import offload

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def mark_offloaded(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    names = set(plan.offloaded)
    for node in (node for node in gm.graph.nodes if node.name in names):
        offload(node)
    return gm
