"""The passes inside Inductor, so that plain `torch.compile(model)` applies them.

Inductor's joint hook gets the joint graph before it is split, its post-grad hook each half. Both
are global settings: ours are added behind whatever the user set, and do nothing on graphs without
fsdp ops. Their `uuid` is part of the compile cache's key: a warm cache holds code that our passes
made, of this version and under this plan.

Private torch used here (tried on 2.11 and 2.13): `torch._inductor.config`'s
`joint_custom_post_pass`, `post_grad_custom_post_pass` and `_pre_fusion_custom_pass`, and
`torch._inductor.custom_graph_pass`. If the hooks move, the ops run unlowered and say so (`ops.py`).
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from compiled_fsdp import passes
from compiled_fsdp.dump import writer as dump
from compiled_fsdp.dump.graph_record import GraphRecord
from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import erase_all, find, value
from compiled_fsdp.ir.heads import add_heads, note_heads
from compiled_fsdp.ir.meta import (
    begin_pass,
    consume,
    get_tag,
    hand_on,
    handed_on,
    set_record,
    take_consumed,
)
from compiled_fsdp.ir.schema import (
    ALL_GATHER,
    ALL_REDUCE,
    COPY_COLUMNS,
    FREE,
    REDUCE_GRAD,
    UNSHARD,
    UNSHARD_SLICE,
)
from compiled_fsdp.ir.sequence import add_agreement, owner
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.planning.consensus import is_undecided, note_decided, settle_costs
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.wire import gloo

from .partition import install_partitioner
from .pin_order import keep_simple_overlap_out, pin_order

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.passes.base import Pass


# torch 2.11 takes a `CustomGraphPass` as the scheduler's pass.
CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


def sources() -> list[Path]:
    """Every file of this project: all rooms, and `passes/`, which stands beside the package in a
    checkout.
    """
    folders = {Path(__file__).parents[1], Path(passes.__path__[0])}
    return sorted({path for folder in folders for path in folder.rglob("*.py")})


@cache
def source_hash() -> str:
    """Of all sources: a new version must not meet an old version's cache."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run_joint(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
    """Apply the joint passes, if the graph has anything of ours (with resident parameters,
    reductions alone).

    is_fused: as for `run_half`.
    """
    from compiled_fsdp.passes.base import run_pipeline
    from compiled_fsdp.passes.pipeline import JOINT

    from .budget import fit_budget

    if not find(gm.graph, UNSHARD, REDUCE_GRAD):
        return gm
    if any(ParamSpec.of(n.args[1:]).group_size > 1 for n in find(gm.graph, UNSHARD)):
        current_plan().say_missing_costs()
    plan = fit_budget(gm, current_plan(), is_fused=is_fused)
    gm = run_pipeline(gm, plan, JOINT, dump.Dump(gm, "joint", plan).after_pass)
    note_heads(gm.graph)
    begin_pass(gm, "partition")
    consume(gm, "Plan.recompute")
    hand_on(gm, find(gm.graph, UNSHARD, REDUCE_GRAD))
    return gm


def run_half(gm: GraphModule, *, is_fused: bool = False) -> GraphModule:
    """Apply the passes for a forward, backward or inference graph, if it has anything of ours.

    is_fused: whether a compiler that fuses kernels comes next.
    """
    from compiled_fsdp.passes.base import run_pipeline
    from compiled_fsdp.passes.pipeline import HALF, JOINT
    from compiled_fsdp.passes.verify import check

    from .splitting import fit_split

    if not find(gm.graph, UNSHARD, UNSHARD_SLICE, REDUCE_GRAD):
        return gm
    if current_plan().copy_out == "strided" and not is_fused:
        warn_once(
            "compiled_fsdp: Plan(copy_out='strided') is for kernels that Inductor generates; this "
            "backend copies, as with 'copy'"
        )
    plan = fit_split(gm, settle_costs(gm.graph, current_plan().executed_by(is_fused=is_fused)))
    writer = dump.Dump(
        gm, dump.kind_of(gm.graph), plan, [entry.provides.name for entry in JOINT], is_fused
    )

    checked: list[object] = []

    def after_pass(gm: GraphModule, entry: Pass) -> None:
        writer.after_pass(gm, entry)
        if os.environ.get("COMPILED_FSDP_VERIFY") and (now := _program(gm.graph)) != checked:
            check(gm, plan, entry.name)
            checked[:] = now

    decided = handed_on(gm.graph.nodes)
    gm = run_pipeline(gm, plan, HALF, after_pass)
    consumed = {**decided, **take_consumed(gm)}
    record = GraphRecord.of(gm.graph, plan, current_plan(), consumed, is_fused=is_fused).text()
    set_record(gm, record)
    writer.write_record(record)
    return gm


def _program(graph: Graph) -> list[object]:
    """All that `check` reads of a graph: most passes leave it alone, and it is not checked
    twice.
    """
    return [(node, node.target, node.args, node.kwargs, get_tag(node)) for node in graph.nodes]


def use_gloo(graph: Graph) -> None:
    """Let gloo gather by sends and receives, as the eager runtime does; see `gloo.py`. Name what
    our ops communicate.

    The last step for both executors.
    """
    for node in find(graph, comm.ALL_GATHER):
        shard, group_size, group = node.args
        if gloo.is_gloo(group, value(shard).device):  # type: ignore[arg-type]
            node.target, node.args = ALL_GATHER, (shard, [value(shard).numel()], group_size, group)  # type: ignore[arg-type]
    for node in find(graph, comm.ALL_REDUCE):
        if get_tag(node) is not None and gloo.is_gloo(node.args[2], value(node).device):  # type: ignore[arg-type]
            node.target = ALL_REDUCE
    for node in find(graph, ALL_GATHER, comm.ALL_TO_ALL, ALL_REDUCE):
        node.kwargs = {"what": owner(node), "phase": dump.kind_of(graph)}


class JointPass(CustomGraphPass):
    """Inductor's joint hook."""

    def __call__(self, graph: Graph) -> None:
        """Run the joint passes on the module that owns the graph."""
        run_joint(_module(graph), is_fused=True)
        note_decided()

    def uuid(self) -> Any:
        """See `_cached_as`."""
        return _cached_as("joint")


class HalfPass(CustomGraphPass):
    """Inductor's post-grad hook, called for forward and backward."""

    def __call__(self, graph: Graph) -> None:
        """Run the half passes, then hand over: without `free` nodes, since Inductor frees by
        liveness, and with copies that it calls instead of compiling one kernel for each shape and
        offset, which made cold starts a third slower.
        """
        run_half(_module(graph), is_fused=True)
        erase_all(find(graph, FREE))
        for node in find(graph, torch.ops.aten.clone.default):
            tag = get_tag(node)
            if tag is not None and tag.kind == "gather":
                node.target, node.kwargs = COPY_COLUMNS, {}
        add_heads(graph)
        add_agreement(graph)
        use_gloo(graph)
        dump.trace_schedule(graph, is_fused=True)

    def uuid(self) -> Any:
        """As for `JointPass`."""
        return _cached_as("half")


class PinPass(CustomSchedulerPass):  # type: ignore[misc]
    """Inductor's scheduler hook; behind a user's, which there can be only one of."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Run the user's pass, then pin the order."""
        return pin_order(nodes if self.before is None else self.before(nodes))

    def uuid(self) -> Any:
        """Ours and theirs; None (no caching) if theirs is a plain function."""
        if self.before is None:
            return f"compiled_fsdp pin {source_hash()}"
        theirs = self.before.uuid() if isinstance(self.before, CustomSchedulerPass) else None
        return None if theirs is None else f"{theirs} compiled_fsdp pin {source_hash()}"


class Chain(CustomGraphPass):
    """A user's hook, then ours."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        """Run them in order."""
        for entry in self.passes:
            entry(graph)

    def uuid(self) -> Any:
        """Theirs together; None (no caching) if a plain function is among them, as torch does for
        it alone.
        """
        ids = [
            entry.uuid() if isinstance(entry, CustomGraphPass) else None for entry in self.passes
        ]
        return None if None in ids else str(ids)


def _cached_as(name: str) -> str | None:
    """Version and plan; None, so that the cache is bypassed and every pass really runs: while
    dumping, and where ranks are yet to decide together (`consensus.py`).
    """
    plan = current_plan()
    return (
        None
        if dump.folder() or is_undecided(plan)
        else f"compiled_fsdp {name} {source_hash()} {plan}"
    )


def _module(graph: Graph) -> GraphModule:
    module: GraphModule = graph.owning_module  # type: ignore[assignment]
    return module


def install_passes() -> None:
    """Put our hooks behind the user's, once."""
    for name, ours in (
        ("joint_custom_post_pass", JointPass),
        ("post_grad_custom_post_pass", HalfPass),
    ):
        current = getattr(inductor_config, name)
        present = _flatten(current)
        if not any(isinstance(entry, ours) for entry in present):
            setattr(inductor_config, name, Chain((*present, ours())) if present else ours())
    if not isinstance(inductor_config._pre_fusion_custom_pass, PinPass):
        inductor_config._pre_fusion_custom_pass = PinPass(inductor_config._pre_fusion_custom_pass)
    keep_simple_overlap_out()
    install_partitioner()


def _flatten(hook: Any) -> tuple[Any, ...]:
    if hook is None:
        return ()
    if isinstance(hook, Chain):
        return hook.passes
    return tuple(hook) if isinstance(hook, list | tuple) else (hook,)
