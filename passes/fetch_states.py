"""Fetch what an optimizer remembers from the host for its update, and store it back there, beside
what is computed, in the graph of a whole step.

Before, where a copy takes as long as two things that are computed:

    ... compute with %x ...
    ... compute with %x ...
    ... compute with %x ...
    update_(%grad, %flat, offsets, step)
    ... compute with %x ...
    ... compute with %x ...
    ... compute with %x ...

After:

    ... compute with %x ...
    %f = fetch_state(%flat, offsets, step, numel)
    ... compute with %x ...
    ... compute with %x ...
    %s = wait(%f)
    update_(%grad, %flat, offsets, step, found_inf, numel, is_hosted, %s)
    %t = store_state(%s, %flat, offsets, step)
    ... compute with %x ...
    ... compute with %x ...
    wait(%t)
    ... compute with %x ...

Requires: the final order of updates, and of what is computed.
Ensures: the state of each `update_` that says it is hosted is copied to the device before, and back
    behind, once each. The copy begins as late as it should be there, and behind the second update
    before its own; the way back is awaited when it should be done, by the plan's costs or those
    that are assumed for the device, and before the second update behind, at the latest at the end.
Leaves alone: updates whose state is on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import Builder, argument, value
from compiled_fsdp.ir.schema import FETCH_STATE, STORE_STATE
from compiled_fsdp.ir.states import hosted_updates
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.planning.states import visits

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def fetch_states(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    updates = hosted_updates(gm.graph)
    if not updates:
        return gm
    flats: list[Any] = [update.args[1] for update in updates]
    costs = plan.costs or assumed(value(flats[0]).device.type)
    planned = visits(gm.graph, updates, costs)
    starts = [
        Builder(visit.begin, visit.update)(
            FETCH_STATE, *visit.update.args[1:4], argument(visit.update, "state_numel")
        )
        for visit in planned
    ]
    # Behind all starts: of two at one place, the second does not begin behind the first's wait.
    for (update, _, end), start in zip(planned, starts, strict=True):
        args = update.args
        state = Builder(update, update)(WAIT, start)
        update.args = (*args[:7], state)
        stored = Builder(update.next, update)(STORE_STATE, state, *args[1:4])
        Builder(end, update)(WAIT, stored)
    return gm
