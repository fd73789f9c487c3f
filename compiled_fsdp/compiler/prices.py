"""What may stay in memory from forward to backward, and in which order: first what saves the most
seconds for each byte at the peak.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.planning.plan_fields import BY_BUDGET
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.planning.recompute import Recompute, Saved

from .hosted import moved_to_host
from .hosted_states import bytes_of
from .peaks import KEEP, SAVE, SLICE, Candidate, PeakModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph

    from compiled_fsdp.planning.costs import Costs
    from compiled_fsdp.planning.plan import Plan

    from .partition import Halves
    from .trial import Trial


def parameters(graph: Graph) -> tuple[Candidate, ...]:
    """Returns slices of the parameters that have a smaller mesh, then whole parameters; of both,
    the last that forward gathers first.
    """
    specs = [param_spec(node) for node in find(graph, UNSHARD)]
    dropped = [s for s in reversed(specs) if s.reshard != "keep" and s.group_size > 1]
    slices = [s.over_post_group() for s in dropped if s.reshard == "slice"]
    sliced = [Candidate(SLICE, (s.unit, s.fqn), s.shard_numel * s.dtype.itemsize) for s in slices]
    whole = [Candidate(KEEP, (s.unit, s.fqn), s.full_bytes()) for s in dropped]
    return tuple(dict.fromkeys((*sliced, *whole)))  # of several reads of one, the last


def ranked(
    params: Sequence[Candidate],
    states: Sequence[Candidate],
    halves: Halves,
    first: Trial,
    costs: Costs,
    plan: Plan,
) -> tuple[tuple[Candidate, ...], PeakModel, tuple[str, ...]]:
    """Returns the parameters, the optimizer state, and the activations that could be computed
    again, or be on the host, in the order of what they save for each byte; of those that save the
    same, parameters in their own order, then state, and what forward makes last. With them the
    model of their peaks, and the names of all activations that could be computed again.

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
    found += [_activation(each) for each in again if each.name not in on_host]
    found += [*moved, *states]
    model = PeakModel.of(first, found)
    # What backward has no use for is not kept: it may be gathered along, to compute others again.
    prices = model.prices(found)
    last_first = [*range(len(params)), *reversed(range(len(params), len(found)))]
    useful = [i for i in last_first if found[i].is_activation or model.changes[i]]
    order = sorted(useful, key=lambda i: -prices[i])
    names = tuple(each.name for each in again)
    return tuple(found[i] for i in order), model.ordered(order), names


def _activation(again: Recompute) -> Candidate:
    """An activation that is saved, or computed again."""
    return Candidate(
        SAVE,
        (again.module, again.name),
        again.num_bytes,
        again.seconds,
        again.scratch,
        again.values,
        again.needs,
        again.sooner,
    )


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
