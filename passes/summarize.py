"""Write down what became of a graph, for `explain` and dumps, before compilers' details are added.

Before, and after, since nothing is rewritten:

    %w = view(wait(all_gather(%flat)), shape)

Requires: all that decides what is communicated, when, and how long buffers live.
Ensures: the record (`dump/graph_record.py`) is kept with the graph until `agree` takes it.
Leaves alone: every node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.meta import set_record

from .base import context_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def summarize(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    set_record(gm, context_of(gm).record(gm))
    return gm
