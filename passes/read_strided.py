"""Leave small parameters in the bucket that brought them, where generated kernels read them with
gaps between the ranks' rows.

Before:

    %v = wait(all_gather(%flat))
    %w0 = view(clone(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %y0 = mm(%x, %w0)
    %w1 = view(clone(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1)), shape1)
    %y1 = mul(%y0, %w1)

After, a matmul needs its operand in one piece, a pointwise kernel does not:

    %v = wait(all_gather(%flat))
    %w0 = view(clone(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %y0 = mm(%x, %w0)
    %w1 = view(reshape(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1), [N * n1]), shape1)
    %y1 = mul(%y0, %w1)

No copy runs, and none is in memory; instead the bucket lives until it is read for the last time,
and Inductor compiles a kernel for each place in a bucket, where layers could share one
(`Plan.copy_out`).

Requires: a lowered graph, and a compiler that generates the readers (`Plan.executed_by` sees to
    that).
Ensures: where the plan asks for strided reads, what only generated kernels read is not copied; from
    costs, if the copies that are left out make up a hundredth of the graph's predicted time, and of
    rows that fill cache lines only (`choices.py`).
Leaves alone: what a matmul, another library call or a collective reads; what the graph returns, as
    parameters kept for backward are; parameters with a message of their own, which are never
    copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.fusion import is_generated, readers
from compiled_fsdp.ir.graph import Builder, find, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.planning.choices import worth_reading_strided
from compiled_fsdp.planning.planner import predict

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten


def read_strided(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    copies = [n for n in find(gm.graph, aten.clone.default) if _is_copy_out(n)]
    if copies:
        consume(gm)
    if plan.copy_out == "copy":
        return gm
    found = [n for n in copies if all(is_generated(reader) for reader in readers(n))]
    if plan.copy_out is None:
        costs = plan.costs
        found = (
            []
            if costs is None
            else worth_reading_strided(costs, found, predict(gm.graph, costs).total)
        )
    for copied in found:
        _read(copied)
    return gm


def _is_copy_out(node: Node) -> bool:
    tag = get_tag(node)
    return (
        tag is not None
        and tag.kind == "gather"
        and not value(node.all_input_nodes[0]).is_contiguous()
    )


def _read(copied: Node) -> None:
    run = Builder(copied, copied, get_tag(copied))
    copied.replace_all_uses_with(
        run(aten.reshape.default, copied.all_input_nodes[0], [value(copied).numel()])
    )
    copied.graph.erase_node(copied)
