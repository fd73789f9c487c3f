"""The driver: what both executors call to run the pipeline on a graph.

`run_joint` is called with the joint graph, `run_half` with a forward, backward or inference graph,
by our own backend (`backend.py`) and by Inductor's hooks (`inductor.py`). The passes, in order, are
those of `passes/pipeline.py`; here stands what is decided before them, and who watches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp import progress
from compiled_fsdp.dump import writer as dump
from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.dump.layout import JOINT
from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.expected import note_expected
from compiled_fsdp.ir.graph import find, phase_of
from compiled_fsdp.ir.meta import (
    get_consumed,
    get_room,
    get_tag,
    note_room,
    set_consumed,
    take_room,
)
from compiled_fsdp.ir.schema import REDUCE_GRAD, TO_LOWER, UNSHARD, param_spec
from compiled_fsdp.options import is_verifying, note
from compiled_fsdp.passes.base import Context, Property, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.passes.verify import check
from compiled_fsdp.planning.chunks import settle
from compiled_fsdp.planning.consensus import settle_costs
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import Plan, current_plan
from compiled_fsdp.torch_private.compiling import hurry
from compiled_fsdp.torch_private.dynamo import trace_again_from_backend
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.torch_private.subgraphs import check_wrapper, why_inline
from compiled_fsdp.wire.gloo import is_gloo

from .budget import fit_budget, options_of
from .read_past_calls import read_past_calls
from .splitting import fit_split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule

    from compiled_fsdp.options import Consumed
    from compiled_fsdp.passes.base import Pass

    from .room import Room
    from .whole_step import WholeStep


def run_joint(
    gm: GraphModule, step: WholeStep | None = None, *, is_fused: bool = False
) -> GraphModule:
    """Apply the joint passes, if the graph has anything of ours (with resident parameters,
    reductions alone).

    step: of which this is the graph.
    is_fused: as for `run_half`.
    """
    if not find(gm.graph, UNSHARD, REDUCE_GRAD):
        return gm
    read_past_calls(gm)
    note_expected(gm.graph)
    if any(param_spec(n).group_size > 1 for n in find(gm.graph, UNSHARD)):
        current_plan().say_missing_costs()
    context, asked = Context(is_fused, common_name=common_name), current_plan()
    if settle(gm.graph, asked.executed_by(is_fused=is_fused)):
        trace_again_from_backend("tokens travel in chunks")
    if step is not None:
        step.check(gm)
        context = replace(context, batches=step.batches, reduces_once=step.reduces_once)
    progress.at("joint graph, before its passes")
    plan = fit_budget(gm, asked, is_fused=is_fused, step=step)
    if plan is not asked:
        note(context.consumed, fit_budget.__name__, "Plan.memory_budget")
    for option in options_of(gm, asked, step):
        note(context.consumed, fit_budget.__name__, option)
    watcher = dump.Dump(gm, JOINT, plan)
    after_pass = _counting("joint graph", current(Stage.JOINT), context, watcher.after_pass)
    gm = run_pipeline(gm, plan, current(Stage.JOINT), after_pass, context)
    note(context.consumed, "partition", "Plan.recompute")
    set_consumed(find(gm.graph, UNSHARD, REDUCE_GRAD), context.consumed)
    if (room := take_room(gm)) is not None:
        note_room(find(gm.graph, UNSHARD, REDUCE_GRAD), room)
    return gm


def run_half(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
    """Apply the passes for a forward, backward or inference graph; one without anything of ours
    gets those alone that are for every graph.

    is_fused: whether a compiler that fuses kernels comes next.
    """
    is_ours = bool(find(gm.graph, *TO_LOWER))
    if is_fused and is_ours:
        check_wrapper()
    context = Context(is_fused, is_ours=is_ours, is_gloo=is_gloo)
    if is_fused:
        context = replace(context, inline=why_inline())
    if is_ours:
        gm = _run_ours(gm, context)
    else:
        gm = run_pipeline(gm, Plan(), current(Stage.HALF), context=context)
    dump.trace_schedule(gm.graph, is_fused=is_fused)
    return gm


def _run_ours(gm: GraphModule, context: Context) -> GraphModule:
    if current_plan().copy_out == "strided" and not context.is_fused:
        warn_once(
            "compiled_fsdp: Plan(copy_out='strided') is for kernels that Inductor generates; this "
            "backend copies, as with 'copy'"
        )
    note_expected(gm.graph)  # an inference graph has been in no joint one
    half = f"{phase_of(gm.graph)} graph"
    hurry()
    progress.at(f"{half}, before its passes")
    asked = current_plan().executed_by(is_fused=context.is_fused)
    plan = fit_split(gm, settle_costs(gm.graph, asked), is_fused=context.is_fused)
    held = [e.provides.name for e in current(Stage.JOINT) if e.provides is not None]
    watcher = dump.Dump(gm, phase_of(gm.graph), plan, held, context.is_fused)
    after_pass = _checking(plan, watcher.after_pass) if is_verifying() else watcher.after_pass
    after_pass = _counting(half, current(Stage.HALF), context, after_pass)
    context = _recording(
        context, plan, get_consumed(gm.graph.nodes), get_room(gm.graph.nodes), watcher
    )
    return run_pipeline(gm, plan, current(Stage.HALF), after_pass, context)


def _counting(
    what: str,
    passes: Sequence[Pass],
    context: Context,
    after_pass: Callable[[GraphModule, Pass], None],
) -> Callable[[GraphModule, Pass], None]:
    """Say how many of a graph's passes have run, after each."""
    names = [entry.name for entry in passes if entry.runs_in(context)]

    def then_count(gm: GraphModule, entry: Pass) -> None:
        after_pass(gm, entry)
        done = names.index(entry.name) + 1
        progress.at(f"{what}, pass {done} of {len(names)} done ({entry.name})")

    return then_count


def _recording(
    context: Context, plan: Plan, before_split: Consumed, room: Room | None, watcher: dump.Dump
) -> Context:
    """The context with what makes the record of a half, in which the options that were consumed
    before the joint graph was split come first, and which says whether it fits the memory budget.
    """

    def record(gm: GraphModule) -> str:
        consumed, is_fused = {**before_split, **context.consumed}, context.is_fused
        memory = (
            profile(gm.graph, is_fused)
            if room is None
            else room.measured(gm.graph, is_fused=is_fused)
        )
        made = GraphRecord.of(
            gm.graph,
            plan,
            current_plan(),
            consumed,
            context.inline,
            memory,
            [] if room is None else room.choices,
            is_fused=is_fused,
        ).text()
        watcher.write_record(made)
        return made

    return replace(context, record=record)


def _checking(
    plan: Plan, after_pass: Callable[[GraphModule, Pass], None]
) -> Callable[[GraphModule, Pass], None]:
    checked: list[object] = []
    held: list[Property | None] = []

    def then_check(gm: GraphModule, entry: Pass) -> None:
        after_pass(gm, entry)
        held.append(entry.provides)
        if Property.LOWERED in held and (now := _program(gm.graph)) != checked:
            check(gm, plan, entry.name)
            checked[:] = now

    return then_check


def _program(graph: Graph) -> list[object]:
    """All that `check` reads of a graph: most passes leave it alone, and it is not checked
    twice.
    """
    return [(node, node.target, node.args, node.kwargs, get_tag(node)) for node in graph.nodes]
