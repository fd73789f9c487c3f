"""Call groups what they are called on every rank, so that ranks have the same graph.

Before, on ranks 0 and 1 of a (tensor parallel, shard) mesh; torch numbers groups as they are made:

    rank 0: %s = wait(all_reduce(%x, "sum", "1"))
    rank 1: %s = wait(all_reduce(%x, "sum", "2"))

After, on both:

    %s = wait(all_reduce(%x, "sum", "tp_2of4_9f86d081"))

Ours have such names from the beginning (`torch_private/groups.py:name_axes`); these are collectives
of the user's, tensor parallelism's mostly. With equal graphs, what one rank has compiled serves the
others, and the planner knows a group that both use for one.

Requires: nothing.
Ensures: collectives over a group that has a common name use it.
Leaves alone: groups without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import group_of
from compiled_fsdp.ir.graph import starts

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def name_groups(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    common_name = context_of(gm).common_name
    for node in starts(gm.graph):
        own = group_of(node)
        node.args = tuple(common_name(own) if arg == own else arg for arg in node.args)
    return gm
