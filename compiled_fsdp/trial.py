"""Trials: copies of graphs that are split and scheduled to be measured, and thrown away. No code is made for them.

How often the planner tries decides how long it takes, and half of a trial was torch's partitioner; so halves that were split with
nothing kept can be made into those with parameters kept (`with_kept`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import Graph

from . import meta
from .graph import backward_nodes, erase_unused, find, output
from .halves import saved_places, taken_over
from .memory import StepProfile, profile_step
from .partition import partition
from .schema import UNSHARD
from .spec import ParamSpec
from .torch_private import graph_module_without_code, without_code

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import GraphModule, Node

    from .partition import Halves
    from .plan import Plan


@dataclass(frozen=True, slots=True)
class Trial:
    """Both halves under a plan, and the memory of the step."""

    forward: Graph
    backward: Graph
    profile: StepProfile


def copied(gm: GraphModule) -> GraphModule:
    """A copy of the graph, around the same module."""
    graph = Graph()
    meta.take_over(graph.output(graph.graph_copy(gm.graph, {})), output(gm.graph))
    return graph_module_without_code(gm, graph)


def split(gm: GraphModule, plan: Plan) -> Halves:
    """The halves of a copy of this joint graph."""
    from .passes.base import run_pipeline
    from .passes.pipeline import JOINT

    joint = run_pipeline(copied(gm), plan, JOINT, is_trial=True)
    outputs = list(output(joint.graph).args[0])  # type: ignore[arg-type]  # gradients come last; None where an input has none
    backward_of = backward_nodes(joint.graph)
    num_outputs = next(i for i, n in enumerate(outputs) if n is None or n in backward_of)
    with without_code():
        return partition(joint, (), plan, num_fwd_outputs=num_outputs)


def schedule(halves: Halves, plan: Plan, *, is_fused: bool) -> Trial:
    """A trial of these halves, which are used up."""
    from .passes.base import Property, run_pipeline
    from .passes.pipeline import HALF

    plan = plan.executed_by(is_fused=is_fused)
    passes = [entry for entry in HALF if entry.provides is not Property.VERIFIED]
    forward, backward = (run_pipeline(half, plan, passes, is_trial=True).graph for half in halves)
    return Trial(forward, backward, profile_step(forward, backward, is_fused))


def with_kept(halves: Halves, params: Collection[tuple[str, str]]) -> Halves:
    """Copies of halves in which parameters (unit, name) are dropped, with these kept.

    They are what `split` makes of the joint graph under a plan that keeps them, in a tenth of the time: what is cheaply computed
    from them is computed again in backward then as now (`passes/reshard.py`), and a second gather becomes a value that forward
    saves.
    """
    forward, backward = copies = copied(halves[0]), copied(halves[1])
    _keep(forward.graph, backward.graph, set(params))
    return copies


def _keep(forward: Graph, backward: Graph, params: set[tuple[str, str]]) -> None:
    unsharded = {}
    for node in find(forward, UNSHARD):
        spec = ParamSpec.of(node.args[1:])
        if (spec.unit, spec.fqn) in params:
            node.args = (node.args[0], *replace(spec, reshard="keep").args())  # type: ignore[arg-type]
            unsharded[spec.unit, spec.fqn] = node
    taken = taken_over(backward)
    places = saved_places(forward, len(taken))
    before = meta.returned(output(forward))
    saved: list[tuple[Node | None, object]] = []
    for node in find(backward, UNSHARD):
        spec = ParamSpec.of(node.args[1:])
        if kept := unsharded.get((spec.unit, spec.fqn)):
            with backward.inserting_before(taken[0]):
                instead = backward.placeholder(node.name)
            meta.take_over(instead, kept)
            node.replace_all_uses_with(instead)
            erase_unused(node, UNSHARD)
            saved.append((kept, before[places[0]][1]))
    for node, place in zip(taken, places, strict=True):
        if node.users:
            saved.append(before[place])
        else:
            backward.erase_node(node)
    if places:
        after = [pair for i, pair in enumerate(before) if i not in set(places)]
        after[places[0] : places[0]] = saved
        meta.set_returned(output(forward), after)
