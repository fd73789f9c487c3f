"""Let Inductor call the copies out of a bucket, instead of compiling a kernel for each shape and
offset.

Before:

    %v = wait(all_gather(%flat))
    %w0 = view(clone(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %w1 = view(clone(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1)), shape1)

After:

    %v = wait(all_gather(%flat))
    %w0 = view(copy_columns(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %w1 = view(copy_columns(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1)), shape1)

The kernels made cold starts a third slower, and a bucket lived until the last reader of a copy.

Requires: every copy out of a bucket that is to be made stands in the graph.
Ensures: each `clone` that belongs to a gather is a `copy_columns` of the same values.
Leaves alone: clones of the user's, and those that belong to a reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.schema import COPY_COLUMNS

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def copy_columns(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    for node in find(gm.graph, torch.ops.aten.clone.default):
        tag = get_tag(node)
        if tag is not None and tag.kind == "gather":
            node.target, node.kwargs = COPY_COLUMNS, {}
    return gm
