"""The pipeline: every pass, in the order in which it runs."""

from __future__ import annotations

from .base import Pass, Property, Stage, check_order
from .bucket_all_gather import bucket_all_gather
from .bucket_reduce_scatter import bucket_reduce_scatter
from .choose_collectives import choose_collectives
from .dedup_unshard import dedup_unshard
from .delay_wait import delay_wait
from .free import free
from .gather_ahead import gather_ahead
from .join_grads import join_grads
from .leave_in_flight import leave_in_flight
from .lower import lower
from .prefetch_all_gather import prefetch_all_gather
from .read_strided import read_strided
from .reshard import reshard
from .step_in_backward import step_in_backward
from .verify import verify

PIPELINE = check_order(
    (
        Pass(dedup_unshard, Stage.JOINT, (), Property.DEDUPED),
        Pass(join_grads, Stage.JOINT, (Property.DEDUPED,), Property.JOINED),
        Pass(choose_collectives, Stage.JOINT, (Property.DEDUPED,), Property.CHOSEN),
        Pass(reshard, Stage.JOINT, (Property.DEDUPED,), Property.DECIDED),
        Pass(lower, Stage.HALF, (Property.DECIDED,), Property.LOWERED),
        Pass(bucket_all_gather, Stage.HALF, (Property.LOWERED,), Property.GATHERS_BUCKETED),
        Pass(bucket_reduce_scatter, Stage.HALF, (Property.LOWERED,), Property.REDUCES_BUCKETED),
        Pass(prefetch_all_gather, Stage.HALF, (Property.LOWERED,), Property.PREFETCHED),
        Pass(delay_wait, Stage.HALF, (Property.LOWERED,), Property.DELAYED),
        Pass(leave_in_flight, Stage.HALF, (Property.LOWERED, Property.DELAYED), Property.LEFT),
        Pass(
            step_in_backward,
            Stage.HALF,
            (Property.LOWERED, Property.DELAYED, Property.LEFT),
            Property.STEPPED,
        ),
        Pass(read_strided, Stage.HALF, (Property.LOWERED,), Property.STRIDED),
        Pass(free, Stage.HALF, (Property.PREFETCHED, Property.DELAYED), Property.FREED),
        Pass(verify, Stage.HALF, (Property.LOWERED, Property.FREED), Property.VERIFIED),
        Pass(gather_ahead, Stage.HALF, (Property.VERIFIED,), Property.AHEAD),
    )
)
JOINT = tuple(entry for entry in PIPELINE if entry.stage is Stage.JOINT)
HALF = tuple(entry for entry in PIPELINE if entry.stage is Stage.HALF)
