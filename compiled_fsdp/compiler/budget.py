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

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import backward_nodes, find, value
from compiled_fsdp.ir.meta import set_room
from compiled_fsdp.ir.schema import BACKWARD, UNSHARD
from compiled_fsdp.passes.mark_states import mark_states
from compiled_fsdp.planning.consensus import depends_on_shapes
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.planning.plan_fields import BY_BUDGET
from compiled_fsdp.wire import copies

from .choices_of_all import of_all
from .hosted_states import bytes_of, cheapest, hostable, priced
from .offload import offload
from .peaks import KEEP, OFFLOAD, SAVE, SLICE, STATE, Candidate, PeakModel, most, patience
from .prices import parameters, ranked
from .recompute import compute_again
from .room import Room, in_bytes, megabytes
from .splitting import run_fitted
from .trial import is_settled, num_outputs, schedule, split, with_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule

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
        chosen = of_all(gm.graph, step, chosen, plan, fitted.again)
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
    params, budget = parameters(gm.graph), plan.memory_budget
    assert budget is not None  # by the caller
    states = hostable(gm.graph, step, plan)
    if isinstance(budget, float) and budget == 1.0:
        return Fitted(_with(plan, params, len(params)))
    nothing_kept = _with(plan, (*params, *states.values()), 0)
    split_once = split(gm, nothing_kept, step)
    trial = _trials(gm, split_once, nothing_kept, params, is_fused=is_fused, step=step)
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
        candidates, model, again = ranked(params, given, split_once, first, costs, plan)
        expected = model.peaks()
        # To compute all again need not be the least.
        known = {num: peak_with(num) for num in {0, expected.index(min(expected))}}
    expected, every = model.peaks(), len(candidates)
    room = in_bytes(budget, min(known.values()), expected[every])
    num, peak = most(peak_with, expected, room, patience(first.num_nodes), known)
    if peak > room:
        _say_nothing_fits(plan, room, peak, f"{num} of {every}", has_states=bool(states))
    return Fitted(_with(plan, candidates, num), candidates, again, Room(room, peak))


def _trials(
    gm: GraphModule,
    split_once: Halves,
    nothing_kept: Plan,
    params: Sequence[Candidate],
    *,
    is_fused: bool,
    step: WholeStep | None,
) -> Callable[[Plan], Trial]:
    """What makes a trial of a joint graph under a plan: of halves that were split once, where
    others would not turn out differently.
    """
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

    return trial


def _say_nothing_fits(
    plan: Plan, room: float, peak: int, how_many: str, *, has_states: bool
) -> None:
    """Say that the least that a step needs, as far as it was tried, is more than there is room."""
    are_all = BY_BUDGET not in (plan.recompute, plan.offload)
    what = "parameters and slices" if are_all else "parameters, slices and activations"
    what += " stay for backward" + (", or optimizer states on the device" if has_states else "")
    rest = "the parameters" if has_states else "what is at rest"
    warn_once(
        f"compiled_fsdp: memory_budget is {megabytes(room)}, and a step needs at least "
        f"{megabytes(peak)} above {rest}, as far as it was tried, which is what it "
        f"gets: {how_many} {what}. Shard into smaller units, or checkpoint activations"
    )


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


def _device(graph: Graph) -> torch.device:
    """The device that parameters are gathered on."""
    return next((value(node).device for node in find(graph, UNSHARD)), torch.device("cpu"))
