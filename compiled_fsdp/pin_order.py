"""Keep the planned order through Inductor's scheduler.

Inductor knows no time: `reorder_for_peak_memory` moves an early all-gather back to its wait, and horizontal fusion copies all
parameters out of a bucket at once. Both undo the plan. So before fusion, in graphs of ours only, every kernel that is not
generated (collectives, waits, matmuls, attention) is made to follow the one before it in the graph, and every copy into or
out of a bucket to follow the last of them. The dependencies are fake: they order, and keep no buffer alive.

Inductor also knows no sends and receives of ours: it writes the next value into a buffer that nothing reads any more, be it
still on its way to other ranks. So what a collective reads, or what is left in flight, is never reused; it is freed as ever.

Private torch used here (tried on 2.13): the scheduler's `_pre_fusion_custom_pass`, `WeakDep(is_fake=True)`, `add_fake_dep`,
`compute_ancestors`, `V.graph.never_reuse_buffers`. `tests/numerics/test_inductor.py` compares the generated code with the plan
and would notice a change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V

from . import meta
from .collectives import STARTS
from .schema import REDUCE_LATER

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

ASYNCHRONOUS = (*STARTS, REDUCE_LATER)


def pin_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Add the ordering dependencies; the list itself is returned as it came."""
    for node in nodes:  # tensor parallelism's own gathers too, which are no communication of a unit
        if getattr(node.node, "op_overload", None) in ASYNCHRONOUS:
            V.graph.never_reuse_buffers.update(read.name for read in node.read_writes.reads)
    ours = [node for node in nodes if _is_ours(node)]
    if not ours:
        return nodes
    pinned = set(ours)
    anchor: BaseSchedulerNode | None = None
    for node in sorted(nodes, key=_number):
        is_anchor = isinstance(node, ExternKernelSchedulerNode) or node.is_template()
        if anchor is not None and (is_anchor or node in pinned):
            _follow(node, anchor)
        if is_anchor:
            anchor = node
    nodes[0].scheduler.compute_ancestors()
    return nodes


def _is_ours(node: BaseSchedulerNode) -> bool:
    origins = node.node.get_origins() if node.node is not None else ()
    return any(meta.get_tag(origin) is not None for origin in origins)


def _number(node: BaseSchedulerNode) -> int:
    """Position in the order in which the graph was lowered: operations are named op0, op1, ..."""
    match = re.search(r"\d+", node.get_name())
    return int(match.group()) if match else 0


def _follow(node: BaseSchedulerNode, earlier: BaseSchedulerNode) -> None:
    # Nothing mutates; naming the earlier buffer makes the scheduler find no write to compare, and leave the edge alone.
    for buffer in earlier.get_buffer_names():
        node.add_fake_dep(WeakDep(buffer, mutating_buf=buffer, is_fake=True))
