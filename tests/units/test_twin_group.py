"""The second group of a mesh's ranks, for reductions on a wire of their own, and the fake one, of
which nothing comes.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp.torch_private.groups import default_group, group_named
from compiled_fsdp.units.mesh import twin_group
from compiled_fsdp.wire.ablation import fake_group


def test_of_a_process_group_that_was_made_again() -> None:
    """A notebook's: torch gives the new group the old one's name."""
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            group = default_group()
            twin = group_named(twin_group(group))
            assert twin in dist.distributed_c10d._world.pg_map
            assert twin is not group
            assert twin is group_named(twin_group(group))
            fake = group_named(fake_group(group.group_name))
            assert fake in dist.distributed_c10d._world.pg_map
            assert fake is not group
            assert fake is group_named(fake_group(group.group_name))
        finally:
            dist.destroy_process_group()
