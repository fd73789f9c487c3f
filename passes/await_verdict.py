"""Let the ranks compare their checksums before anything is updated, in the graph of a whole step.

Before:

    %s1 = checksum([%rows1], N, sizes1, sizes1)
    %v1 = wait(all_to_all([%rows1], N))
    %r1 = checksum([%v1], N, sizes1, sizes1)
    compare_(%s1, %r1, [], [], [], "all-to-all", "backward", names1)
    %g1 = div(sum(%v1, [0]), world)
    mark_grads_(%g1, %flat1, offsets1)
    %rows0 = compute(%rows1)
    %s0 = checksum([%rows0], N, sizes0, sizes0)
    %e0 = all_to_all([%rows0], N)
    update_(%g1, %flat1, offsets1, step)
    %v0 = wait(%e0)
    %r0 = checksum([%v0], N, sizes0, sizes0)
    compare_(%s0, %r0, [], [], [], "all-to-all", "backward", names0)
    %g0 = div(sum(%v0, [0]), world)
    mark_grads_(%g0, %flat0, offsets0)
    update_(%g0, %flat0, offsets0, step)

After:

    %s1 = checksum([%rows1], N, sizes1, sizes1)
    %v1 = wait(all_to_all([%rows1], N))
    %r1 = checksum([%v1], N, sizes1, sizes1)
    compare_(%s1, %r1, [], [], [], "all-to-all", "backward", names1)
    %g1 = div(sum(%v1, [0]), world)
    mark_grads_(%g1, %flat1, offsets1)
    %rows0 = compute(%rows1)
    %s0 = checksum([%rows0], N, sizes0, sizes0)
    %v0 = wait(all_to_all([%rows0], N))
    %r0 = checksum([%v0], N, sizes0, sizes0)
    compare_(%s0, %r0, [], [], [], "all-to-all", "backward", names0)
    %g0 = div(sum(%v0, [0]), world)
    mark_grads_(%g0, %flat0, offsets0)
    verdict_([%g1, %g0], [%s1, %s0], %flat1, step)
    update_(%g1, %flat1, offsets1, step)
    update_(%g0, %flat0, offsets0, step)

`verdict_` raises on all ranks if something differs: no parameter and no optimizer's state has been
written to then. What it costs: the host reads one value in the middle of the step, all gradients
are alive at once, and no update fills the time of a reduction, as with clipping.

Requires: the final places of updates; sums on both sides of what travels.
Ensures: one `verdict_` behind all `compare_`, all marks, and what the updates read; all updates and
    `momentum_`, what scales their gradients, and the ways of matrices, behind it, in their order.
Leaves alone: graphs without updates, or without sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from compiled_fsdp.ir.graph import Builder, downstream, find, is_step, order
from compiled_fsdp.ir.schema import COMPARE, MARK_GRADS, MOMENTUM, UPDATE, VERDICT

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

SCALE = torch.ops.aten.mul.Tensor


def await_verdict(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    compared, updates = find(gm.graph, COMPARE), find(gm.graph, UPDATE, MOMENTUM)
    if not compared or not is_step(gm.graph):
        return gm
    moved: list[Node] = []
    grads: dict[Node, None] = {}
    for update in updates:
        grad = cast("Node", update.args[0])
        if grad.target is SCALE and {*grad.users} <= {*updates}:
            moved += [] if grad in moved else [grad]
            grad = cast("Node", grad.args[0])
        moved.append(update)
        grads[grad] = None
    position = order(gm.graph)
    ways = {node for momentum in find(gm.graph, MOMENTUM) for node in downstream(momentum)}
    moved += sorted(ways, key=lambda node: position[node])  # where its matrices go
    read = [n for node in moved for n in node.all_input_nodes if n not in moved]
    behind = max((*compared, *find(gm.graph, MARK_GRADS), *read), key=lambda node: position[node])
    sums = list(dict.fromkeys(cast("Node", node.args[0]) for node in compared))
    _, flat, _, step, *_ = updates[0].args
    verdict = Builder(behind.next, updates[0])(VERDICT, list(grads), sums, flat, step)
    for node in reversed(moved):
        verdict.append(node)
    return gm
