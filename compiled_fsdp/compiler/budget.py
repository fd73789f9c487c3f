"""Which parameters stay gathered from forward to backward, and which activations stay saved, so
that the step's peak fits the plan's memory budget.

Every all-gather that backward need not repeat takes its time off the wire, and its bytes into
memory. The parameters that forward uses last are needed first in backward: they stay for the
shortest, so they are kept first. Before that, parameters with a smaller mesh get slices, from which
backward gathers over that mesh alone. As many are kept as the memory model (`memory.py`) finds room
for.

With `Plan(optimizer_state="budget")` what the optimizer remembers takes part too, of a whole step
(`hosted_states.py`): the first trial has all of it on the host between updates, and what is kept on
the device is so much more, nearly everywhere. The peak that is measured has it in it then.

With `Plan(recompute="budget")` activations that backward could compute again
(`planning/recompute.py`) take part, in one order with the parameters: first come those that save
the most seconds for each byte at the peak, by the plan's costs, or else by those that are assumed
for the device. A parameter saves what gathering it again leaves exposed in the trial, an activation
what computing it again takes. Of the row that this makes, as much is kept as there is room for: the
parameters in the rest are gathered again, and the activations in it computed again.

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

from dataclasses import dataclass, field, replace
from functools import partial, reduce
from hashlib import sha256
from math import inf
from operator import and_, or_
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import backward_nodes, find, is_backward, value
from compiled_fsdp.ir.meta import set_room
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import BACKWARD, UNSHARD, param_spec
from compiled_fsdp.passes.mark_states import mark_states
from compiled_fsdp.planning.consensus import agreed, depends_on_shapes
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.planning.halves import boundary_of, follows, lifetimes_after, num_saved
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.planning.memory import profile, profile_of
from compiled_fsdp.planning.plan_fields import BY_BUDGET
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.planning.recompute import Recompute, Saved
from compiled_fsdp.wire import copies

from .hosted import moved_to_host
from .hosted_states import bytes_of, cheapest, hostable, priced
from .offload import offload
from .peaks import KEEP, OFFLOAD, SAVE, SLICE, STATE, Candidate, PeakModel, most, patience
from .recompute import compute_again
from .splitting import run_fitted
from .trial import is_settled, num_outputs, schedule, split, with_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, GraphModule

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.halves import Boundary
    from compiled_fsdp.planning.memory import MemoryProfile
    from compiled_fsdp.planning.plan import Plan

    from .partition import Halves
    from .trial import Trial
    from .whole_step import WholeStep


def fit_budget(
    gm: GraphModule, plan: Plan, *, is_fused: bool, step: WholeStep | None = None
) -> Plan:
    """The plan for this joint graph, with what is kept, computed again, and on the host chosen for
    all ranks; as it is without a budget or without a backward.

    step: of which this is the graph; one of several micro-batches is measured as a whole.
    """
    if plan.memory_budget is None or not backward_nodes(gm.graph):
        return plan
    fitted = _fit_here(gm, plan, is_fused=is_fused, step=step)
    chosen = fitted.plan
    if depends_on_shapes(plan):
        chosen = _kept_by_all(gm.graph, chosen, plan)
        chosen = _hosted_by_all(gm.graph, step, chosen, plan)
        what = "activations" if step is None else "activations of a whole step"
        chosen = _recomputed_by_all(gm.graph, what, chosen, plan, fitted)
    if fitted.room is not None:
        fitted.room.choices = [_choice(each, chosen) for each in fitted.candidates]
        set_room(gm, fitted.room)
    return chosen


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a rank would decide.

    candidates: in the order of their prices.
    again: the activations that could be computed again, by name, whatever would become of them.
    room: None where nothing had to be measured.
    """

    plan: Plan
    candidates: tuple[Candidate, ...] = ()
    again: tuple[str, ...] = ()
    room: Room | None = None


def _kept_by_all(graph: Graph, mine: Plan, plan: Plan) -> Plan:
    """The plan with the parameters that all ranks would keep."""
    candidates = [candidate.param for candidate in _candidates(graph)]
    kept, dropped = set(mine.kept), set(mine.dropped)
    words = [(param in kept) + 2 * (param not in dropped) for param in candidates]
    words = agreed(
        graph,
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


def _hosted_by_all(graph: Graph, step: WholeStep | None, mine: Plan, plan: Plan) -> Plan:
    """The plan with the optimizer state that all ranks would have on the host."""
    states = [*hostable(graph, step, plan).values()]
    if not states:
        return mine
    words = agreed(
        graph,
        plan,
        f"{len(states)} optimizer states of {bytes_of(states)} bytes",
        [int(state.param in mine.states_on_host) for state in states],
        lambda told: [reduce(and_, each) for each in zip(*told, strict=True)],
    )
    hosted = tuple(state.param for state, word in zip(states, words, strict=True) if word)
    return replace(mine, states_on_host=hosted)


def _recomputed_by_all(graph: Graph, what: str, mine: Plan, plan: Plan, fitted: Fitted) -> Plan:
    """The plan with the activations that any rank would compute again: to do so can need a gather
    of backward earlier, and gathers must start in the same order on all ranks. None, where ranks
    save other activations, or did in the first graph of this structure.

    what: is decided, for ranks that wait.
    """
    if plan.recompute != BY_BUDGET:
        return mine
    names = sorted(fitted.again)
    digest = int.from_bytes(sha256(" ".join(names).encode()).digest()[:4], "big")
    again = set(mine.recomputed)

    def combine(told: list[list[int]]) -> list[int]:
        if any(words[0] != told[0][0] for words in told):
            return [-1]
        return [
            told[0][0],
            *(reduce(or_, each) for each in zip(*(t[1:] for t in told), strict=True)),
        ]

    words = agreed(graph, plan, what, [digest, *(int(name in again) for name in names)], combine)
    if words[0] != digest:
        warn_once(
            f"compiled_fsdp: recompute={BY_BUDGET!r}, and ranks, or batches of other shapes, save "
            "other activations for backward, so that no choice among them suits all: none is "
            "computed again for the budget. Checkpoint activations, or give all ranks the same "
            "shapes"
        )
        return replace(mine, recomputed=())
    chosen = tuple(n for n, w in zip(names, words[1:], strict=True) if w)
    offloaded = tuple(name for name in mine.offloaded if name not in chosen)
    return replace(mine, recomputed=chosen, offloaded=offloaded)


def _choice(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    """What was decided about a candidate, for `explain`."""
    where, name = candidate.param
    if candidate.kind == STATE:
        is_kept, name = candidate.param not in plan.states_on_host, ", ".join(candidate.values)
    elif candidate.is_activation:
        is_kept = name not in (*plan.recomputed, *plan.offloaded)
    elif candidate.kind == KEEP:
        is_kept = candidate.param in plan.kept
    else:
        is_kept = candidate.param not in plan.dropped
    return {
        "what": SAVE if name in plan.recomputed else candidate.kind,
        "of": where.split("#")[0],
        "name": name,
        "is_kept": is_kept,
        "num_bytes": candidate.num_bytes,
        "seconds": candidate.seconds,
    }


def options_of(gm: GraphModule, plan: Plan, step: WholeStep | None = None) -> list[str]:
    """The options about the host that something was decided from, for `explain`; says once where
    nothing can be.

    step: of which this is the graph.
    """
    asked = [name for name in ("offload", "optimizer_state") if getattr(plan, name) is not None]
    if not asked or not backward_nodes(gm.graph):
        return []
    device = _device(gm.graph)
    if not copies.is_planned_apart(device):
        what = {"offload": "activation", "optimizer_state": "optimizer state"}
        for name in asked:
            warn_once(
                f"compiled_fsdp: Plan({name}={getattr(plan, name)!r}) on {device.type}: host and "
                f"device are the same memory, so that no {what[name]} is copied (as "
                "CPUOffloadPolicy copies no parameter there). Use recompute='budget', or leave "
                f"{name} out"
            )
        return []
    is_loop = step is None or step.name == BACKWARD
    if "optimizer_state" in asked and step is not None and not is_loop and not step.states:
        asked.remove("optimizer_state")  # none is remembered, or none may be there
    if "optimizer_state" in asked and is_loop:
        warn_once(
            f"compiled_fsdp: Plan(optimizer_state={plan.optimizer_state!r}), and a model that is "
            "compiled without its optimizer, whose step is outside of the graph: its state stays "
            "on the device. Write step = compile_step(model, optimizer, loss_fn), or leave "
            "optimizer_state out"
        )
        asked.remove("optimizer_state")
    if asked and plan.host_budget is not None:
        asked.append("host_budget")
    return [f"Plan.{name}" for name in asked]


def _fit_here(gm: GraphModule, plan: Plan, *, is_fused: bool, step: WholeStep | None) -> Fitted:
    """The same for this rank's shapes."""
    params, budget = _candidates(gm.graph), plan.memory_budget
    assert budget is not None  # by the caller
    states = hostable(gm.graph, step, plan)
    if isinstance(budget, float) and budget == 1.0:
        return Fitted(_with(plan, params, len(params)))
    nothing_kept = _with(plan, (*params, *states.values()), 0)
    split_once = split(gm, nothing_kept, step)
    into = None if step is None else (step, num_outputs(gm.graph))
    is_split_anew = (
        any(c.kind == SLICE for c in params)
        or (step is not None and step.batches > 1)
        or not is_settled(split_once)
    )

    run = partial(run_fitted, forward=[])

    def trial(under: Plan) -> Trial:
        if is_split_anew and (under.kept or under.dropped != nothing_kept.dropped):
            halves = split(gm, under, step)
        else:
            halves = with_kept(split_once, under.kept)
            compute_again(halves, under.recomputed)
            offload(halves, under.offloaded)
            mark_states(halves[1], under)
        return schedule(halves, under, is_fused=is_fused, run=run, step=into)

    first = trial(nothing_kept)
    costs = (plan.costs or assumed(_device(gm.graph).type)).fused(is_fused)
    states = priced(first, states, costs) if states else states
    host_room = inf if plan.host_budget is None else plan.host_budget
    if bytes_of(states.values()) > host_room:
        states = cheapest(states, host_room)
        nothing_kept = _with(plan, (*params, *states.values()), 0)
        first = trial(nothing_kept)
        states = priced(first, states, costs)
    candidates, model, again = params, PeakModel.of(first, params), tuple[str, ...]()

    def peak_with(num: int) -> int:
        return trial(_with(plan, candidates, num)).peak

    known = {0: first.peak}
    if BY_BUDGET in (plan.recompute, plan.offload) or states:
        given = [*states.values()]
        candidates, model, again = _priced(params, given, split_once, first, costs, plan)
        expected = model.peaks()
        # To compute all again need not be the least.
        known = {num: peak_with(num) for num in {0, expected.index(min(expected))}}
    expected, every = model.peaks(), len(candidates)
    room = _in_bytes(budget, min(known.values()), expected[every])
    num, peak = most(peak_with, expected, room, patience(first.num_nodes), known)
    if peak > room:
        are_all = BY_BUDGET not in (plan.recompute, plan.offload)
        what = "parameters and slices" if are_all else "parameters, slices and activations"
        what += " stay for backward" + (", or optimizer states on the device" if states else "")
        rest = "the parameters" if states else "what is at rest"
        warn_once(
            f"compiled_fsdp: memory_budget is {_megabytes(room)}, and a step needs at least "
            f"{_megabytes(peak)} above {rest}, as far as it was tried, which is what it "
            f"gets: {num} of {every} {what}. Shard into smaller "
            "units, or checkpoint activations"
        )
    return Fitted(_with(plan, candidates, num), candidates, again, Room(room, peak))


def _with(plan: Plan, candidates: Sequence[Candidate], num: int) -> Plan:
    """The plan with the first candidates kept."""
    first, rest = candidates[:num], candidates[num:]
    return replace(
        plan,
        kept=tuple(c.param for c in first if c.kind == KEEP),
        dropped=tuple(c.param for c in rest if c.kind == SLICE),
        recomputed=tuple(c.param[1] for c in rest if c.kind == SAVE),
        offloaded=tuple(c.param[1] for c in rest if c.kind == OFFLOAD),
        states_on_host=tuple(c.param for c in rest if c.kind == STATE),
    )


def _priced(
    params: Sequence[Candidate],
    states: Sequence[Candidate],
    halves: Halves,
    first: Trial,
    costs: Costs,
    plan: Plan,
) -> tuple[tuple[Candidate, ...], PeakModel, tuple[str, ...]]:
    """The parameters, the optimizer state, and the activations that could be computed again, or be
    on the host, in the order of what they save for each byte; of those that save the same,
    parameters in their own order, then state, and what forward makes last. Last, by name, all that
    could be computed again.

    states: that are on the host, priced; there they have their room first.
    first: the trial of these halves, in which no parameter is kept.
    """
    exposed = _exposed(first, costs)
    again, moved = tuple[Recompute, ...](), list[Candidate]()
    if BY_BUDGET in (plan.recompute, plan.offload):
        saved = Saved.of(*(half.graph for half in halves))
        again = saved.candidates(costs) if plan.recompute == BY_BUDGET else ()
        room = inf if plan.host_budget is None else plan.host_budget - bytes_of(states)
        moved = moved_to_host(first, saved, again, costs, room) if plan.offload else []
    on_host = {c.param[1] for c in moved}
    found = [
        c if c.kind == SLICE else replace(c, seconds=exposed.get(c.param, 0.0)) for c in params
    ]
    found += [
        Candidate(
            SAVE,
            (r.module, r.name),
            r.num_bytes,
            r.seconds,
            r.scratch,
            r.values,
            r.needs,
            r.sooner,
        )
        for r in again
        if r.name not in on_host
    ]
    found += [*moved, *states]
    model = PeakModel.of(first, found)
    # What backward has no use for is not kept: it may be gathered along, to compute others again.
    prices = model.prices(found)
    last_first = [*range(len(params)), *reversed(range(len(params), len(found)))]
    useful = [i for i in last_first if found[i].is_activation or model.changes[i]]
    order = sorted(useful, key=lambda i: -prices[i])
    names = tuple(each.name for each in again)
    return tuple(found[i] for i in order), model.ordered(order), names


def _exposed(first: Trial, costs: Costs) -> dict[tuple[str, str], float]:
    """For each parameter, what the training thread waits for while it is gathered again: its share
    of its message's time, by bytes.
    """
    graph = first.lifetimes[-1].graph
    line, found = predict(graph, costs), dict[tuple[str, str], float]()
    for region in find_regions(graph, "gather"):
        seconds = sum(line.exposed.get(start, 0.0) for start in region.starts)
        specs = region.tag.specs
        total = sum(spec.full_bytes() for spec in specs)
        for spec in specs:  # in the graph of a whole step, the last gather counts
            found[spec.unit, spec.fqn] = seconds * spec.full_bytes() / total
    return found


def _device(graph: Graph) -> torch.device:
    """The device that parameters are gathered on."""
    return next((value(node).device for node in find(graph, UNSHARD)), torch.device("cpu"))


@dataclass(slots=True)
class Room:
    """What was decided about a step's memory, for the graphs that are compiled: bytes above what is
    at rest.

    budget: what the user allows.
    expected: the peak of the trial that was chosen; more than the budget where nothing fits.
    boundary: what the forward that was compiled leaves to its backward.
    choices: for each tensor that was decided on, dearest first: "what" it is, whose ("of"), its
        "name", whether it "is_kept" for backward, its "num_bytes", and the "seconds" that this
        saves (None where nobody asked).
    """

    budget: float
    expected: int
    boundary: Boundary | None = None
    choices: list[dict[str, Any]] = field(default_factory=list)

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
                f"compiled_fsdp: memory_budget is {_megabytes(self.budget)}, and the "
                f"{memory.title} that was compiled needs {_megabytes(memory.peak)} above what is "
                f"at rest; in a trial the step needed {_megabytes(self.expected)}. {REASONS}. Set "
                "a budget that is smaller by the difference"
            )
        return memory


REASONS = (
    "What trials do not know: the compiler's own passes, passes of yours, and what ranks with "
    "other shapes decide"
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
