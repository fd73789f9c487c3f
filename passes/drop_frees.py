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

Where several kernels read a pointwise value, Inductor may compute it in each, from the buffer: of
an `embedding`, the table would live on until the last kernel that reads its rows. If one of them
stands behind the next call of a library's kernel, the value is marked to be written where it is.

Requires: nothing.
Ensures: no `free` is left. Behind the segment in which a buffer was freed, at most one kernel reads
    it for each value, where that is the only one to read the value.
Leaves alone: everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.fusion import is_pointwise, readers, segments
from compiled_fsdp.ir.graph import aliases, erase_all, find
from compiled_fsdp.ir.meta import write_out
from compiled_fsdp.ir.schema import FREE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan


def drop_frees(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    frees = find(gm.graph, FREE)
    segment = segments(gm.graph) if frees else {}
    for end in frees:
        for value in _read_later(end, segment):
            write_out(value)
    erase_all(frees)
    return gm


def _read_later(end: Node, segment: dict[Node, int]) -> list[Node]:
    """Returns the pointwise values that several kernels would compute from a buffer, one of them
    behind the segment in which it ends.
    """
    unwritten = aliases(end.all_input_nodes[0])
    found = []
    for value in unwritten:
        for node in filter(is_pointwise, value.users):
            read_by = set(readers(node))
            last = max((segment[reader] for reader in read_by), default=0)
            if len(read_by) > 1 and last > max(segment[node], segment[end]):
                found.append(node)
            elif node not in unwritten:
                unwritten += aliases(node)
    return found
