"""What the probe counts in a profile of the last steps that are not timed."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from compiled_fsdp.command.steps import LAST, flops_in


def _attends(q: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> None:
    k = (q @ w).detach().requires_grad_()
    F.scaled_dot_product_attention(q, k, k).sum().backward()
    F.linear(q, w, bias)
    torch.bmm(q[0], w.expand(2, 8, 8), out=torch.empty(2, 16, 8))


def test_operations_are_those_of_torch_s_counter() -> None:
    q, w, bias = torch.ones(2, 2, 16, 8), torch.ones(8, 8), torch.ones(8)
    with FlopCounterMode(display=False) as counter:
        _attends(q, w, bias)
    with torch.profiler.profile(record_shapes=True) as profile:
        _attends(q, w, bias)
        with torch.profiler.record_function(LAST):
            _attends(q, w, bias)
    assert flops_in(profile) == (counter.get_total_flops(), set())


def test_a_convolution_is_not_counted_and_said() -> None:
    with (
        torch.profiler.profile(record_shapes=True) as profile,
        torch.profiler.record_function(LAST),
    ):
        F.conv1d(torch.ones(1, 2, 8), torch.ones(4, 2, 3))
    total, uncounted = flops_in(profile)
    assert total == 0
    assert "aten::convolution" in uncounted
