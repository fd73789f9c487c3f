"""Note how many tokens go to each expert, for a profile to show.

Before, where ranks tell each other how many tokens they will send to each expert:

    %r = wait(all_to_all_single(%counts, [4, 4], [4, 4], "ep"))
    %sent = sum(%counts)
    %t = wait(all_to_all_single(%tokens, received, sent, "ep"))

After, with `Plan(record_routing=True)`:

    %r = wait(all_to_all_single(%counts, [4, 4], [4, 4], "ep"))
    %sent = sum(%counts)
    note_counts_(%r, %counts)
    %t = wait(all_to_all_single(%tokens, received, sent, "ep"))

Counts are found by what they are: whole numbers, as many to each rank, exchanged (or gathered) by
the program itself and awaited in this graph. Whether they were counts of tokens is decided where a
profile is read: they add up, rank by rank, to the rows that an all-to-all behind them moved
(`inspection/routing.py`). While no profiler is on the op reads nothing. It stands behind what reads
the sizes of the tokens on the host, so that on a device it awaits nothing but its own copy of a few
numbers. It says that it writes to `%r`, for compilers, as `compare_` does; it does not.

Requires: a lowered graph.
Ensures: one `note_counts_` for each such exchange, before the next all-to-all that moves something
    else; nothing else changes.
Leaves alone: without `Plan(record_routing=True)` everything; what carries more than `MOST` numbers
    or numbers that are not whole; sizes that only data decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_fsdp.ir.collectives import ALL_GATHER, WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import EXCHANGE, NOTE_COUNTS

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

MOST = 1 << 16
WHOLE = (torch.int32, torch.int64)


def note_routing(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    users = [n for n in find(graph, EXCHANGE, ALL_GATHER) if get_tag(n) is None]
    counted = [node for node in users if _is_count(node)]
    waits = [(node, wait) for node in counted for wait in node.users if wait.target is WAIT]
    if waits:
        consume(gm, "Plan.record_routing")
    if not plan.record_routing:
        return gm
    tokens = [node for node in users if node.target is EXCHANGE and node not in counted]
    for node, wait in waits:
        before = next((other for other in tokens if other > wait), wait.next)
        with graph.inserting_before(before):
            graph.call_function(NOTE_COUNTS, (wait, node.args[0]))
    return gm


def _is_count(node: Node) -> bool:
    """Whether it carries a few whole numbers, as many to each rank."""
    value, result = (n.meta.get("val") for n in (node.all_input_nodes[0], node))
    if not (isinstance(value, Tensor) and isinstance(result, Tensor)):
        return False
    sizes = [*value.shape, *result.shape]
    if node.target is EXCHANGE:
        splits = [each for given in node.args[1:3] for each in given or []]  # type: ignore[union-attr]
        if len(set(splits)) > 1:
            return False
        sizes += splits
    return (
        value.dtype in WHOLE
        and all(isinstance(size, int) for size in sizes)
        and 0 < value.numel() <= MOST
        and result.numel() <= MOST
    )
