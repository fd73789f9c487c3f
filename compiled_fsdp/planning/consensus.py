"""Decisions that one rank takes from its own shapes, made the same on all ranks that share a group.

A batch may have another size on every rank, and with it what fits into a memory budget, or what
hides a collective. So where a graph of a structure is compiled for the first time, ranks tell each
other through the store what they would do, and do what suits all of them. Later graphs of the
structure, for other shapes, keep to that and ask nobody: other ranks may not compile just then.

A rank that found such a graph in a cache would not come to the exchange. So what is compiled is
cached only from where all is decided on: with a budget alone, the halves, of which the decision is
a part; never the joint graph, nor halves that are scheduled by costs (`inductor.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import Tensor

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_seconds
from compiled_fsdp.ir.schema import TO_LOWER, param_spec
from compiled_fsdp.torch_private.dynamo import tracing_context
from compiled_fsdp.torch_private.groups import group_named, kept_for
from compiled_fsdp.wire.agreement import everyones

from .plan import Plan
from .plan_fields import DISTANCES

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from compiled_fsdp.ir.spec import ParamSpec

Combine = Callable[[list[list[int]]], list[int]]
T = TypeVar("T")

# What has been decided, by the name of each group that it was decided over.
_settled: dict[str, tuple[dist.ProcessGroup, dict[tuple[str, ...], list[int]]]] = {}
_decided: weakref.WeakSet[object] = weakref.WeakSet()  # compilations whose joint passes have run


def depends_on_shapes(plan: Plan) -> bool:
    """Whether something in the plan is decided for each graph from what it computes."""
    return plan.memory_budget not in (None, 1.0) or plan.is_from_costs


def is_undecided(plan: Plan) -> bool:
    """Whether ranks may still have to decide something about the graph that is being compiled."""
    context = tracing_context()
    return depends_on_shapes(plan) and (
        plan.is_from_costs or context is None or context not in _decided
    )


def note_decided() -> None:
    """The joint passes have run: nothing is left to decide for this graph but what depends on
    costs.
    """
    context = tracing_context()
    if context is not None:
        _decided.add(context)


def agreed(graph: Graph, plan: Plan, what: str, mine: list[int], combine: Combine) -> list[int]:
    """Returns what all ranks do: `combine` of what each would do, along one axis of the mesh and
    then along the other. Asked once for each structure, as long as its process groups live.

    Raises:
        DivergenceError: a rank compiles another structure just now.
    """
    if not dist.is_initialized():  # a graph planned by itself
        return mine
    specs = specs_of(graph)
    groups = dict.fromkeys(name for s in specs for name in (s.group, s.replicate_group) if name)
    if not groups:  # nothing of ours, so nobody to agree with
        return mine
    key = (what, str(plan.undecided), *groups, *map(_structure, specs))
    kept = [kept_for(group_named(name), name, _settled, dict) for name in groups]
    if not all(key in decisions for decisions in kept):
        for group in groups:
            told = everyones(
                group,
                f"a decision about {what} of {len(specs)} parameters",
                " ".join(map(str, mine)),
            )
            mine = combine([[int(word) for word in text.split()] for text in told])
        for decisions in kept:
            decisions[key] = mine
    return kept[0][key]


def settle_costs(graph: Graph, plan: Plan) -> Plan:
    """The plan for a graph that is scheduled by costs: as by default, if what it computes costs
    another time on another rank.

    Where it costs the same, that is noted on the nodes: a rank that compiles the structure again,
    for another batch, goes on to schedule by these times, since other ranks run what they have.
    """
    if plan.costs is None or not plan.is_from_costs:
        return plan
    nodes = _priced(graph)
    nanoseconds = [round(plan.costs.compute(node) * 1e9) for node in nodes]
    same = agreed(
        graph,
        plan,
        "costs",
        nanoseconds,
        lambda told: told[0] if all(t == told[0] for t in told) else [-1],
    )
    if len(same) == len(nodes) and same != [-1]:
        for node, settled in zip(nodes, same, strict=True):
            set_seconds(node, settled / 1e9)
        return plan
    warn_once(
        "compiled_fsdp: ranks have batches of other shapes, so that costs differ between them, and "
        "collectives would start in another order on each: their graphs are scheduled at the "
        "distances of Plan() instead"
    )
    distances = {
        name: d if getattr(plan, name) is None else getattr(plan, name)
        for name, d in DISTANCES.items()
    }
    return replace(plan, costs=None, **distances)  # type: ignore[arg-type]


def note_costs(graph: Graph, plan: Plan) -> None:
    """The same, as far as one rank can tell: where every rank's batch has these shapes."""
    if plan.costs is not None and plan.is_from_costs:
        nodes = _priced(graph)
        for node, seconds in [(n, round(plan.costs.compute(n) * 1e9) / 1e9) for n in nodes]:
            set_seconds(node, seconds)


def _priced(graph: Graph) -> list[Node]:
    return [
        n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), Tensor)
    ]


def specs_of(graph: Graph) -> list[ParamSpec]:
    """Returns the specs of every read and every gradient, in the order of the graph."""
    return [param_spec(node) for node in find(graph, *TO_LOWER)]


def _structure(spec: ParamSpec) -> str:
    """Returns what is the same on all ranks: units are numbered, and groups named, by each process
    for itself.
    """
    return (
        f"{spec.fqn} {spec.offset} {spec.shape} {spec.dtype} {spec.group_size} "
        f"{spec.replicate_size} {spec.reshard} {spec.sync}"
    )
