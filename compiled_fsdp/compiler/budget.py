"""Which parameters stay gathered from forward to backward, so that the step's peak fits the plan's
memory budget.

Every all-gather that backward need not repeat takes its time off the wire, and its bytes into
memory. The parameters that forward uses last are needed first in backward: they stay for the
shortest, so they are kept first. Before that, parameters with a smaller mesh get slices, from which
backward gathers over that mesh alone. As many are kept as the memory model (`memory.py`) finds room
for.

A trial (`trial.py`) splits and schedules a copy of the joint graph. The first keeps nothing: from
when its forward drops each parameter, and when its backward gathers it again, follows what keeping
it would add to which part of the curve (`PeakModel`). The others check, and correct, what that
says. They are split anew only where that may turn out differently: with slices, or where backward
computes something again from parameters and other values. Units are whole in trials, also where
costs may cut them into parts, which need less, unless nothing fits otherwise. The record is frozen
before any rewriting, and a function of graph and plan alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from operator import and_, itemgetter
from typing import TYPE_CHECKING

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import backward_nodes, find, last_read, order
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.planning.consensus import agreed, depends_on_shapes

from .splitting import fit_split
from .trial import as_it_is, is_settled, peak_of_step, schedule, split, with_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.plan import Plan

    from .stitch import WholeStep
    from .trial import Trial

SLICE, KEEP = "slice", "keep"
TRIALS = 5  # at most, after the first


def fit_budget(
    gm: GraphModule, plan: Plan, *, is_fused: bool, step: WholeStep | None = None
) -> Plan:
    """The plan for this joint graph, with `kept` chosen for all ranks; as it is without a budget or
    without a backward.

    step: of which this is the graph; one of several micro-batches is measured as a whole.
    """
    mine = _fit_here(gm, plan, is_fused=is_fused, step=step)
    if mine is plan or not depends_on_shapes(plan):
        return mine
    candidates = [candidate.param for candidate in _candidates(gm.graph)]
    kept, dropped = set(mine.kept), set(mine.dropped)
    words = [(param in kept) + 2 * (param not in dropped) for param in candidates]
    words = agreed(
        gm.graph,
        plan,
        "memory",
        words,
        lambda told: [reduce(and_, each) for each in zip(*told, strict=True)],
    )
    chosen = dict(zip(candidates, words, strict=True))
    return replace(
        mine,
        kept=tuple(param for param in mine.kept if chosen[param] & 1),
        dropped=tuple(dict.fromkeys(param for param in candidates if not chosen[param] & 2)),
    )


def _fit_here(gm: GraphModule, plan: Plan, *, is_fused: bool, step: WholeStep | None) -> Plan:
    """The same for this rank's shapes."""
    if plan.memory_budget is None or not backward_nodes(gm.graph):
        return plan
    candidates = _candidates(gm.graph)
    none, every = 0, len(candidates)

    def record(num: int) -> Plan:
        """Returns the plan with the first candidates kept."""
        kept = tuple(c.param for c in candidates[:num] if c.kind == KEEP)
        dropped = tuple(c.param for c in candidates[num:] if c.kind == SLICE)
        return replace(plan, kept=kept, dropped=dropped)

    if isinstance(plan.memory_budget, float) and plan.memory_budget == 1.0:
        return record(every)
    if step is not None and step.batches > 1:

        def peak_of(num: int) -> int:
            return peak_of_step(gm, record(num), step, is_fused=is_fused)

        least = peak_of(none)
        sums = [*accumulate((c.num_bytes for c in candidates), initial=least)]
        budget = _in_bytes(plan.memory_budget, least, lambda: peak_of(every))
        if _is_too_small(budget, least):
            return record(none)
        return record(most(peak_of, sums.__getitem__, budget, every))
    split_once = split(gm, record(none))
    is_split_anew = any(c.kind == SLICE for c in candidates) or not is_settled(split_once)
    fit: Callable[[GraphModule, Plan], Plan] = as_it_is

    def trial(num: int) -> Trial:
        under = record(num)
        halves = split(gm, under) if num and is_split_anew else with_kept(split_once, under.kept)
        return schedule(halves, under, is_fused=is_fused, fit=fit)

    peaks = PeakModel.of(trial(none), candidates)
    has_parts = plan.split_bytes is None and plan.costs is not None
    if has_parts and isinstance(plan.memory_budget, int) and peaks.peak(none) > plan.memory_budget:
        fit = fit_split  # units in parts need less; to decide on them takes long
        peaks = PeakModel.of(trial(none), candidates)
    least = peaks.peak(none)
    budget = _in_bytes(plan.memory_budget, least, lambda: peaks.peak(every))
    if _is_too_small(budget, least):
        return record(none)
    return record(most(lambda num: trial(num).profile.peak, peaks.peak, budget, every))


def _in_bytes(budget: float, least: int, greatest: Callable[[], int]) -> float:
    """A budget as it is given: bytes, or a share of the way from the peak with nothing kept to the
    one with everything.
    """
    is_share = isinstance(budget, float)
    return least + budget * max(0, greatest() - least) if is_share else float(budget)


def _is_too_small(budget: float, least: int) -> bool:
    if least > budget:
        warn_once(
            f"compiled_fsdp: memory_budget is {budget / 1e6:.1f} MB, and a step needs "
            f"{least / 1e6:.1f} MB above what is at rest even with every parameter dropped after "
            "forward, so that is what it gets. Shard into smaller units, or checkpoint activations"
        )
    return least > budget


def most(
    peak: Callable[[int], int], expected: Callable[[int], int], budget: float, every: int
) -> int:
    """Returns the most candidates that fit, given that none fits, in few calls of `peak`, which are
    expensive: by regula falsi on how far `expected` is off, and by bisection where that does not
    get on. What is returned fits; more might, where neither `expected` nor a line is right.
    """
    fits, too_many = 0, every + 1
    off = {fits: 0}

    def corrected(num: int) -> float:
        low, high = off[fits], off.get(too_many, off[fits])
        return expected(num) + low + (high - low) * (num - fits) / (too_many - fits)

    for _ in range(TRIALS):
        num = bisect_right(range(every + 1), budget, lo=fits + 1, hi=too_many, key=corrected) - 1
        if num == fits:  # none, or the line is wrong
            num = (
                fits
                + bisect_right(range(every + 1), budget, lo=fits + 1, hi=too_many, key=expected)
            ) // 2
        if num == fits:
            break
        found = peak(num)
        off[num] = found - expected(num)
        if found <= budget:
            fits = num
        else:
            too_many = num
    return fits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to use more memory.

    kind: a slice, or a whole parameter.
    param: unit and name.
    num_bytes: that stay from forward to backward.
    """

    kind: str
    param: tuple[str, str]
    num_bytes: int


def _candidates(graph: Graph) -> tuple[Candidate, ...]:
    """In this order: slices of the parameters that have a smaller mesh, then whole parameters; of
    both, the last that forward gathers first.
    """
    specs = [param_spec(node) for node in find(graph, UNSHARD)]
    dropped = [s for s in reversed(specs) if s.reshard != "keep" and s.group_size > 1]
    slices = [s.over_post_group() for s in dropped if s.reshard == "slice"]
    sliced = [Candidate(SLICE, (s.unit, s.fqn), s.shard_numel * s.dtype.itemsize) for s in slices]
    whole = [Candidate(KEEP, (s.unit, s.fqn), s.full_bytes()) for s in dropped]
    return tuple(dict.fromkeys((*sliced, *whole)))  # of several reads of one, the last


@dataclass(frozen=True, slots=True)
class PeakModel:
    """The memory of a step in which nothing is kept, and what candidates add to it.

    forward, backward: most bytes alive in each interval of nodes; no candidate begins or ends to
        add to them within one.
    spans: for each candidate, from which interval of forward on its bytes are alive longer, before
        which one of backward (0: it is not gathered there), and how many they are.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(trial: Trial, candidates: Sequence[Candidate]) -> PeakModel:
        """From a trial without any."""
        dropped, gathered = _gathers(trial.forward), _gathers(trial.backward)
        slices = {c.param: c.num_bytes for c in candidates if c.kind == SLICE}
        spans = []
        for candidate in candidates:
            _, last = dropped.get(candidate.param, (0, 0))
            first, _ = gathered.get(candidate.param, (0, 0))
            in_place_of = slices.get(candidate.param, 0) if candidate.kind == KEEP else 0
            spans.append((last + 1, first, candidate.num_bytes - in_place_of))
        begins, ends = (
            sorted({0, *places}) for places in (map(itemgetter(n), spans) for n in (0, 1))
        )
        halves = trial.profile.forward.curve.during, trial.profile.backward.curve.during
        forward, backward = (_maxima(*half) for half in zip(halves, (begins, ends), strict=True))
        placed = (
            (bisect_left(begins, begin), bisect_left(ends, end), num_bytes)
            for begin, end, num_bytes in spans
        )
        return PeakModel(forward, backward, tuple(placed))

    def peak(self, num: int) -> int:
        """Returns the peak of the step with the first candidates kept."""
        more, less = [0] * (len(self.forward) + 1), [0] * (len(self.backward) + 1)
        for begin, end, num_bytes in self.spans[:num]:
            if end:  # backward does gather it again
                more[begin] += num_bytes
                less[end] += num_bytes
        kept = sum(more)
        forward = (
            alive + longer for alive, longer in zip(self.forward, accumulate(more), strict=False)
        )
        backward = (
            alive + kept - gone
            for alive, gone in zip(self.backward, accumulate(less), strict=False)
        )
        return max(*forward, *backward)


def _maxima(curve: Sequence[int], begins: Sequence[int]) -> tuple[int, ...]:
    """The most bytes alive from each of these positions to the next."""
    return tuple(max(curve[begin:end], default=0) for begin, end in pairwise((*begins, len(curve))))


def _gathers(graph: Graph) -> dict[tuple[str, str], tuple[int, int]]:
    """For each parameter that a graph gathers, from where to where its bucket is alive."""
    position = order(graph)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for region in find_regions(graph, "gather"):
        first = position[region.starts[0]] if region.starts else position[region.nodes[0]]
        last = last_read(region.waits[0], position) if region.waits else first
        for spec in region.tag.specs:
            found.setdefault((spec.unit, spec.fqn), (first, last))
    return found
