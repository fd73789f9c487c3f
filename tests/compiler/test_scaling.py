"""Gradients times a factor, in graphs of whole steps: as `grad.mul_(factor)` has it."""

from __future__ import annotations

import pytest
import torch
from kit.passes_harness import Hand

from compiled_fsdp.compiler.scaling import scaled_by


@pytest.mark.parametrize("shape", [(64,), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_factor_is_not_rounded(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hand = Hand()
    grad, factor = hand.input("grad", *shape, dtype=dtype), hand.input("factor")
    gm = hand.returns(scaled_by(hand, grad, factor))  # type: ignore[arg-type]
    values = torch.linspace(0.1, 0.9, 64).to(dtype)[: shape[0] if shape else 1].reshape(shape)
    by = torch.tensor(0.123456789)
    (found,) = gm(values, by)
    assert torch.equal(found, values.clone().mul_(by))
    assert found.dtype == dtype
