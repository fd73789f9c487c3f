"""Check the invariants of a finished graph; changes nothing.

Each invariant is one function, below or in `invariants/`; its docstring is the rule that an error
quotes.

Requires: a lowered graph in its final order.
Ensures: the graph keeps every rule, or `GraphInvariantError` names the first one broken, with the
    nodes around the place.
Leaves alone: everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import output, placeholders
from compiled_fsdp.ir.meta import get_captured
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured, interface

from .invariants import gradients, memory, messages, offloads, states

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan
    from compiled_fsdp.verification.invariant import Violations


def verify(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    check(gm, plan, "the pipeline")
    return gm


def check(gm: GraphModule, plan: Plan, where: str) -> None:
    """Raise `GraphInvariantError` for the first rule that the graph breaks, after `where`."""
    for invariant in INVARIANTS:
        for node, detail in invariant(gm, plan):
            rule = " ".join((invariant.__doc__ or "").split())
            raise GraphInvariantError(where, rule, detail, node)


def same_interface(gm: GraphModule, plan: Plan) -> Violations:
    """The inputs of the graph are those that were captured, and so is the number of its outputs."""
    captured: Captured | None = get_captured(gm)
    if captured is None:
        return
    now, end = interface(placeholders(gm.graph)), output(gm.graph)
    if now != captured.inputs:
        changed = sorted({*now} ^ {*captured.inputs})
        yield (
            next(iter(gm.graph.nodes)),
            f"inputs differ from the captured ones: {changed or 'another order'}",
        )
    if len(end.args[0]) != len(captured.outputs):  # type: ignore[arg-type]
        yield end, f"{len(end.args[0])} outputs; {len(captured.outputs)} were captured"  # type: ignore[arg-type]


def same_meaning(gm: GraphModule, plan: Plan) -> Violations:
    """The graph returns the values that were captured, with the same effects, of the communications
    that its settings name.
    """
    captured: Captured | None = get_captured(gm)
    if captured is not None:
        yield from captured.differences(gm.graph)


INVARIANTS: tuple[Callable[[GraphModule, Plan], Violations], ...] = (
    messages.lowered,
    messages.waited_once,
    messages.copied_once,
    messages.gathered_once,
    messages.uniform_buckets,
    messages.as_specified,
    messages.divided,
    messages.cast_by_policy,
    memory.no_use_after_free,
    gradients.added_first,
    memory.freed_once,
    memory.nothing_gathered_saved,
    memory.computed_again_alike,
    offloads.free_where_awaited,
    offloads.back_once,
    offloads.within_host_budget,
    states.fetched_once,
    states.stored_once,
    gradients.reduced_once,
    gradients.gradients_marked,
    gradients.updated_once,
    gradients.updated_at_owners,
    gradients.left_out_together,
    gradients.gathered_after_update,
    gradients.stepped_last,
    messages.summed_up,
    gradients.judged_first,
    memory.bounded_in_flight,
    memory.bounded_left,
    same_interface,
    same_meaning,
    messages.announced,
)
