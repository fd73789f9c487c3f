"""Every field of `MixedPrecisionPolicy`, two ranks: bit for bit the same as stock FSDP2.

bf16 sums of two values have one order, so they are equal too: ours are summed by an all-to-all and
a local sum (accumulated in fp32, rounded once), stock's by gloo (rounded once, as there is one
addition).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from kit.harness import Options, check_parity, train
from kit.pool import Pool
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

POLICIES = {
    "bf16": (Policy(param_dtype=BF16),),
    "bf16, reduce in fp32": (Policy(param_dtype=BF16, reduce_dtype=FP32),),
    "reduce in bf16": (Policy(reduce_dtype=BF16),),
    "reduce in fp16": (Policy(reduce_dtype=FP16),),
    "reduce in fp64": (Policy(reduce_dtype=torch.float64),),
    "root's output in bf16": (Policy(), Policy(), Policy(), Policy(output_dtype=BF16)),
    "root's output in fp32": (
        *[Policy(param_dtype=BF16)] * 3,
        Policy(param_dtype=BF16, output_dtype=FP32),
    ),
    "own policy for each unit": (
        Policy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
        Policy(),
        Policy(param_dtype=BF16, output_dtype=FP32),
        Policy(reduce_dtype=BF16),
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy(two: Pool, name: str) -> None:
    two.run(check_parity, Options("odd", policies=POLICIES[name], steps=6), ("stock",))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *itertools.product(["tied", "moe", "frozen", "halves"], ["bf16, reduce in fp32", "bf16"]),
        ("llama_tied_unit", "bf16"),
    ],
)
def test_policy_on_models(two: Pool, model: str, name: str) -> None:
    two.run(check_parity, Options(model, policies=POLICIES[name], steps=4), ("stock",))


@pytest.mark.parametrize("reshard", [True, False])
def test_policy_and_reshard(two: Pool, reshard: bool) -> None:
    policies = POLICIES["bf16, reduce in fp32"]
    two.run(check_parity, Options("odd", policies=policies, steps=4, reshard=reshard), ("stock",))


def test_accumulation_in_the_original_dtype(two: Pool) -> None:
    options = Options("odd", policies=POLICIES["bf16"], steps=3, num_backwards=3, set_to_none=False)
    two.run(check_parity, options, ("stock",))


def test_inputs_not_cast(two: Pool) -> None:
    # The units' inputs are integers, or come from a bf16 embedding already; the rotary table stays
    # fp32 at the boundary.
    policy = Policy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False)
    two.run(check_parity, Options("llama", policies=(policy,), steps=4), ("stock",))


def test_bf16_is_close_to_fp32(two: Pool) -> None:
    two.run(close_to_unsharded)


def close_to_unsharded() -> None:
    policy = Policy(param_dtype=BF16, reduce_dtype=FP32)
    exact = train("unsharded", Options("llama", steps=6)).losses
    for kind in ("eager", "compiled"):
        losses = train(kind, Options("llama", steps=6, policies=(policy,))).losses
        # bf16 keeps 8 bits: 0.4 % per rounding; a dozen operations deep and six steps long, 3 % is
        # a wide margin
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact), rtol=0.03, atol=0.0)
        assert losses != exact
