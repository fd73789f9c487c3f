"""Gather over gloo by sends and receives, and all-reduce by an op that has a name in profiles.

Before:

    %v = wait(all_gather(%shard))
    %s = wait(all_reduce(%row))

After; `all_gather` is torch's op before, and ours after:

    %v = wait(fsdp_all_gather(%shard, [numel]))
    %s = wait(fsdp_all_reduce(%row))

The eager runtime gathers likewise (`wire/gloo.py`), and so may what the user gathers: over gloo
torch's own all-gather is not safe. What has a size that is no number (`dynamic=True`) is said to be
one piece by no sizes at all: a symbol is nothing that a graph can name. Whether a group is one of
gloo's is known to the context alone.

Requires: nothing.
Ensures: no all-gather of torch's is left over a group of gloo's.
Leaves alone: groups of other backends; all-reduces of the user's; collectives of ours by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import find, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import ALL_GATHER, ALL_REDUCE

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def use_gloo(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    is_gloo = context_of(gm).is_gloo
    for node in find(gm.graph, comm.ALL_GATHER):
        (shard,), (_, *others) = node.all_input_nodes, node.args
        if is_gloo(comm.group_of(node), value(shard).device):
            numel = value(shard).numel()
            node.target = ALL_GATHER
            node.args = (shard, [numel] if isinstance(numel, int) else [], *others)
    for node in find(gm.graph, comm.ALL_REDUCE):
        is_ours = get_tag(node) is not None
        if is_ours and is_gloo(comm.group_of(node), value(node).device):
            node.target = ALL_REDUCE
    return gm
