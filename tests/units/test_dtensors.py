"""A call with many DTensors is looked through for strided shards once."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from compiled_fsdp.torch_private.dtensors import look_for_strided_once

look_for_strided_once()
IS_THERE = hasattr(_sharding_prop, "_propagate_use_strided_shard_flag")


def looks(number: int, placement: Placement) -> int:
    """How often torch asks for all arguments, in a call with so many DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = [DTensor.from_local(torch.ones(2, number), mesh, [placement]) for _ in range(number)]
    asked = 0
    ask = OpSchema.args_spec.fget

    def count(schema: OpSchema) -> object:
        nonlocal asked
        asked += 1
        return ask(schema)

    with mock.patch.object(OpSchema, "args_spec", property(count)):
        torch._foreach_mul_(tensors, 2.0)
    assert all(torch.equal(t.to_local(), torch.full((2, number), 2.0)) for t in tensors)
    return asked


@pytest.mark.skipif(not IS_THERE, reason="this torch does not look")
@pytest.mark.usefixtures("fake_world")
class TestStridedShards:
    def test_plain(self):
        assert looks(9, Shard(0)) == looks(5, Shard(0))

    def test_strided(self):
        """The flag is handed on to each result, so all are looked at."""
        assert looks(9, _StridedShard(0, split_factor=2)) > looks(
            5, _StridedShard(0, split_factor=2)
        )

    def test_once(self):
        look = _sharding_prop._propagate_use_strided_shard_flag
        look_for_strided_once()
        assert _sharding_prop._propagate_use_strided_shard_flag is look
