"""Read several numbers of a device's tensor at once: the host waits for the device once, not for
each of them.

Before, where a router has counted tokens for two ranks:

    %counts = sum(%tokens, [1])
    %a = _local_scalar_dense(select(%counts, 0, 0))
    %b = _local_scalar_dense(select(%counts, 0, 1))

After:

    %counts = sum(%tokens, [1])
    %host = device_put(%counts, "cpu")
    %a = _local_scalar_dense(select(%host, 0, 0))
    %b = _local_scalar_dense(select(%host, 0, 1))

`counts.tolist()` is one copy in eager mode, and in a graph a read for each rank that tokens go to:
of 64 ranks 128 reads a layer, with a copy and a wait each.

Requires: nothing.
Ensures: of a tensor of a device whose numbers are read one by one, the host reads one copy.
Leaves alone: tensors of the host, a single number, more than `MOST` numbers, a tensor that anything
    writes to.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.expected import hint
from compiled_fsdp.ir.graph import Builder, find, value
from compiled_fsdp.ir.storage import storage_of, written_by

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten
READ = aten._local_scalar_dense.default
COPY = torch.ops.prims.device_put.default
MOST = 1 << 16


def read_at_once(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    graph = gm.graph
    reads: dict[Node, list[Node]] = defaultdict(list)  # by what they read, what selects
    for read in find(graph, READ):
        (selected,) = read.all_input_nodes
        if selected.target is aten.select.int:
            reads[selected.all_input_nodes[0]].append(selected)
    written = {storage_of(n) for node in graph.nodes for n in written_by(node)} if reads else set()
    for source, selects in reads.items():
        tensor = value(source)
        is_few = len(selects) > 1 and hint(tensor.numel()) <= MOST
        if tensor.device.type != "cpu" and is_few and storage_of(source) not in written:
            first = min(selects)
            host = Builder(first, first)(COPY, source, torch.device("cpu"))
            for select in selects:
                _read_copy(select, host)
    return gm


def _read_copy(select: Node, host: Node) -> None:
    """Select of the copy what is read, and of the tensor itself what others need."""
    copied = Builder(select, select)(aten.select.int, host, *select.args[1:])
    select.replace_all_uses_with(copied, lambda user: user.target is READ)
    if not select.users:
        select.graph.erase_node(select)
