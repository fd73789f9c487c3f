"""Which parameters stay gathered from forward to backward, so that the step's peak fits the plan's memory budget.

Every all-gather that backward need not repeat takes its time off the wire, and its bytes into memory. The parameters that forward
uses last are needed first in backward: they stay for the shortest, so they are kept first. Before that, parameters with a
smaller mesh get slices, from which backward gathers over that mesh alone. As many are kept as the memory model (`memory.py`)
finds room for, in a trial that splits and schedules a copy of the joint graph. The record is frozen before any
rewriting, and a function of graph and plan alone.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, count
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
    from collections.abc import Callable, Sequence

    from .plan import Plan

SLICE, KEEP = "slice", "keep"


def fit_budget(gm: GraphModule, plan: Plan, *, is_fused: bool) -> Plan:
    """The plan for this joint graph, with `kept` chosen; the plan as it is without a budget or without a backward."""
    if plan.memory_budget is None or not backward_nodes(gm.graph):
        return plan
    meta.begin_pass(gm, "fit_budget")
    meta.consume(gm, "Plan.memory_budget")
    candidates = _moves(gm.graph)
    peaks: dict[int, int] = {}

    def record(num: int) -> Plan:
        """With the first moves made."""
        kept = tuple(move.param for move in candidates[:num] if move.kind == KEEP)
        dropped = tuple(move.param for move in candidates[num:] if move.kind == SLICE)
        return replace(plan, kept=kept, dropped=dropped)

    def peak(num: int) -> int:
        if num not in peaks:
            peaks[num] = _peak(gm, record(num), is_fused=is_fused)
        return peaks[num]

    none, every = 0, len(candidates)
    least = peak(none)
    budget = float(plan.memory_budget)
    if isinstance(plan.memory_budget, float):  # between the peak with nothing kept and the one with everything
        budget = least + budget * max(0, peak(every) - least)
    if least > budget:
        warn_once(
            f"compiled_fsdp: memory_budget is {budget / 1e6:.1f} MB, and a step needs {least / 1e6:.1f} MB above what is at "
            "rest even with every parameter dropped after forward, so that is what it gets. Shard into smaller units, or "
            "checkpoint activations"
        )
        return record(none)
    return record(_most(peak, budget, [move.num_bytes for move in candidates]))


def _most(peak: Callable[[int], int], budget: float, sizes: Sequence[int]) -> int:
    """The most moves whose peak fits, given that none fits. Each trial is dear, and peaks grow about as bytes do: so between what
    fits and what does not, the next to try is where a line reaches the budget; every third trial halves, whatever the line says.
    """
    fits, too_many = 0, len(sizes)
    if peak(too_many) <= budget:
        return too_many
    kept = [0, *accumulate(sizes)]
    for trial in count(1):
        if too_many - fits <= 1:
            break
        share = (budget - peak(fits)) / (peak(too_many) - peak(fits))
        on_line = bisect_right(kept, kept[fits] + share * (kept[too_many] - kept[fits])) - 1
        middle = (fits + too_many) // 2
        at = middle if trial % 3 == 0 else min(max(on_line, fits + 1), too_many - 1)
        if peak(at) <= budget:
            fits = at
        else:
            too_many = at
    return fits


@dataclass(frozen=True, slots=True)
class Move:
    """What more memory buys.

    kind: a slice, or a whole parameter.
    param: unit and name.
    num_bytes: that stay from forward to backward.
    """

    kind: str
    param: tuple[str, str]
    num_bytes: int


def _moves(graph: Graph) -> tuple[Move, ...]:
    """In this order: slices of the parameters that have a smaller mesh, then whole parameters; of both, the last that forward
    gathers first.
    """
    specs = [ParamSpec.of(node.args[1:]) for node in find(graph, UNSHARD)]
    dropped = [s for s in reversed(specs) if s.reshard != "keep" and s.group_size > 1]
    slices = [s.over_post_group() for s in dropped if s.reshard == "slice"]
    sliced = [Move(SLICE, (s.unit, s.fqn), s.shard_numel * s.dtype.itemsize) for s in slices]
    whole = [Move(KEEP, (s.unit, s.fqn), s.group_size * s.shard_numel * s.dtype.itemsize) for s in dropped]
    return (*sliced, *whole)


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
    plan = plan.executed_by(is_fused=is_fused)
    halves = [run_pipeline(half, plan, HALF) for half in (forward, backward)]
    return profile_step(halves[0].graph, halves[1].graph, is_fused).peak
