"""The process groups of one FSDP1 instance, as what the core asks a mesh for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from compiled_fsdp.torch_private.groups import name_axes
from compiled_fsdp.units.mesh import MeshInfo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Groups(MeshInfo):
    """Process groups instead of a mesh: FSDP1 is given either.

    shard: the ranks that a flat parameter is cut over; None under NO_SHARD.
    replicate: the ranks that hold the same; None without HYBRID_SHARD or NO_SHARD.
    compute_device: where parameters live.
    """

    shard: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    compute_device: torch.device | None = None

    @property
    def is_sharding(self) -> bool:
        """See `MeshInfo`."""
        return self.shard is not None

    @property
    def is_replicating(self) -> bool:
        """See `MeshInfo`."""
        return self.replicate is not None

    @property
    def shard_axis(self) -> int:
        """See `MeshInfo`."""
        return int(self.is_sharding and self.is_replicating)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """See `MeshInfo`."""
        group = self.shard or self.replicate
        assert group is not None
        return group

    @property
    def axes(self) -> list[dist.ProcessGroup]:
        """See `MeshInfo`."""
        return [group for group in (self.replicate, self.shard) if group is not None]

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Only all-gather extensions ask for it, which flat parameters cannot have."""
        raise NotImplementedError(
            "FullyShardedDataParallel: a flat parameter has process groups, no mesh"
        )

    @property
    def shard_size(self) -> int:
        """See `MeshInfo`."""
        return self.shard.size() if self.shard else 1

    @property
    def shard_rank(self) -> int:
        """See `MeshInfo`."""
        return self.shard.rank() if self.shard else 0

    @property
    def replicate_size(self) -> int:
        """See `MeshInfo`."""
        return self.replicate.size() if self.replicate else 1

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """See `MeshInfo`."""
        return self.replicate

    @property
    def device(self) -> torch.device:
        """See `MeshInfo`."""
        return self.compute_device or torch.device("cpu")


def groups_of(wrapper: Any) -> Groups:
    """The groups that stock's constructor has worked out for an instance."""
    if wrapper._device_mesh is not None:
        name_axes(wrapper._device_mesh)
    shard, replicate = wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)
    # Also what one rank, or one rank in a shard group, becomes.
    if wrapper.sharding_strategy == ShardingStrategy.NO_SHARD:
        shard, replicate = None, replicate or shard
    return Groups(None, None, shard, replicate, wrapper.compute_device)  # type: ignore[arg-type]
