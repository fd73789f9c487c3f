"""Mark the gradients of parameters whose optimizer state is to rest in host memory between updates,
since the memory budget has no room for it.

Before:

    %dw = compute(%tangents_1)
    %g = reduce_grad(%dw, %flat, spec)   # plan.states_on_host has its unit and parameter

After (no node changes, only a mark): the same. Where the step is put together, the `update_` of
what is marked says so (`compiler/step_updates.py`).

Requires: nothing; names that the graph does not have are of another graph of the same plan.
Ensures: the gradients of what the plan names are marked, and no others.
Leaves alone: all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import host_state
from compiled_fsdp.ir.schema import REDUCE_GRAD, param_spec

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def mark_states(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    hosted = set(plan.states_on_host)
    for node in find(gm.graph, REDUCE_GRAD):
        spec = param_spec(node)
        host_state(node, (spec.unit, spec.fqn) in hosted)
    return gm
