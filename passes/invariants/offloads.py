"""Rules about activations on the host: what goes there is copied once each way, and in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.graph import (
    aliases,
    find,
    is_moved,
    is_way_back,
    order,
    output,
    phase_of,
    placeholders,
)
from compiled_fsdp.ir.schema import OFFLOAD, RELOAD, traits_of
from compiled_fsdp.ir.states import hosted_bytes
from compiled_fsdp.planning.offload import host_bytes
from compiled_fsdp.planning.recompute import origin

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations


def free_where_awaited(gm: GraphModule, plan: Plan) -> Violations:
    """What is copied to the host goes there once, is written to by nothing once its copy has
    started, and is neither read nor saved on the device once that is awaited.
    """
    position = order(gm.graph)
    is_forward = phase_of(gm.graph) == "forward"
    saved = set(saved_for_backward(output(gm.graph))) if is_forward else ()
    seen: dict[Node, Node] = {}
    for start in find(gm.graph, OFFLOAD):
        source = origin(start.all_input_nodes[0])
        before = seen.setdefault(source, start)
        if before is not start:
            yield start, f"%{start.name} copies %{source.name}, which %{before.name} has copied"
        end = max((position[user] for user in start.users), default=position[start])
        for alias in aliases(source):
            if alias in saved:
                yield alias, f"%{alias.name} is saved on the device too, beside %{start.name}"
            for user in (user for user in alias.users if position[user] > position[start]):
                if _writes(user, alias):
                    yield user, f"%{user.name} writes to %{alias.name}, which %{start.name} copies"
                elif position[user] > end and user.op != "output":
                    yield user, f"%{user.name} reads %{alias.name} behind the wait for its copy"


def _writes(node: Node, value: Node) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return is_op and node.target._schema.is_mutable and node.all_input_nodes[0] is value  # type: ignore[union-attr]


def back_once(gm: GraphModule, plan: Plan) -> Violations:
    """What is on the host comes back once, from a copy that has been awaited, or is handed to
    backward, and nothing else reads it.
    """  # before `hide_copies`, by one that is awaited at once
    moved = [node for node in placeholders(gm.graph) if is_moved(node)]
    moved += [w for w in find(gm.graph, WAIT) if w.all_input_nodes[0].target is OFFLOAD]
    for node in moved:
        users = list(node.users)
        if len(users) != 1 or not (is_way_back(users[0]) or users[0].op == "output"):
            yield node, f"%{node.name} is read by {[f'%{user.name}' for user in users]}"
    for start in find(gm.graph, RELOAD):
        source = start.all_input_nodes[0]
        if source not in moved:
            yield start, f"%{start.name} copies %{source.name}, which is not on the host"


def within_host_budget(gm: GraphModule, plan: Plan) -> Violations:
    """The activations and the optimizer state that are on the host at once have no more bytes than
    the plan allows.
    """
    if plan.host_budget is None:
        return
    found = host_bytes(gm.graph) + hosted_bytes(gm.graph)
    if found > plan.host_budget:
        copies = [n for n in gm.graph.nodes if traits_of(n.target).starts == "copy"]
        yield (
            (*copies, output(gm.graph))[0],
            f"{found} bytes are on the host at once; host_budget={plan.host_budget}",
        )
