"""Models in mixed precision, two ranks: bit for bit the same as stock FSDP2; the fields of a policy
one by one are rows of the table.

bf16 sums of two values have one order, so they are equal too: ours are summed by an all-to-all and
a local sum (accumulated in fp32, rounded once), stock's by gloo (rounded once, as there is one
addition).
"""

from __future__ import annotations

import pytest
import torch
from kit.harness import Options, check_parity
from kit.pool import Pool
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

BF16, FP32 = torch.bfloat16, torch.float32
LOW, MIXED = Policy(param_dtype=BF16), Policy(param_dtype=BF16, reduce_dtype=FP32)
# One for each unit.
OWN = (
    Policy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    Policy(),
    Policy(param_dtype=BF16, output_dtype=FP32),
    Policy(reduce_dtype=BF16),
)


@pytest.mark.parametrize(
    ("model", "policies"),
    [
        ("deep", OWN),
        ("tied", (LOW,)),
        ("moe", (MIXED,)),
        ("frozen", (MIXED,)),
        ("halves", (MIXED,)),
    ],
)
def test_policy_on_models(two: Pool, model: str, policies: tuple[Policy, ...]) -> None:
    two.run(check_parity, Options(model, policies=policies, steps=4), ("stock",))


def test_policy_and_reshard(two: Pool) -> None:
    two.run(check_parity, Options("odd", policies=(MIXED,), steps=4, reshard=False), ("stock",))


def test_accumulation_in_the_original_dtype(two: Pool) -> None:
    options = Options("odd", policies=(LOW,), steps=3, num_backwards=3, set_to_none=False)
    two.run(check_parity, options, ("stock",))
