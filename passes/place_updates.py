"""Let the optimizer update each unit as soon as its gradient is there, in the graph of a whole
step, instead of at its end.

Before:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    %rows0 = compute(%rows1)
    %r0 = reduce_scatter(%rows0)
    %g0 = div(wait(%r0), world)
    mark_grads_(%g0, %flat0, offsets0)
    update_(%g1, %flat1, offsets1, step)
    update_(%g0, %flat0, offsets0, step)

After:

    %r1 = reduce_scatter(%rows1)
    %g1 = div(wait(%r1), world)
    mark_grads_(%g1, %flat1, offsets1)
    %rows0 = compute(%rows1)
    %r0 = reduce_scatter(%rows0)
    update_(%g1, %flat1, offsets1, step)
    %g0 = div(wait(%r0), world)
    mark_grads_(%g0, %flat0, offsets0)
    update_(%g0, %flat0, offsets0, step)

So a gradient dies where it is used, and the optimizer computes while later reductions are under
way. With clipping, what scales a gradient moves with its update: one scaled gradient is alive at a
time.

Requires: the final order of gathers and of the waits of reductions.
Ensures: each `update_`, and each `momentum_` of matrices that are updated whole, stands behind what
    it reads, and behind everything that reads its flat buffer, a collective until it is awaited;
    where a collective starts after that with neither a wait nor a matmul in between, behind its
    start, so that the wire need not wait for the update; no further.
Leaves alone: forward, backward and inference graphs, which update nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import argument, find, is_heavy, last_read, order
from compiled_fsdp.ir.schema import MARK_GRADS, MOMENTUM, UPDATE, traits_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

SCALE = torch.ops.aten.mul.Tensor


def place_updates(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    updates: dict[Node, list[Node]] = {}
    for update in find(gm.graph, UPDATE, MOMENTUM):
        updates.setdefault(cast("Node", update.args[0]), []).append(update)
    for grad, moved in reversed(updates.items()):
        flat = cast("Node", moved[0].args[1])
        if grad.target is SCALE and {*grad.users} == {*moved}:
            moved.insert(0, grad)
        position = order(gm.graph)
        read = [n for node in moved for n in node.all_input_nodes if n not in moved]
        behind = max(read, key=lambda n: position[n])
        last = last_read(flat, position)
        if last > position[behind]:
            behind = next(node for node, at in position.items() if at == last)
        behind = _past_starts(behind)
        if behind.op == "placeholder":
            continue
        for node in reversed(moved):
            behind.append(node)
    return gm


def _past_starts(node: Node) -> Node:
    """The last start of a collective behind a node, with neither a wait nor a matmul in between; if
    there is none, the node, or what says that it is a gradient.
    """
    found = node.next if node.next.target is MARK_GRADS else node
    following = node.next
    while not (
        following.op in ("output", "root") or following.target is WAIT or is_heavy(following)
    ):
        if argument(following, "owners") is not None:
            break  # matrices of an update travel behind it
        if traits_of(following.target).is_collective:
            found = following
        following = following.next
    return found
