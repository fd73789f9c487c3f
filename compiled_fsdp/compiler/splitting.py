"""Into parts of which size large units are cut, so that a graph takes the shortest time by its
costs.

In one piece, the first all-gather of a graph is exposed whole, and so is the last reduction. In
parts, computing begins with the first part, and only the last one stays exposed; each further part
costs the latency of a collective. A trial buckets and schedules a copy of the graph for each size
and plays it (`planner.py`): the record depends on graph, plan and costs alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD, param_spec
from compiled_fsdp.passes.base import Context, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.planning.planner import WORTH, predict

from .trial import copied

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.plan import Plan

PARTS = (2, 4)  # of the largest unit, to be tried


def fit_split(gm: GraphModule, plan: Plan) -> Plan:
    """The plan for this half, with `split_bytes` chosen; as it is where it is set, or where there
    are no costs.
    """
    if plan.split_bytes is not None or plan.costs is None:
        return plan
    trial = Context(is_trial=True)
    lower, *others = (entry for entry in current(Stage.HALF) if entry.runs_in(trial))
    lowered = run_pipeline(copied(gm), plan, [lower], context=trial)  # the same for every size

    def seconds_in_parts(size: int) -> float:
        under = replace(plan, split_bytes=size)
        half = lowered if size == sizes[-1] else copied(lowered)
        return predict(run_pipeline(half, under, others, context=trial).graph, costs).total

    costs, largest = plan.costs, _largest(gm.graph)
    sizes = list(dict.fromkeys([0, *(largest // n for n in PARTS)]))
    seconds = {size: seconds_in_parts(size) for size in sizes}
    best = min(seconds, key=lambda size: (seconds[size], -size))
    is_worth_it = seconds[best] < seconds[0] * (1 - WORTH)
    return replace(plan, split_bytes=best if is_worth_it else 0)


def _largest(graph: Graph) -> int:
    """Bytes of the largest unit's full parameters, in the dtype in which they travel."""
    units: dict[str, dict[str, int]] = {}
    for node in find(graph, UNSHARD, REDUCE_GRAD):
        spec = param_spec(node)
        units.setdefault(spec.unit, {})[spec.fqn] = spec.full_bytes()
    return max((sum(members.values()) for members in units.values()), default=0)
