"""Which parameters stay gathered from forward to backward, so that the step's peak fits the plan's
memory budget.

Every all-gather that backward need not repeat takes its time off the wire, and its bytes into
memory. The parameters that forward uses last are needed first in backward: they stay for the
shortest, so they are kept first. Before that, parameters with a smaller mesh get slices, from which
backward gathers over that mesh alone. As many are kept as the memory model (`memory.py`) finds room
for.

A trial (`trial.py`) makes of a copy of the joint graph what would be compiled: halves, in parts
where costs decide so, or the graph of a whole step. The first keeps nothing, and what the others
would need is expected from it (`peaks.py`). Halves are split anew only where that may turn out
differently: with slices, where backward computes something again from parameters and other values,
or with several micro-batches. The record is frozen before any rewriting, and a function of graph
and plan alone.

Keeping a parameter may need less than gathering it again, beside its copy and what is computed from
it. So that nothing fits is said when every number of parameters was tried, or of a large graph
those that should need the least. What is compiled in the end is measured too: each half carries the
`Room` that was decided on, and tells where it exceeds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import backward_nodes, find, is_backward
from compiled_fsdp.ir.meta import set_room
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.planning.consensus import agreed, depends_on_shapes
from compiled_fsdp.planning.halves import boundary_of, follows, lifetimes_after, num_saved
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.planning.memory import profile, profile_of

from .peaks import KEEP, SLICE, Candidate, PeakModel, most, patience
from .splitting import run_fitted
from .trial import is_settled, num_outputs, schedule, split, with_kept

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.halves import Boundary
    from compiled_fsdp.planning.memory import MemoryProfile
    from compiled_fsdp.planning.plan import Plan

    from .stitch import WholeStep
    from .trial import Trial


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
    every = len(candidates)

    def record(num: int) -> Plan:
        """Returns the plan with the first candidates kept."""
        kept = tuple(c.param for c in candidates[:num] if c.kind == KEEP)
        dropped = tuple(c.param for c in candidates[num:] if c.kind == SLICE)
        return replace(plan, kept=kept, dropped=dropped)

    if isinstance(plan.memory_budget, float) and plan.memory_budget == 1.0:
        return record(every)
    split_once = split(gm, record(0), step)
    into = None if step is None else (step, num_outputs(gm.graph))
    is_split_anew = (
        any(c.kind == SLICE for c in candidates)
        or (step is not None and step.batches > 1)
        or not is_settled(split_once)
    )

    run = partial(run_fitted, forward=[])

    def trial(num: int) -> Trial:
        under = record(num)
        anew = num and is_split_anew
        halves = split(gm, under, step) if anew else with_kept(split_once, under.kept)
        return schedule(halves, under, is_fused=is_fused, run=run, step=into)

    first = trial(0)
    expected = PeakModel.of(first, candidates).peaks()
    room = _in_bytes(plan.memory_budget, expected[0], expected[every])
    num, peak = most(lambda num: trial(num).peak, expected, room, patience(first.num_nodes))
    if peak > room:
        warn_once(
            f"compiled_fsdp: memory_budget is {_megabytes(room)}, and a step needs at least "
            f"{_megabytes(peak)} above what is at rest, as far as it was tried, which is what it "
            f"gets: {num} of {every} parameters and slices stay for backward. Shard into smaller "
            "units, or checkpoint activations"
        )
    set_room(gm, Room(room, peak))
    return record(num)


@dataclass(slots=True)
class Room:
    """What was decided about a step's memory, for the graphs that are compiled: bytes above what is
    at rest.

    budget: what the user allows.
    expected: the peak of the trial that was chosen; more than the budget where nothing fits.
    boundary: what the forward that was compiled leaves to its backward.
    """

    budget: float
    expected: int
    boundary: Boundary | None = None

    def measured(self, graph: Graph, *, is_fused: bool) -> MemoryProfile:
        """The memory of a graph of the step that is compiled, which is checked."""
        if not is_backward(graph):
            before = Lifetimes(graph, is_fused)
            self.boundary = boundary_of(before, num_saved(graph))
            return self._checked(profile_of(before))
        if self.boundary is None or not follows(graph, self.boundary):
            return profile(graph, is_fused)  # its forward came from a cache
        return self._checked(profile_of(lifetimes_after(graph, self.boundary, is_fused)))

    def _checked(self, memory: MemoryProfile) -> MemoryProfile:
        """Tell where a graph that is compiled needs more than the budget, though the trial did not:
        passes that trials leave out, or the compiler's own, have changed it, or ranks with other
        shapes had a say.
        """
        if memory.peak > max(self.budget, self.expected):
            warn_once(
                f"compiled_fsdp: memory_budget is {_megabytes(self.budget)}, and the {memory.title} "
                f"that was compiled needs {_megabytes(memory.peak)} above what is at rest; in a "
                f"trial the step needed {_megabytes(self.expected)}. {REASONS}. Set a budget that "
                "is smaller by the difference"
            )
        return memory


REASONS = (
    "What trials do not know: the compiler's own passes, passes of yours, and what ranks with other "
    "shapes decide"
)


def _in_bytes(budget: float, least: int, greatest: int) -> float:
    """A budget as it is given: bytes, or a share of the way from the peak with nothing kept to the
    one with everything.
    """
    is_share = isinstance(budget, float)
    return least + budget * max(0, greatest - least) if is_share else float(budget)


def _megabytes(num_bytes: float) -> str:
    megabytes = num_bytes / 1e6
    return f"{megabytes:.1f} MB" if megabytes >= 10 else f"{megabytes:.3f} MB"


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
