"""Let the user's all-to-alls, tokens for experts mostly, run on a group of their own.

Before, where expert parallelism is over the ranks that also share parameters:

    %w = wait(all_gather(%flat, 2, "0"))
    %t = wait(all_to_all_single(%tokens, received, sent, "0"))

After:

    %w = wait(all_gather(%flat, 2, "0"))
    %t = wait(all_to_all_single(%tokens, received, sent, "0_exchanges"))

A group carries what it is given one after the other (NCCL: a stream; gloo: the connections to each
rank), so tokens that somebody waits for would stand behind a gather that could wait. The second
group has the same ranks in the same order. `fsdp::agree`, with which the graph begins, makes it
when the graph first runs in a process, after the ranks have compared what they are about to do
(`wire/own_groups.py`); one for each group, however many graphs.

Requires: a lowered graph.
Ensures: no all-to-all of the user's shares a group with a collective of ours; order and everything
    else stay.
Leaves alone: with `Plan(exchange_group="shared")` everything; groups over which nothing of ours
    goes in this graph, as that of a mesh axis for experts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import group_of, own_group
from compiled_fsdp.ir.graph import starts
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import EXCHANGE

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def separate_exchanges(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    ours = {group_of(node) for node in starts(gm.graph) if get_tag(node) is not None}
    shared = [
        node
        for node in starts(gm.graph)
        if node.target is EXCHANGE and get_tag(node) is None and group_of(node) in ours
    ]
    if shared:
        consume(gm, "Plan.exchange_group")
    for node in shared if plan.exchange_group == "own" else ():
        group = group_of(node)
        node.args = tuple(own_group(group) if arg == group else arg for arg in node.args)
    return gm
