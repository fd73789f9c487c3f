"""The first executor of `collectives.py`: ops on real tensors, at once; all-gathers over gloo are
ours (`gloo.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir import schema
from compiled_fsdp.ir.collectives import ALL_GATHER
from compiled_fsdp.torch_private.groups import group_named

from . import gloo, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def call(op: Callable[..., Any], *args: Any, **kwargs: object) -> Any:
    """Run an op on real tensors."""
    if op is ALL_GATHER and gloo.is_gloo(args[2], args[0].device):
        return schema.ALL_GATHER(args[0], [args[0].numel()], *args[1:])
    return op(*args, **kwargs)


def start_gather(
    shard: Tensor, sizes: Sequence[int], group_size: int, group: str, what: str, phase: str = ""
) -> tuple[Tensor, Any]:
    """Start to gather the pieces of a real tensor (see `ops.py`), awaited by the `Work` that comes
    second.
    """
    if gloo.is_gloo(group, shard.device):
        return gloo.start(shard, sizes, group_size, group, what, phase)
    out = shard.new_empty(gloo.gathered_shape(shard, group_size))
    outputs = list(out.view(-1).split([group_size * n for n in sizes]))
    pieces = list(shard.contiguous().view(-1).split(list(sizes)))
    return out, group_named(group).allgather_into_tensor_coalesced(outputs, pieces)


def start_exchange(
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: str,
    what: str,
) -> Any:
    """Start to send the parts of a real 1-D tensor, one to each rank, and to receive theirs;
    awaited by the `Work` that is returned.
    """
    with ranges.around("all_to_all", "step", what):
        if gloo.is_gloo(group, sent.device):
            parts = received.split(list(received_sizes)), sent.split(list(sent_sizes))
            return gloo.exchange(*parts, group, what)
        return group_named(group).alltoall_base(
            received, sent, list(received_sizes), list(sent_sizes)
        )
