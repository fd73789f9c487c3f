"""The pipeline: everything that happens to a graph, in the order in which it happens, for both
executors.

`compiler/driver.py` runs it. Three decisions stand outside, since each is about several graphs or
is made by trying this very list on copies; all but the first change the plan, not the graph:

- before the joint graph: where calls of equal units hand a parameter through, who reads it reads
  the parameter (`compiler/read_past_calls.py`); and which parameters a memory budget lets backward
  keep (`compiler/budget.py`)
- between the joint graph and its halves: where torch's partitioner cuts (`compiler/partition.py`),
  and what the graph of a whole step keeps where it turns (`compiler/step_gathers.py`)
- before a half: whether ranks take its nodes to cost the same (`planning/consensus.py`), and into
  parts of which size large units are cut (`compiler/splitting.py`)
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import OPTIONS
from compiled_fsdp.ir.graph import phase_of
from compiled_fsdp.ir.printer import show

from .add_checksums import add_checksums
from .agree import agree
from .await_verdict import await_verdict
from .base import Executor, Pass, Property, Stage, check_order, context_of
from .bucket_all_gather import bucket_all_gather
from .bucket_reduce_scatter import bucket_reduce_scatter
from .call_copies import call_copies
from .choose_collectives import choose_collectives
from .copy_aside import copy_aside
from .copy_columns import copy_columns
from .dedup_unshard import dedup_unshard
from .delay_wait import delay_wait
from .drop_frees import drop_frees
from .exchange_matrices import exchange_matrices
from .fetch_states import fetch_states
from .flatten_peak import flatten_peak
from .free import free
from .gather_ahead import gather_ahead
from .gather_next import gather_next
from .give_way import give_way
from .hide_copies import hide_copies
from .inline_pointwise import inline_pointwise
from .join_grads import join_grads
from .join_kernels import join_kernels
from .keep_grad_dtype import keep_grad_dtype
from .leave_in_flight import leave_in_flight
from .lower import lower
from .mark_offloaded import mark_offloaded
from .mark_recomputed import mark_recomputed
from .mark_states import mark_states
from .name_collectives import name_collectives
from .name_groups import name_groups
from .note_heads import note_heads
from .note_routing import note_routing
from .number_batches import number_batches
from .outline import outline
from .overlap_exchanges import overlap_exchanges
from .place_updates import place_updates
from .prefetch_all_gather import prefetch_all_gather
from .read_at_once import read_at_once
from .read_strided import read_strided
from .reshard import reshard
from .separate_exchanges import separate_exchanges
from .step_in_backward import step_in_backward
from .summarize import summarize
from .use_gloo import use_gloo
from .verify import verify
from .watch_heads import watch_heads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan

    from .base import PassFunction

P = Property
BUCKETS = ("Plan.bucket_bytes", "Plan.split_bytes")
OVERLAP = ("overlap_optimizer",)

PIPELINE = check_order(
    (
        Pass(keep_grad_dtype, Stage.JOINT, (), P.GRADS_KEPT),
        Pass(number_batches, Stage.JOINT, (P.GRADS_KEPT,), P.NUMBERED),
        Pass(dedup_unshard, Stage.JOINT, (P.GRADS_KEPT,), P.DEDUPED),
        Pass(join_grads, Stage.JOINT, (P.DEDUPED,), P.JOINED),
        Pass(
            choose_collectives,
            Stage.JOINT,
            (P.DEDUPED,),
            P.CHOSEN,
            consumes=("Plan.own_message", "Plan.reductions"),
        ),
        Pass(
            reshard,
            Stage.JOINT,
            (P.DEDUPED,),
            P.DECIDED,
            consumes=("reshard_after_forward", "set_unshard_in_backward"),
        ),
        Pass(mark_recomputed, Stage.JOINT, (), P.MARKED),
        Pass(mark_offloaded, Stage.JOINT, (), P.MARKED_AWAY),
        Pass(mark_states, Stage.JOINT, (), P.STATES_MARKED),
        Pass(note_heads, Stage.JOINT, (P.DEDUPED,), P.HEADS_NOTED),
        Pass(read_at_once, Stage.JOINT, (), P.READ_AT_ONCE),
        Pass(name_groups, Stage.JOINT, (), P.GROUPS_NAMED),
        # torch's partitioner splits the joint graph here
        Pass(lower, Stage.HALF, (P.DECIDED,), P.LOWERED, consumes=OPTIONS),
        Pass(bucket_all_gather, Stage.HALF, (P.LOWERED,), P.GATHERS_BUCKETED, consumes=BUCKETS),
        Pass(bucket_reduce_scatter, Stage.HALF, (P.LOWERED,), P.REDUCES_BUCKETED, consumes=BUCKETS),
        Pass(
            separate_exchanges,
            Stage.HALF,
            (P.LOWERED,),
            P.EXCHANGES_APART,
            consumes=("Plan.exchange_group",),
        ),
        Pass(
            overlap_exchanges,
            Stage.HALF,
            (P.LOWERED,),
            P.EXCHANGES_OVERLAPPED,
            consumes=("Plan.overlap_exchanges",),
        ),
        Pass(
            flatten_peak,
            Stage.HALF,
            (P.GATHERS_BUCKETED, P.REDUCES_BUCKETED),
            P.PEAK_FLATTENED,
        ),
        Pass(
            prefetch_all_gather,
            Stage.HALF,
            (P.LOWERED,),
            P.PREFETCHED,
            consumes=(
                "Plan.prefetch",
                "Plan.backward_prefetch",
                "Plan.costs",
                "set_modules_to_forward_prefetch",
                "set_modules_to_backward_prefetch",
            ),
        ),
        Pass(
            give_way,
            Stage.HALF,
            (P.EXCHANGES_OVERLAPPED, P.PREFETCHED),
            P.GIVEN_WAY,
            consumes=("Plan.overlap_exchanges",),
        ),
        Pass(
            delay_wait,
            Stage.HALF,
            (P.LOWERED,),
            P.DELAYED,
            consumes=(
                "Plan.reduces_in_flight",
                "Plan.costs",
                "Plan.reduction_bytes",
                "set_reduce_scatter_max_input_buffers",
            ),
        ),
        Pass(leave_in_flight, Stage.HALF, (P.LOWERED, P.DELAYED), P.LEFT, consumes=OVERLAP),
        Pass(
            step_in_backward,
            Stage.HALF,
            (P.LOWERED, P.DELAYED, P.LEFT),
            P.STEPPED,
            consumes=OVERLAP,
        ),
        Pass(place_updates, Stage.HALF, (P.PREFETCHED, P.DELAYED), P.UPDATED),
        Pass(read_strided, Stage.HALF, (P.LOWERED,), P.STRIDED, consumes=("Plan.copy_out",)),
        Pass(
            add_checksums,
            Stage.HALF,
            (P.PREFETCHED, P.DELAYED),
            P.SUMMED_UP,
            is_tried=False,
            consumes=("check",),
        ),
        Pass(await_verdict, Stage.HALF, (P.UPDATED, P.SUMMED_UP), P.JUDGED, is_tried=False),
        Pass(exchange_matrices, Stage.HALF, (P.UPDATED, P.JUDGED), P.EXCHANGED),
        Pass(
            note_routing,
            Stage.HALF,
            (P.EXCHANGES_OVERLAPPED,),
            P.ROUTING_NOTED,
            is_for_all=True,
            is_tried=False,
            consumes=("Plan.record_routing",),
        ),
        Pass(free, Stage.HALF, (P.PREFETCHED, P.DELAYED), P.FREED),
        Pass(gather_ahead, Stage.HALF, (P.FREED,), P.AHEAD, consumes=OVERLAP),
        Pass(gather_next, Stage.HALF, (P.UPDATED, P.EXCHANGED, P.AHEAD), P.NEXT, is_tried=False),
        Pass(
            copy_aside,
            Stage.HALF,
            (P.AHEAD,),
            P.ASIDE,
            is_tried=False,
            consumes=("offload_policy",),
        ),
        Pass(hide_copies, Stage.HALF, (P.PREFETCHED, P.DELAYED), P.HIDDEN),
        Pass(fetch_states, Stage.HALF, (P.UPDATED, P.HIDDEN), P.STATES_FETCHED),
        Pass(summarize, Stage.HALF, (P.AHEAD,), P.SUMMARIZED, is_tried=False),
        Pass(
            watch_heads,
            Stage.HALF,
            (P.HEADS_NOTED,),
            P.HEADS_WATCHED,
            is_for_all=True,  # forward may have nothing of ours, where parameters stay full
            is_tried=False,
        ),
        Pass(agree, Stage.HALF, (P.SUMMARIZED,), P.COMPARED, is_tried=False),
        Pass(
            drop_frees,
            Stage.HALF,
            (P.SUMMARIZED,),
            P.FREES_DROPPED,
            only=Executor.INDUCTOR,
            is_tried=False,
        ),
        Pass(
            copy_columns,
            Stage.HALF,
            (P.STRIDED,),
            P.COPIES_CALLED,
            only=Executor.INDUCTOR,
            is_tried=False,
        ),
        Pass(
            call_copies,
            Stage.HALF,
            (P.GATHERS_BUCKETED, P.REDUCES_BUCKETED),
            P.BUCKETS_CALLED,
            only=Executor.INDUCTOR,
            is_tried=False,
        ),
        Pass(use_gloo, Stage.HALF, (P.AHEAD,), P.OVER_GLOO, is_for_all=True, is_tried=False),
        Pass(
            name_collectives, Stage.HALF, (P.OVER_GLOO,), P.NAMED, is_for_all=True, is_tried=False
        ),
        Pass(
            join_kernels,
            Stage.HALF,
            (P.NAMED,),
            P.KERNELS_JOINED,
            only=Executor.INDUCTOR,
            is_tried=False,
        ),
        Pass(
            inline_pointwise,
            Stage.HALF,
            (P.KERNELS_JOINED,),
            P.INLINED,
            only=Executor.INDUCTOR,
            is_tried=False,
        ),
        Pass(
            outline,
            Stage.HALF,
            (P.INLINED,),
            P.OUTLINED,
            only=Executor.INDUCTOR,
            is_tried=False,
            consumes=("Plan.regions",),
        ),
        Pass(verify, Stage.HALF, (P.LOWERED, P.FREED, P.NAMED), P.VERIFIED, is_tried=False),
    )
)
JOINT = tuple(entry for entry in PIPELINE if entry.stage is Stage.JOINT)
HALF = tuple(entry for entry in PIPELINE if entry.stage is Stage.HALF)

# Not to be left out, and what would become of a graph otherwise.
ALWAYS = {
    note_heads.__name__: "parameters of unused outputs would get zeros for gradients",
    add_checksums.__name__: "nothing that the plan wants to be compared would be",
    await_verdict.__name__: "a whole step would update what checksums speak against",
    lower.__name__: "every parameter would be gathered by itself",
    agree.__name__: "ranks that differ would hang, and second groups would not be made",
    watch_heads.__name__: "parameters of unused outputs would get zeros for gradients",
    use_gloo.__name__: "torch's all-gather over gloo corrupts memory now and then",
    verify.__name__: "a fault of another pass would go unseen",
}

_current = PIPELINE


def current(stage: Stage) -> tuple[Pass, ...]:
    """The passes for graphs of a stage that are compiled from now on."""
    return tuple(entry for entry in _current if entry.stage is stage)


@contextmanager
def pipeline(
    *own: PassFunction, before: str = "", after: str = "", without: str | Sequence[str] = ()
) -> Iterator[tuple[Pass, ...]]:
    """Add passes of one's own to the pipeline, or leave some out, for graphs compiled inside.

    A pass is a function `(gm, plan)` that reads or rewrites `gm.graph`. It sees the graph that the
    pass before its place has left: the joint graph up to `name_groups`, a forward or backward from
    `lower` on. `verify` checks what it made of it. Inside another `pipeline`, this one changes that
    one's. Backward is compiled where it first runs; what is compiled already stays as it is.

    Args:
        own: the passes, in this order, by `before` or `after`.
        before, after: the name of the pass that they stand next to.
        without: names of passes to leave out.

    Raises:
        ValueError: there is no such pass, it cannot be left out, or none may stand there.
    """
    global _current
    outer = _current
    _current = changed(
        outer, own, before, after, (without,) if isinstance(without, str) else without
    )
    try:
        yield _current
    finally:
        _current = outer


def changed(
    passes: Sequence[Pass],
    own: Sequence[PassFunction],
    before: str,
    after: str,
    without: Sequence[str],
) -> tuple[Pass, ...]:
    """The passes with others among them, and without some."""
    names = [entry.name for entry in passes]
    for name in (*without, *(name for name in (before, after) if name)):
        if name not in names:
            raise ValueError(f"pipeline: there is no pass {name!r}; there are {names}")
    for name in without:
        if name in ALWAYS:
            raise ValueError(
                f"pipeline: {name} cannot be left out: without it {ALWAYS[name]}. To see a graph "
                "at some place, add compiled_fsdp.print_graph there"
            )
    if bool(own) != bool(before or after) or (before and after):
        raise ValueError(
            f"pipeline: before={before!r} and after={after!r} with {len(own)} passes; passes of "
            "one's own need one of the two, to say where they stand"
        )
    if after == verify.__name__:
        raise ValueError("pipeline: after verify nothing would be checked; add passes before it")
    entries: list[Pass] = []
    for entry in passes:
        added = _entries_of(own, entry.stage) if entry.name in (before, after) else []
        kept = [] if entry.name in without else [entry]
        entries += [*added, *kept] if entry.name == before else [*kept, *added]
    return check_order(entries, absent=[entry for entry in PIPELINE if entry not in entries])


def _entries_of(functions: Sequence[PassFunction], stage: Stage) -> list[Pass]:
    ours = {entry.name for entry in PIPELINE}
    for function in functions:
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier() or name in ours:
            raise ValueError(
                f"pipeline: {function!r} is no pass: it should be a function (gm, plan) with a "
                "name of its own, by which dumps call it"
            )
    return [Pass(function, stage, (), None, is_tried=False) for function in functions]


def key() -> str | None:
    """Returns what the pipeline adds to the key of compile caches; None, so that every pass really
    runs, with passes of a user's, whose source nobody knows.
    """
    if any(entry not in PIPELINE for entry in _current):
        return None
    return " ".join(entry.name for entry in _current)


def print_graph(gm: GraphModule, plan: Plan) -> None:
    """Print a graph, as a pass that stands wherever it is added: `pipeline(print_graph,
    after="free")`. The first line says which: joint, forward, backward, or a whole step.
    """
    running = context_of(gm).running
    is_joint = running is not None and running.stage is Stage.JOINT
    which = Stage.JOINT.value if is_joint else phase_of(gm.graph)
    print(f"# {which}\n{show(gm.graph)}")  # noqa: T201  # what it is for
