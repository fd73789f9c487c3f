"""What of a memory budget's choices all ranks take, where their shapes may differ.

A parameter stays gathered, and a state rests on the host, where every rank would have it so; an
activation is computed again where any rank would.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from hashlib import sha256
from operator import and_, or_
from typing import TYPE_CHECKING

from compiled_fsdp.errors import warn_once
from compiled_fsdp.planning.consensus import agreed
from compiled_fsdp.planning.plan_fields import BY_BUDGET

from .hosted_states import bytes_of, hostable
from .prices import parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph

    from compiled_fsdp.planning.plan import Plan

    from .whole_step import WholeStep


def of_all(
    graph: Graph, step: WholeStep | None, mine: Plan, plan: Plan, again: Sequence[str]
) -> Plan:
    """The plan that this rank would take, with what all ranks choose.

    plan: as it was before, the same on all ranks.
    again: names of the activations that this rank could compute again.
    """
    chosen = _kept_by_all(graph, mine, plan)
    chosen = _hosted_by_all(graph, step, chosen, plan)
    what = "activations" if step is None else "activations of a whole step"
    return _recomputed_by_all(graph, what, chosen, plan, again)


def _kept_by_all(graph: Graph, mine: Plan, plan: Plan) -> Plan:
    """The plan with the parameters that all ranks would keep."""
    candidates = [candidate.param for candidate in parameters(graph)]
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


def _recomputed_by_all(
    graph: Graph, what: str, mine: Plan, plan: Plan, again: Sequence[str]
) -> Plan:
    """The plan with the activations that any rank would compute again: to do so can need a gather
    of backward earlier, and gathers must start in the same order on all ranks. None, where ranks
    save other activations, or did in the first graph of this structure.

    what: is decided, for ranks that wait.
    again: names of the activations that could be.
    """
    if plan.recompute != BY_BUDGET:
        return mine
    names = sorted(again)
    digest = int.from_bytes(sha256(" ".join(names).encode()).digest()[:4], "big")
    recomputed = set(mine.recomputed)

    def combine(told: list[list[int]]) -> list[int]:
        if any(words[0] != told[0][0] for words in told):
            return [-1]
        return [
            told[0][0],
            *(reduce(or_, each) for each in zip(*(t[1:] for t in told), strict=True)),
        ]

    words = agreed(
        graph, plan, what, [digest, *(int(name in recomputed) for name in names)], combine
    )
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
