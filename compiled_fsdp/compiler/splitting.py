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

from compiled_fsdp.ir.collectives import STARTS
from compiled_fsdp.ir.graph import find, phase_of
from compiled_fsdp.ir.schema import REDUCE_GRAD, TO_LOWER, UNSHARD, param_spec
from compiled_fsdp.passes.base import Context, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.planning.costs import traffic
from compiled_fsdp.planning.planner import WORTH, predict

from .trial import copied

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.plan import Plan

PARTS = (2, 4)  # of the largest unit, to be tried
MOST_DECIDED = 8
_decided: dict[int, int] = {}  # the last decisions, by `_key`


def fit_split(gm: GraphModule, plan: Plan, *, is_fused: bool) -> Plan:
    """The plan for this half, with `split_bytes` chosen; as it is where it is set, or where there
    are no costs. is_fused: whether its kernels will be.
    """
    if plan.split_bytes is not None or plan.costs is None:
        return plan
    context = Context(is_trial=True, is_fused=is_fused)
    key = _key(gm.graph, plan, context)
    if key not in _decided:
        _tried(copied(gm), plan, key, context)
    return replace(plan, split_bytes=_decided[key])


def run_fitted(
    gm: GraphModule, plan: Plan, context: Context, forward: list[int] | None = None
) -> GraphModule:
    """A trial of this half, or of a whole step, under the plan that `fit_split` makes of this one;
    the graph is used up.

    forward: what the first trial of several decided for forward, or nothing yet. It stays for the
        others, which keep other parameters for backward: what forward gathers and computes is the
        same in all.
    """
    if plan.split_bytes is not None or plan.costs is None:
        return run_pipeline(gm, plan, current(Stage.HALF), context=context)
    key = _key(gm.graph, plan, context)
    if forward is None or phase_of(gm.graph) != "forward":
        return _tried(gm, plan, key, context)
    if not forward:
        tried = _tried(gm, plan, key, context)
        forward.append(_decided[key])
        return tried
    _decide(key, forward[0])
    under = replace(plan, split_bytes=forward[0])
    return run_pipeline(gm, under, current(Stage.HALF), context=context)


def _tried(gm: GraphModule, plan: Plan, key: int, context: Context) -> GraphModule:
    """Decide for this graph, which is used up, and return the copy on which the decision was tried;
    key: of the graph.
    """
    assert plan.costs is not None
    lower, *others = (entry for entry in current(Stage.HALF) if entry.runs_in(context))
    largest = _largest(gm.graph)
    lowered = run_pipeline(gm, plan, [lower], context=context)  # the same for every size
    tried, seconds = {}, {}
    sizes = list(dict.fromkeys((0, *(largest // n for n in PARTS))))
    for size in sizes:
        under = replace(plan, split_bytes=size)
        half = lowered if size == sizes[-1] else copied(lowered)
        tried[size] = run_pipeline(half, under, others, context=context)
        seconds[size] = predict(tried[size].graph, plan.costs).total
    best = min(seconds, key=lambda size: (seconds[size], -size))
    chosen = best if seconds[best] < seconds[0] * (1 - WORTH) else 0
    _decide(key, chosen)
    return tried[chosen]


def _decide(key: int, split_bytes: int) -> None:
    _decided.pop(key, None)
    while len(_decided) >= MOST_DECIDED:
        del _decided[next(iter(_decided))]
    _decided[key] = split_bytes


def _key(graph: Graph, plan: Plan, context: Context) -> int:
    """A hash of all that the decision depends on: what is communicated, what is computed in between
    and how long it takes, the plan and the passes.
    Under a memory budget, what is compiled was tried before.
    """
    assert plan.costs is not None
    nodes = tuple(
        (n.name, n.target, plan.costs.compute(n), traffic(n) if n.target in STARTS else None)
        for n in graph.nodes
        if n.op == "call_function"
    )
    specs = tuple(param_spec(n) for n in find(graph, *TO_LOWER))
    return hash((plan.undecided, context.is_fused, current(Stage.HALF), nodes, specs))


def _largest(graph: Graph) -> int:
    """Bytes of the largest unit's full parameters, in the dtype in which they travel."""
    units: dict[str, dict[str, int]] = {}
    for node in find(graph, UNSHARD, REDUCE_GRAD):
        spec = param_spec(node)
        units.setdefault(spec.unit, {})[spec.fqn] = spec.full_bytes()
    return max((sum(members.values()) for members in units.values()), default=0)
