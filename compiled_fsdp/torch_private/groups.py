"""Private torch: process groups and their stores. Tried on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _register_work
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from datetime import timedelta

    from torch import Tensor


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a graph names."""
    group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return group


def default_group() -> dist.ProcessGroup:
    """That of all ranks."""
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
    return group


def new_group(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """A process group that its own ranks make together; torch's annotation since 2.15 knows also
    who is not among them.
    """
    made: Any = dist.new_group(ranks, use_local_synchronization=True, backend=backend)
    group: dist.ProcessGroup = made
    return group


def group_store(group: dist.ProcessGroup, prefix: str) -> Any:
    """The group's key-value store below a prefix: get, set, check and clone."""
    return PrefixStore(prefix, group.get_group_store())


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long the group's collectives may take; `init_process_group` and `new_group` set it."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


PythonWork: Any = dist._Work  # type: ignore[attr-defined]  # to be awaited by code in Python


def register_work(tensor: Tensor, work: Any) -> None:
    """Make `_c10d_functional.wait_tensor(tensor)` wait for `work`."""
    _register_work(tensor, work)


def reduce_op(name: str) -> Any:
    """The `ReduceOp` that functional collectives call by this name."""
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[name]
