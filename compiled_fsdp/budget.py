"""Which parameters stay gathered from forward to backward, so that the step's peak fits the plan's memory budget.

Every all-gather that backward need not repeat takes its time off the wire, and its bytes into memory. The parameters that forward
uses last are needed first in backward: they stay for the shortest, so they are kept first. Before that, parameters with a
smaller mesh get slices, from which backward gathers over that mesh alone. As many are kept as the memory model (`memory.py`)
finds room for, in a trial that splits and schedules a copy of the joint graph. The record is frozen before any
rewriting, and a function of graph and plan alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Graph, GraphModule

from . import meta
from .errors import warn_once
from .graph import backward_nodes, find, output
from .memory import profile_step
from .partition import partition
from .schema import UNSHARD
from .spec import ParamSpec

if TYPE_CHECKING:
    from .plan import Plan

SLICE, KEEP = "slice", "keep"


def fit_budget(gm: GraphModule, plan: Plan, *, is_fused: bool) -> Plan:
    """The plan for this joint graph, with `kept` chosen; the plan as it is without a budget or without a backward."""
    if plan.memory_budget is None or not backward_nodes(gm.graph):
        return plan
    meta.begin_pass(gm, "fit_budget")
    meta.consume(gm, "Plan.memory_budget")
    candidates = _moves(gm.graph)

    def record(count: int) -> Plan:
        """With the first moves made."""
        kept = tuple(param for kind, param in candidates[:count] if kind == KEEP)
        dropped = tuple(param for kind, param in candidates[count:] if kind == SLICE)
        return replace(plan, kept=kept, dropped=dropped)

    def peak(count: int) -> int:
        return _peak(gm, record(count), is_fused=is_fused)

    least = peak(0)
    budget = float(plan.memory_budget)
    if isinstance(plan.memory_budget, float):  # between the peak with nothing kept and the one with everything
        budget = least + budget * max(0, peak(len(candidates)) - least)
    if least > budget:
        warn_once(
            f"compiled_fsdp: memory_budget is {budget / 1e6:.1f} MB, and a step needs {least / 1e6:.1f} MB above what is at "
            "rest even with every parameter dropped after forward, so that is what it gets. Shard into smaller units, or "
            "checkpoint activations"
        )
        return record(0)
    fits, too_many = 0, len(candidates) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if peak(middle) <= budget:
            fits = middle
        else:
            too_many = middle
    return record(fits)


def _moves(graph: Graph) -> tuple[tuple[str, tuple[str, str]], ...]:
    """What more memory buys, in this order: slices of the parameters that have a smaller mesh, then whole parameters; of both, the
    last that forward gathers first.
    """
    specs = [ParamSpec.of(node.args[1:]) for node in find(graph, UNSHARD)]
    dropped = [s for s in reversed(specs) if s.reshard != "keep" and s.group_size > 1]
    sliced = [(SLICE, (s.unit, s.fqn)) for s in dropped if s.reshard == "slice"]
    return (*sliced, *((KEEP, (s.unit, s.fqn)) for s in dropped))


def _peak(gm: GraphModule, plan: Plan, *, is_fused: bool) -> int:
    """Of a step of this joint graph under this plan, in bytes above what is at rest."""
    from .passes.base import run_pipeline
    from .passes.pipeline import HALF, JOINT

    copied = Graph()
    meta.take_over(copied.output(copied.graph_copy(gm.graph, {})), output(gm.graph))
    trial = run_pipeline(GraphModule(gm, copied), plan, JOINT)
    backward_of = backward_nodes(copied)
    outputs = list(output(copied).args[0])  # type: ignore[arg-type]  # gradients come last; None where an input has none
    num_outputs = next(i for i, n in enumerate(outputs) if n is None or n in backward_of)
    forward, backward = partition(trial, (), plan, num_fwd_outputs=num_outputs)
    halves = [run_pipeline(half, plan, HALF) for half in (forward, backward)]
    return profile_step(halves[0].graph, halves[1].graph, is_fused).peak
