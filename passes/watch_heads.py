"""Let a forward say, each time it runs, which parameters only some of its outputs lead to.

Before, where `note_heads` has found such parameters in `%flat`:

    %w = view(wait(all_gather(%flat)), shape)

After:

    %token = new_empty(%flat, [1])
    watch_heads(%token, [%flat], num_outputs, text)
    %w = view(wait(all_gather(%flat)), shape)

What runs there learns by which outputs backward comes in, and leaves parameters that no such output
leads to without a gradient, as autograd does for the unsharded model (`wire/unused_outputs.py`). It
is an op, so that it travels with the compiled code. The token is there for compilers: an op that
writes to something is neither dropped nor moved past its like.

Requires: a forward whose joint graph went through `note_heads`.
Ensures: a forward with such flat buffers begins with one `watch_heads` that names them all.
Leaves alone: backward; graphs whose outputs all lead to the same parameters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import begin, is_backward, placeholders
from compiled_fsdp.ir.meta import get_heads
from compiled_fsdp.ir.schema import WATCH_HEADS

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def watch_heads(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    flats = [node for node in placeholders(gm.graph) if get_heads(node) is not None]
    if flats and not is_backward(gm.graph):
        heads = [entry for entry in map(get_heads, flats) if entry is not None]
        text = json.dumps([list(some.items()) for _, some in heads])
        begin(gm.graph, flats[0], WATCH_HEADS, flats, heads[0][0], text)
    return gm
