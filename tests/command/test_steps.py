"""What the probe counts in a profile of the last steps that are not timed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from compiled_fsdp.command.found import in_memory
from compiled_fsdp.command.steps import LAST, Steps, flops_in
from compiled_fsdp.wire.world import Wire, World


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


@pytest.mark.parametrize("where", ["meta", "cpu"])
@pytest.mark.parametrize("allocated", [3e6, 0])
def test_memory_of_a_device_is_that_of_its_allocator_in_the_timed_steps(
    where: str, allocated: float
) -> None:
    """Wherever parameters are, if it computes: with CPU offload they are on the host."""
    wire = Wire("network", 1e9, 1e-5)
    weight = torch.nn.Parameter(torch.empty(4, device=where))
    weight.grad = torch.empty(4, device=where)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    steps = Steps(World(2, 0, wire, wire), skip=1)
    steps.probe.peak = 7
    device = mock.Mock()
    device.is_available.return_value = True
    device.max_memory_allocated.return_value, device.max_memory_reserved.return_value = (
        allocated,
        4e6,
    )
    with mock.patch("torch.accelerator", device):
        for _ in range(3):
            steps(optimizer)
        found = steps.found()
    assert found.memory is not None
    if allocated:
        device.reset_peak_memory_stats.assert_called_once_with()
        assert found.memory.peak is None
        assert "3.00 MB at the peak, 4.00 MB reserved" in in_memory(found.memory)[1]
    else:
        assert (found.memory.peak, found.memory.device_peak) == (7, None)


@pytest.mark.parametrize(("every", "is_said"), [(1, False), (3, True)])
def test_optimizers_that_step_less_often_are_said(every: int, is_said: bool) -> None:
    """A GAN's generator: the median is of steps of its critic."""
    wire = Wire("network", 1e9, 1e-5)
    first, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    steps = Steps(World(2, 0, wire, wire), skip=1)
    for number in range(7):
        steps(first)
        if number % every == every - 1:
            steps(other)
    notes = steps.found().notes
    assert any("another made 2 in the same time" in note for note in notes) == is_said
    steps.probe.finish()


def test_a_grouped_matmul_is_counted_once() -> None:
    """The CPU's calls a matmul for each group."""
    x, w = torch.ones(32, 16).bfloat16(), torch.ones(2, 16, 8).bfloat16()
    with (
        torch.profiler.profile(record_shapes=True) as profile,
        torch.profiler.record_function(LAST),
    ):
        F.grouped_mm(x, w, offs=torch.tensor([16, 32], dtype=torch.int32))
    assert flops_in(profile) == (2 * 32 * 16 * 8, set())
