"""Second groups for the user's all-to-alls: made once, of the same ranks, and again where the first
one is another.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single

from compiled_fsdp.torch_private.groups import group_named, group_timeout, rename
from compiled_fsdp.wire import own_groups

if TYPE_CHECKING:
    from kit.pool import Pool

NAME = "first_exchanges"


def made() -> None:
    first, other = (dist.new_group(timeout=timedelta(seconds=70 + i)) for i in range(2))
    rename(first, "first")
    own_groups.make(["first"])
    with pytest.raises(RuntimeError):
        group_named(NAME)
    own_groups.make(["first", NAME])
    second = group_named(NAME)
    assert second is not first
    assert dist.get_process_group_ranks(second) == dist.get_process_group_ranks(first)
    assert group_timeout(second) == timedelta(seconds=70)
    assert own_groups.second_of(first) == [second]
    rank = dist.get_rank()
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    assert all_to_all_single(sent, None, None, second).tolist() == [rank, 10.0 + rank]
    own_groups.make([NAME])
    assert group_named(NAME) is second
    rename(other, "first")  # as after the process group was destroyed and made again
    own_groups.make([NAME])
    assert group_named(NAME) is not second
    assert group_timeout(group_named(NAME)) == timedelta(seconds=71)
    assert own_groups.second_of(first) == []


def test_made_once_for_each_group(two: Pool) -> None:
    two.run(made)
