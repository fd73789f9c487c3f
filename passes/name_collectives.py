"""Let our own collectives say what they carry, for errors and profiles.

Before; all three are ours:

    %v = wait(all_gather(%shard, sizes))
    %r = wait(all_to_all([%rows]))
    %s = wait(all_reduce(%row))

After, with two words more:

    %v = wait(all_gather(%shard, sizes, what="layers.0 (weight)", phase="forward"))
    %r = wait(all_to_all([%rows], what="layers.0 (weight)", phase="forward"))
    %s = wait(all_reduce(%row, what="layers.0 (weight)", phase="forward"))

Requires: nothing.
Ensures: each of these ops names the unit and the parameters that it carries, and the phase.
Leaves alone: torch's collectives, which take no such words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find, phase_of
from compiled_fsdp.ir.schema import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from compiled_fsdp.ir.sequence import owner

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def name_collectives(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for node in find(gm.graph, ALL_GATHER, ALL_TO_ALL, ALL_REDUCE):
        node.kwargs = {"what": owner(node), "phase": phase_of(gm.graph)}
    return gm
