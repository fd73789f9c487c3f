"""What graphs have read of a buffer, and which backward is about it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_fsdp import errors
from compiled_fsdp.torch_private.autograd import next_run
from compiled_fsdp.units.unwritten import MOST_CALLS, ReadByGraphs, checksum


def called(reads: ReadByGraphs, data: torch.Tensor, trained: list[Any]) -> int:
    """A call in which a graph reads; returns a run that autograd recorded in it."""
    reads.begin(data, trained)
    run = next_run()
    data.mul(2)
    reads.end()
    return run


def test_only_the_last_calls_are_known() -> None:
    """Of a unit that is called again and again without a backward, a backward of the first calls is
    not known any more; for one of the last what is written is announced, and for no graph that has
    a backward in it: autograd runs none.
    """
    errors._said.clear()
    data = torch.ones(4, requires_grad=True)
    param: Any = SimpleNamespace(sharded=data)
    reads = ReadByGraphs()
    runs = [called(reads, data, [param]) for _ in range(MOST_CALLS + 1)]
    assert len(reads.calls) == MOST_CALLS
    assert not reads._is_known(runs[0])
    assert all(reads._is_known(run) for run in (runs[1], runs[-1]))
    product = data * 2
    reads.begin(data, [param])
    result = product.sum()
    reads.end()
    with torch.no_grad():
        data.add_(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reads.say_if_written("layers.0", data)
        assert not caught
        result.register_hook(lambda _: reads.say_if_written("layers.0", data))
        result.backward()
    (said,) = caught
    assert "parameters of layers.0 were written to between a graph" in str(said.message)


def test_a_buffer_without_memory_has_a_checksum() -> None:
    whole, none = torch.ones(5), torch.zeros(1).expand(5)
    assert checksum(whole) == checksum(whole.clone())
    assert checksum(whole) != checksum(2 * whole)
    assert checksum(none) == checksum(torch.zeros(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [3, 8, 600, 5003])
def test_what_changes_places_changes_the_checksum(num: int, dtype: torch.dtype) -> None:
    """A row, a word, a half of one, the bytes behind the last word; in and out of the table."""
    torch.manual_seed(0)
    data = torch.randn(num).to(dtype)
    before = checksum(data)
    places = [*torch.randint(num, (30, 2)).tolist(), (0, num - 1), (num // 2, 0)]
    moved = [data.flip(0), data.roll(1), data.sort().values]
    for i, j in places:
        moved.append(data.clone())
        moved[-1][i], moved[-1][j] = data[j], data[i]
    for other in moved:
        assert (checksum(other) == before) == torch.equal(other, data)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [8, 600, 5003])
def test_single_bits_change_the_checksum(num: int, dtype: torch.dtype) -> None:
    """Signs above all, which are the first bits of words."""
    torch.manual_seed(0)
    data = torch.randn(num).to(dtype)
    before = checksum(data)
    assert checksum(-data) != before
    assert checksum(2 * data) != before
    ones = torch.ones_like(data)
    ones[::2] = -1
    for i, j in torch.randint(num, (100, 2)).tolist():
        for factor in (-1, 2, 0.5):
            other = data.clone()
            other[i] *= factor
            assert checksum(other) != before
        moved = ones.clone()
        moved[i], moved[j] = ones[j], ones[i]
        assert (checksum(moved) == checksum(ones)) == torch.equal(moved, ones)


def test_a_fake_tensor_leaves_nothing_behind() -> None:
    with FakeTensorMode():
        checksum(torch.ones(5001))
    data = torch.arange(5001.0)
    assert checksum(data) == checksum(data.clone())
    with FakeTensorMode():
        checksum(torch.ones(5001))
