"""Begin a graph with the comparison of its collectives between ranks, and with what became of it.

Before:

    %w = view(wait(all_gather(%flat)), shape)

After:

    %token = new_empty(%flat, [1])
    agree(%token, text, groups, record)
    %w = view(wait(all_gather(%flat)), shape)

The first time the graph runs, `text` is compared over every group that it communicates over
(`wire/agreement.py`): ranks that compiled different graphs stop with an error, where they would
hang. `record` says each time what runs, for `explain`; a graph that comes out of a compile cache
brings both along. The token is there for compilers, as in `watch_heads`.

Requires: the final order of collectives, and the record that `summarize` keeps.
Ensures: a graph that communicates for a unit, or has a record, begins with one `agree`. Its text
    has a line for each collective, in order, and no names that differ between processes.
Leaves alone: graphs without a tensor as input, or with collectives of the user's alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.graph import begin, is_effect_token, placeholders, starts
from compiled_fsdp.ir.meta import get_tag, take_record
from compiled_fsdp.ir.schema import AGREE
from compiled_fsdp.ir.sequence import sequence

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def agree(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    tensors = [
        node
        for node in placeholders(gm.graph)
        if isinstance(node.meta.get("val"), torch.Tensor) and not is_effect_token(node)
    ]
    record = take_record(gm)
    communicates = any(get_tag(node) is not None for node in starts(gm.graph))
    if tensors and (communicates or record):
        text, groups = sequence(gm.graph) if communicates else ("", [])
        begin(gm.graph, tensors[0], AGREE, text, groups, record)
    return gm
