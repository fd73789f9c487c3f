"""Trials: copies of graphs that are split and scheduled to be measured, and thrown away. No code is
made for them.

How often the planner tries decides how long it takes, and half of a trial was torch's partitioner;
so halves that were split with nothing kept can be made into those with parameters kept
(`with_kept`), where the partitioner would draw the same line (`is_settled`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import Graph

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.graph import backward_nodes, erase_unused, find, output
from compiled_fsdp.ir.schema import UNSHARD, param_spec, set_param_spec
from compiled_fsdp.passes.base import Context, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.passes.reshard import from_weights
from compiled_fsdp.planning.costs import nbytes
from compiled_fsdp.planning.halves import saved_inputs, saved_places
from compiled_fsdp.planning.memory import StepProfile, profile, profile_step
from compiled_fsdp.torch_private.graphs import graph_module_without_code, without_code

from .partition import partition
from .stitch import stitch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.plan import Plan

    from .partition import Halves
    from .stitch import WholeStep


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
    return _split(gm, plan, Context(is_trial=True))[0]


def _split(gm: GraphModule, plan: Plan, context: Context) -> tuple[Halves, int]:
    """And how many values forward returns that are not for backward."""
    joint = run_pipeline(copied(gm), plan, current(Stage.JOINT), context=context)
    outputs = list(output(joint.graph).args[0])  # type: ignore[arg-type]  # gradients come last; None where an input has none
    backward_of = backward_nodes(joint.graph)
    num_outputs = next(i for i, n in enumerate(outputs) if n is None or n in backward_of)
    with without_code():
        return partition(joint, (), plan, num_fwd_outputs=num_outputs), num_outputs


def peak_of_step(gm: GraphModule, plan: Plan, step: WholeStep, *, is_fused: bool) -> int:
    """The peak of the graph of a whole step, which a copy of this joint graph becomes."""
    context = Context(is_trial=True, batches=step.batches, reduces_once=step.reduces_once)
    halves, num_outputs = _split(gm, plan, context)
    with without_code():
        whole, _ = stitch(*halves, num_outputs, step, plan, is_fused=is_fused)
    plan = plan.executed_by(is_fused=is_fused)
    whole = run_pipeline(whole, plan, current(Stage.HALF), context=Context(is_trial=True))
    return profile(whole.graph, is_fused).peak


def as_it_is(_half: GraphModule, plan: Plan) -> Plan:
    """Nothing is left to decide."""
    return plan


def schedule(
    halves: Halves,
    plan: Plan,
    *,
    is_fused: bool,
    fit: Callable[[GraphModule, Plan], Plan] = as_it_is,
) -> Trial:
    """A trial of these halves, which are used up. fit: decides the rest of the plan for each half,
    as `fit_split` does.
    """
    plan = plan.executed_by(is_fused=is_fused)
    passes = current(Stage.HALF)
    forward, backward = (
        run_pipeline(half, fit(half, plan), passes, context=Context(is_trial=True)).graph
        for half in halves
    )
    return Trial(forward, backward, profile_step(forward, backward, is_fused))


def is_settled(halves: Halves) -> bool:
    """Whether the partitioner's line between saving and computing again is the same whichever
    parameters are kept.

    Kept parameters have a price, where dropped ones are there for nothing: what backward computes
    again from parameters and other values (a weight times a mask) might be saved instead then, if
    it is not larger by far (a norm's output is). By torch's price of a saved value: its bytes,
    times 1.1 for each step to the first reader in backward, twice if only fused kernels read it.
    What is cheaply computed from parameters alone is computed again in either case
    (`passes/reshard.py`).
    """
    forward, backward = (half.graph for half in halves)
    names = {node.name for node in forward.nodes if node.op == "call_function"}
    again = [node for node in backward.nodes if node.name in names]
    unshards = find(backward, UNSHARD)
    if any(node.name not in names for node in unshards):  # what backward alone reads
        return False
    alone = set(from_weights(unshards, set()))
    steps: dict[Node, int] = {}
    for node in reversed(again):
        steps[node] = 1 + min(
            (steps[user] if user.name in names else 0 for user in node.users), default=0
        )
    price = {node: 2 * nbytes(node) * 1.1 ** min(steps[node], 100) for node in unshards}
    read: dict[Node, set[Node]] = {node: {node} for node in unshards}
    for node in again:
        if node not in read:
            read[node] = set().union(*(read.get(n, ()) for n in node.all_input_nodes))
            if node not in alone and nbytes(node) < sum(price[n] for n in read[node]):
                return False
    return True


def with_kept(halves: Halves, params: Collection[tuple[str, str]]) -> Halves:
    """Copies of halves in which parameters (unit, name) are dropped, with these kept.

    If `is_settled`, they are what `split` makes of the joint graph under a plan that keeps them, in
    a tenth of the time: what is cheaply computed from them alone is computed again in backward then
    as now (`passes/reshard.py`), and a second gather becomes a value that forward saves.
    """
    forward, backward = copies = copied(halves[0]), copied(halves[1])
    _keep(forward.graph, backward.graph, set(params))
    return copies


def _keep(forward: Graph, backward: Graph, params: set[tuple[str, str]]) -> None:
    unsharded = {}
    for node in find(forward, UNSHARD):
        spec = param_spec(node)
        if (spec.unit, spec.fqn) in params:
            set_param_spec(node, replace(spec, reshard="keep"))
            unsharded[spec.unit, spec.fqn] = node
    inputs = saved_inputs(backward)
    places = saved_places(forward, len(inputs))
    before = meta.returned(output(forward))
    saved: list[tuple[Node | None, object]] = []
    for node in find(backward, UNSHARD):
        spec = param_spec(node)
        if kept := unsharded.get((spec.unit, spec.fqn)):
            with backward.inserting_before(inputs[0]):
                instead = backward.placeholder(node.name)
            meta.take_over(instead, kept)
            node.replace_all_uses_with(instead)
            erase_unused(node, UNSHARD)
            saved.append((kept, before[places[0]][1]))
    for node, place in zip(inputs, places, strict=True):
        if node.users:
            saved.append(before[place])
        else:
            backward.erase_node(node)
    if places:
        dropped = set(places)
        after = [pair for i, pair in enumerate(before) if i not in dropped]
        after[places[0] : places[0]] = saved
        meta.set_returned(output(forward), after)
