"""Trials: copies of graphs that are split and scheduled to be measured, and thrown away. No code is
made for them.

How often the planner tries decides how long it takes, and half of a trial was torch's partitioner;
so halves that were split with nothing kept can be made into those with parameters kept
(`with_kept`), where the partitioner would draw the same line (`is_settled`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.descriptors import returned, set_returned
from compiled_fsdp.ir.graph import backward_nodes, erase_unused, find, output
from compiled_fsdp.ir.schema import UNSHARD, param_spec, set_param_spec
from compiled_fsdp.passes.base import Context, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.passes.reshard import from_weights
from compiled_fsdp.planning.consensus import note_costs
from compiled_fsdp.planning.costs import nbytes
from compiled_fsdp.planning.halves import saved_inputs, saved_places
from compiled_fsdp.planning.memory import lifetimes_of, profile_of
from compiled_fsdp.torch_private.graphs import graph_module_without_code, without_code

from .partition import partition
from .stitch import stitch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch.fx import GraphModule

    from compiled_fsdp.planning.lifetimes import Lifetimes
    from compiled_fsdp.planning.memory import MemoryProfile
    from compiled_fsdp.planning.plan import Plan

    from .partition import Halves
    from .whole_step import WholeStep


@dataclass(frozen=True, slots=True)
class Trial:
    """What would be compiled under a plan, forward and backward or the graph of a whole step, and
    its memory.
    """

    lifetimes: tuple[Lifetimes, ...]
    profiles: tuple[MemoryProfile, ...]

    @property
    def peak(self) -> int:
        """Bytes above what is at rest."""
        return max(profile.peak for profile in self.profiles)

    @property
    def num_nodes(self) -> int:
        """Of all graphs."""
        return sum(len(profile.nodes) for profile in self.profiles)


def copied_graph(graph: Graph) -> Graph:
    """A copy of a graph, its output's metadata left out, as `Graph.graph_copy` makes it: metadata
    is put into the new nodes' dicts, where to set another dict has torch look up each node twice.
    """
    copy, copies = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        args = map_arg(node.args, copies.__getitem__)
        if node.op == "output":
            copy.output(args[0])
            break
        kwargs = map_arg(node.kwargs, copies.__getitem__)
        copies[node] = new = copy.create_node(
            node.op, node.target, args, kwargs, node.name, node.type
        )
        meta.copy_into(new, node)
    return copy


def copied(gm: GraphModule) -> GraphModule:
    """A copy of the graph, around the same module."""
    graph = copied_graph(gm.graph)
    meta.take_over(output(graph), output(gm.graph))
    return graph_module_without_code(gm, graph)


def split(gm: GraphModule, plan: Plan, step: WholeStep | None = None) -> Halves:
    """The halves of a copy of this joint graph. step: of which it is the graph."""
    context = Context(is_trial=True)
    if step is not None:
        context = replace(context, batches=step.batches, reduces_once=step.reduces_once)
    joint = run_pipeline(copied(gm), plan, current(Stage.JOINT), context=context)
    with without_code():
        return partition(joint, (), plan, num_fwd_outputs=num_outputs(joint.graph))


def num_outputs(joint: Graph) -> int:
    """How many values a joint graph returns that are not gradients."""
    outputs = list(output(joint).args[0])  # type: ignore[arg-type]  # gradients come last; None where an input has none
    backward_of = backward_nodes(joint)
    return next(i for i, n in enumerate(outputs) if n is None or n in backward_of)


def run_as_it_is(gm: GraphModule, plan: Plan, context: Context) -> GraphModule:
    """A trial of a graph under a plan in which nothing is left to decide."""
    return run_pipeline(gm, plan, current(Stage.HALF), context=context)


def schedule(
    halves: Halves,
    plan: Plan,
    *,
    is_fused: bool,
    run: Callable[[GraphModule, Plan, Context], GraphModule] = run_as_it_is,
    step: tuple[WholeStep, int] | None = None,
) -> Trial:
    """A trial of these halves, which are used up.

    run: tries each graph, and may decide the rest of its plan, as `splitting.run_fitted` does.
    step: that they become, and how many values forward returns that are not for backward.
    """
    graphs: tuple[GraphModule, ...] = halves
    if step is not None:
        whole, num_forward = step
        with without_code():
            graphs = stitch(*halves, num_forward, whole, plan, is_fused=is_fused)[:1]
    plan = plan.executed_by(is_fused=is_fused)
    for gm in graphs:
        note_costs(gm.graph, plan)
    context = Context(is_trial=True, is_fused=is_fused)
    lifetimes = lifetimes_of([run(gm, plan, context).graph for gm in graphs], is_fused)
    return Trial(lifetimes, tuple(map(profile_of, lifetimes)))


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
    before = returned(output(forward))
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
        set_returned(output(forward), after)
