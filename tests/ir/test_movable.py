"""Which nodes write to what others may read."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.fx import Graph

from compiled_fsdp.ir.movable import writes
from compiled_fsdp.ir.schema import MARK_GRADS


@pytest.mark.parametrize(
    ("op", "is_write"),
    [
        (torch.ops.aten.copy_.default, True),
        (triton_kernel_wrapper_mutation, True),
        (triton_kernel_wrapper_functional, False),
        (torch.ops.aten.mm.default, False),
        (MARK_GRADS, False),
    ],
)
def test_writes(op, is_write):
    assert writes(Graph().call_function(op)) == is_write
