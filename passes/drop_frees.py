"""Take the `free` nodes out again for Inductor, which frees by liveness, at the same places.

Before:

    %v = wait(all_gather(%flat))
    %w = view(%v, shape)
    %y = mm(%x, %w)
    free(%v)

After:

    %v = wait(all_gather(%flat))
    %w = view(%v, shape)
    %y = mm(%x, %w)

Requires: nothing.
Ensures: no `free` is left.
Leaves alone: everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import erase_all, find
from compiled_fsdp.ir.schema import FREE

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def drop_frees(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    erase_all(find(gm.graph, FREE))
    return gm
