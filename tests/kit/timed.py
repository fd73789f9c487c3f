"""A timed world for tests: rank k of N."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compiled_fsdp.wire.world import Wire, World, timed_world

if TYPE_CHECKING:
    from collections.abc import Iterator

FAST = 1e12  # bytes per second


@contextmanager
def ranks(size: int, rank: int = 0, *, per_node: int = 1, **wire: float) -> Iterator[World]:
    """A world whose default group is there."""
    network = Wire(
        "network", wire.get("bandwidth", FAST), wire.get("latency", 0.0), wire.get("issue", 0.0)
    )
    world = World(size, rank, network, Wire("link", FAST), per_node)
    with timed_world(world):
        dist.init_process_group("timed", store=dist.HashStore(), rank=rank, world_size=size)
        try:
            yield world
        finally:
            torch._dynamo.reset()
            dist.destroy_process_group()
