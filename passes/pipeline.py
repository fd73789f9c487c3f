"""The pipeline: everything that happens to a graph, in the order in which it happens, for both
executors.

`compiler/driver.py` runs it. Three decisions stand outside, since each is about several graphs or
is made by trying this very list on copies; they change the plan, not the graph:

- before the joint graph: which parameters a memory budget lets backward keep (`compiler/budget.py`)
- between the joint graph and its halves: where torch's partitioner cuts (`compiler/partition.py`)
- before a half: whether ranks take its nodes to cost the same (`planning/consensus.py`), and into
  parts of which size large units are cut (`compiler/splitting.py`)
"""

from __future__ import annotations

from .agree import agree
from .base import Executor, Pass, Property, Stage, check_order
from .bucket_all_gather import bucket_all_gather
from .bucket_reduce_scatter import bucket_reduce_scatter
from .choose_collectives import choose_collectives
from .copy_columns import copy_columns
from .dedup_unshard import dedup_unshard
from .delay_wait import delay_wait
from .drop_frees import drop_frees
from .free import free
from .gather_ahead import gather_ahead
from .join_grads import join_grads
from .leave_in_flight import leave_in_flight
from .lower import lower
from .name_collectives import name_collectives
from .note_heads import note_heads
from .prefetch_all_gather import prefetch_all_gather
from .read_strided import read_strided
from .reshard import reshard
from .step_in_backward import step_in_backward
from .summarize import summarize
from .use_gloo import use_gloo
from .verify import verify
from .watch_heads import watch_heads

P = Property

PIPELINE = check_order(
    (
        Pass(dedup_unshard, Stage.JOINT, (), P.DEDUPED),
        Pass(join_grads, Stage.JOINT, (P.DEDUPED,), P.JOINED),
        Pass(choose_collectives, Stage.JOINT, (P.DEDUPED,), P.CHOSEN),
        Pass(reshard, Stage.JOINT, (P.DEDUPED,), P.DECIDED),
        Pass(note_heads, Stage.JOINT, (P.DEDUPED,), P.HEADS_NOTED),
        # torch's partitioner splits the joint graph here
        Pass(lower, Stage.HALF, (P.DECIDED,), P.LOWERED),
        Pass(bucket_all_gather, Stage.HALF, (P.LOWERED,), P.GATHERS_BUCKETED),
        Pass(bucket_reduce_scatter, Stage.HALF, (P.LOWERED,), P.REDUCES_BUCKETED),
        Pass(prefetch_all_gather, Stage.HALF, (P.LOWERED,), P.PREFETCHED),
        Pass(delay_wait, Stage.HALF, (P.LOWERED,), P.DELAYED),
        Pass(leave_in_flight, Stage.HALF, (P.LOWERED, P.DELAYED), P.LEFT),
        Pass(step_in_backward, Stage.HALF, (P.LOWERED, P.DELAYED, P.LEFT), P.STEPPED),
        Pass(read_strided, Stage.HALF, (P.LOWERED,), P.STRIDED),
        Pass(free, Stage.HALF, (P.PREFETCHED, P.DELAYED), P.FREED),
        Pass(gather_ahead, Stage.HALF, (P.FREED,), P.AHEAD),
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
        Pass(use_gloo, Stage.HALF, (P.AHEAD,), P.OVER_GLOO, is_for_all=True, is_tried=False),
        Pass(
            name_collectives, Stage.HALF, (P.OVER_GLOO,), P.NAMED, is_for_all=True, is_tried=False
        ),
        Pass(verify, Stage.HALF, (P.LOWERED, P.FREED, P.NAMED), P.VERIFIED, is_tried=False),
    )
)
JOINT = tuple(entry for entry in PIPELINE if entry.stage is Stage.JOINT)
HALF = tuple(entry for entry in PIPELINE if entry.stage is Stage.HALF)
