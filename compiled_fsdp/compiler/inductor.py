"""The passes inside Inductor, so that plain `torch.compile(model)` applies them.

Inductor's joint hook gets the joint graph before it is split, its post-grad hook each half. Both
are global settings: ours are added behind whatever the user set, and do nothing on graphs without
fsdp ops. Their `uuid` is part of the compile cache's key: a warm cache holds code that our passes
made, of this version and under this plan.

Private torch used here (tried on 2.11 and 2.13): `torch._inductor.config`'s
`joint_custom_post_pass`, `post_grad_custom_post_pass` and `_pre_fusion_custom_pass`, and
`torch._inductor.custom_graph_pass`. If the hooks move, the ops run unlowered and say so (`ops.py`).
Inductor's lowering and scheduler take more than a second to import. They are imported when Inductor
compiles, so that a script that trains eagerly does not wait for them.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch._inductor.config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

from compiled_fsdp import passes
from compiled_fsdp.dump import writer as dump
from compiled_fsdp.ir.collectives import STARTS
from compiled_fsdp.ir.graph import find, output
from compiled_fsdp.ir.meta import get_tag, keep_unpadded, see_tensors_only
from compiled_fsdp.ir.schema import TO_LOWER
from compiled_fsdp.ir.storage import storage_of
from compiled_fsdp.ir.view_values import follow_views
from compiled_fsdp.passes.pipeline import key as pipeline_key
from compiled_fsdp.planning import chunks
from compiled_fsdp.planning.consensus import is_undecided, note_decided
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.torch_private.graphs import keep_uncopied
from compiled_fsdp.torch_private.known_values import note_values, update_values, watch_values
from compiled_fsdp.torch_private.padding import then_mark
from compiled_fsdp.torch_private.sizes import fuse_hinted_sizes
from compiled_fsdp.torch_private.subgraphs import prepare_subgraphs

from .driver import run_half, run_joint
from .partition import install_partitioner

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch.fx import Graph, GraphModule

    from .whole_step import WholeStep


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
    """Returns a hash of all sources: a new version must not meet an old version's cache."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


class JointPass(CustomGraphPass):
    """Inductor's joint hook; of the graph of a whole step, if there is one."""

    def __init__(self, step: WholeStep | None = None) -> None:
        self.step = step

    def __call__(self, graph: Graph) -> None:
        """Run the joint passes on the module that owns the graph."""
        watch_values()
        keep_uncopied(lambda graph: bool(find(graph, *TO_LOWER)))
        run_joint(_module(graph), self.step, is_fused=True)
        note_decided()

    def uuid(self) -> Any:
        """See `_cached_as`."""
        return _cached_as("joint" if self.step is None else f"joint {self.step}")


class HalfPass(CustomGraphPass):
    """Inductor's post-grad hook, called for forward and backward."""

    def __call__(self, graph: Graph) -> None:
        """Run the half passes on the module that owns the graph, which Inductor lowers next."""
        from .pin_order import keep_simple_overlap_out  # imports Inductor's scheduler

        keep_simple_overlap_out()
        prepare_subgraphs()
        fuse_hinted_sizes()
        then_mark(_keep_sent_unpadded)
        gm = _module(graph)
        update_values(gm)
        run_half(gm, is_fused=True)
        see_tensors_only(output(gm.graph))
        # passes of a user's leave values to Inductor
        if find(gm.graph, *STARTS) and pipeline_key() is not None and follow_views(gm.graph):
            note_values(gm)

    def uuid(self) -> Any:
        """As for `JointPass`."""
        return _cached_as("half")


class PinPass(CustomSchedulerPass):  # type: ignore[misc]
    """Inductor's scheduler hook; behind a user's, which there can be only one of."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        """Run the user's pass, then pin the order."""
        from .pin_order import pin_order  # imports Inductor's scheduler

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
    """Version, pipeline and plan; None, so that the cache is bypassed and every pass really runs:
    while dumping, with passes of a user's, and where ranks are yet to decide together
    (`consensus.py`).
    """
    plan, passes_key = current_plan(), pipeline_key()
    if dump.folder() or passes_key is None or is_undecided(plan) or chunks.current() is not None:
        return None
    return f"compiled_fsdp {name} {source_hash()} {passes_key} {plan}"


def _keep_sent_unpadded(graph: Graph) -> None:
    """What units send is in one piece: a bucket's buffer, of which they send a view."""
    for node in find(graph, *STARTS):
        if get_tag(node) is not None:
            for value in node.all_input_nodes:
                keep_unpadded(storage_of(value))


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
    install_partitioner()


def joint_pass_of(step: WholeStep) -> CustomGraphPass:
    """What `install_passes` has put into Inductor's joint hook, for the graph of a whole step."""
    present = _flatten(inductor_config.joint_custom_post_pass)
    return Chain(
        tuple(JointPass(step) if isinstance(entry, JointPass) else entry for entry in present)
    )


def _flatten(hook: Any) -> tuple[Any, ...]:
    if hook is None:
        return ()
    if isinstance(hook, Chain):
        return hook.passes
    return tuple(hook) if isinstance(hook, list | tuple) else (hook,)
