"""The driver: what both executors call to run the pipeline on a graph.

`run_joint` is called with the joint graph, `run_half` with a forward, backward or inference graph,
by our own backend (`backend.py`) and by Inductor's hooks (`inductor.py`). The passes, in order, are
those of `passes/pipeline.py`; here stands what is decided before them, and who watches.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from compiled_fsdp import progress
from compiled_fsdp.dump import writer as dump
from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.graph import find, phase_of
from compiled_fsdp.ir.meta import (
    begin_pass,
    consume,
    get_tag,
    hand_on,
    handed_on,
    take_consumed,
)
from compiled_fsdp.ir.schema import REDUCE_GRAD, TO_LOWER, UNSHARD, param_spec
from compiled_fsdp.passes.base import Context, Property, Stage, run_pipeline
from compiled_fsdp.passes.pipeline import current
from compiled_fsdp.passes.verify import check
from compiled_fsdp.planning.consensus import settle_costs
from compiled_fsdp.planning.plan import Plan, current_plan
from compiled_fsdp.wire.gloo import is_gloo

from .budget import fit_budget
from .splitting import fit_split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, GraphModule

    from compiled_fsdp.ir.meta import Consumed
    from compiled_fsdp.passes.base import Pass


def run_joint(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
    """Apply the joint passes, if the graph has anything of ours (with resident parameters,
    reductions alone).

    is_fused: as for `run_half`.
    """
    if not find(gm.graph, UNSHARD, REDUCE_GRAD):
        return gm
    if any(param_spec(n).group_size > 1 for n in find(gm.graph, UNSHARD)):
        current_plan().say_missing_costs()
    progress.at("joint graph, before its passes")
    plan = fit_budget(gm, current_plan(), is_fused=is_fused)
    watcher, context = dump.Dump(gm, "joint", plan), Context(is_fused)
    after_pass = _counting("joint graph", current(Stage.JOINT), context, watcher.after_pass)
    gm = run_pipeline(gm, plan, current(Stage.JOINT), after_pass, context)
    begin_pass(gm, "partition")
    consume(gm, "Plan.recompute")
    hand_on(gm, find(gm.graph, UNSHARD, REDUCE_GRAD))
    return gm


def run_half(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
    """Apply the passes for a forward, backward or inference graph; one without anything of ours
    gets those alone that are for every graph.

    is_fused: whether a compiler that fuses kernels comes next.
    """
    is_ours = bool(find(gm.graph, *TO_LOWER))
    context = Context(is_fused, is_ours=is_ours, is_gloo=is_gloo)
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
    half = f"{phase_of(gm.graph)} graph"
    progress.at(f"{half}, before its passes")
    asked = current_plan().executed_by(is_fused=context.is_fused)
    plan = fit_split(gm, settle_costs(gm.graph, asked))
    held = [e.provides.name for e in current(Stage.JOINT) if e.provides is not None]
    watcher = dump.Dump(gm, phase_of(gm.graph), plan, held, context.is_fused)
    after_pass = _checking(plan, watcher.after_pass) if _is_checking() else watcher.after_pass
    after_pass = _counting(half, current(Stage.HALF), context, after_pass)
    record = _recorder(plan, handed_on(gm.graph.nodes), watcher, is_fused=context.is_fused)
    gm = run_pipeline(gm, plan, current(Stage.HALF), after_pass, replace(context, record=record))
    take_consumed(gm)
    return gm


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


def _recorder(
    plan: Plan, decided: Consumed, watcher: dump.Dump, *, is_fused: bool
) -> Callable[[GraphModule], str]:
    """What makes the record of a half graph, of whose joint graph's passes that is consumed."""

    def record(gm: GraphModule) -> str:
        consumed = {**decided, **take_consumed(gm)}
        made = GraphRecord.of(gm.graph, plan, current_plan(), consumed, is_fused=is_fused).text()
        watcher.write_record(made)
        return made

    return record


def _is_checking() -> bool:
    """Whether the invariants are to be checked after each pass, not the last one alone."""
    return bool(os.environ.get("COMPILED_FSDP_VERIFY"))


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
