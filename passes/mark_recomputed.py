"""Mark the saved activations that backward is to compute again, since the memory budget has no room
for them.

Before:

    %a = mm(%x, %w)                      # plan.recomputed has "a"
    %h = silu(%a)
    %y = mm(%h, %v)
    %dh = mm(%tangents_1, %u)
    %da = silu_backward(%dh, %a)         # reads what forward saves

After (no node changes, only a mark): the same. Where the graph is split, forward does not save %a,
and backward gets a copy of the mm before silu_backward (`compiler/recompute.py`).

Requires: nothing; names that the graph does not have are of another graph of the same plan.
Ensures: the nodes that allocate what is to be computed again are marked.
Leaves alone: all others, and the partitioner's own choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.meta import compute_again

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def mark_recomputed(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    names = set(plan.recomputed)
    for node in (node for node in gm.graph.nodes if node.name in names):
        compute_again(node)
    return gm
