"""Four ranks: HSDP, int `reshard_after_forward`, and both; shards that are uneven, or empty on some
ranks.
"""

from __future__ import annotations

import pytest
import torch
from kit.harness import Options, check_parity
from kit.pool import Pool
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

# A mean over four ranks in one axis has several orders of summation: gloo's ring, our local sum,
# and the oracle's own. They differ in the last bit, which AdamW's normalisation carries into the
# parameters; SGD keeps it small.
SUM_OF_FOUR = (1e-4, 1e-6)


@pytest.mark.parametrize(
    ("model", "reshard"),
    [("odd", None), ("tied", True), ("frozen", False)],
)
def test_one_axis(four: Pool, model: str, reshard: bool | None) -> None:
    options = Options(model, steps=3, reshard=reshard, optimizer="sgd")
    four.run(check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), *SUM_OF_FOUR)


@pytest.mark.parametrize("model", ["odd", "tied", "unused", "called_twice"])
def test_int_reshard(four: Pool, model: str) -> None:
    options = Options(model, steps=3, reshard=2, optimizer="sgd")
    four.run(check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), *SUM_OF_FOUR)


@pytest.mark.parametrize("model", ["tied", "unused"])
def test_hsdp(four: Pool, model: str) -> None:
    # Two sums of two: one order, so every bit is equal, also over ten AdamW steps.
    four.run(check_parity, Options(model, mesh="hsdp"))


def test_hsdp_and_reshard(four: Pool) -> None:
    four.run(check_parity, Options("odd", mesh="hsdp", reshard=False, steps=3))


def test_hsdp_and_int_reshard(four: Pool) -> None:
    # One replica of four shards, so that an int can lie strictly between.
    options = Options("odd", mesh="hsdp_1x4", reshard=2, steps=3, optimizer="sgd")
    four.run(check_parity, options, ("stock", "unsharded"), ("eager", "compiled"), *SUM_OF_FOUR)


def test_hsdp_in_bf16(four: Pool) -> None:
    policy = Policy(param_dtype=torch.bfloat16)
    four.run(check_parity, Options("odd", mesh="hsdp", policies=(policy,), steps=4), ("stock",))


def test_int_reshard_in_bf16(four: Pool) -> None:
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options("odd", reshard=2, policies=(policy,), steps=3, optimizer="sgd")
    # One step through bf16 parameters turns a last-bit difference of a gradient into one of 2^-8 of
    # an activation.
    four.run(check_parity, options, ("stock",), ("eager", "compiled"), 0.02, 1e-3)


def test_fp16_reduction_divides_before_and_after(four: Pool) -> None:
    # 4 ranks: divided by 2 before the sum and by 2 after it.
    options = Options("odd", mesh="hsdp", policies=(Policy(reduce_dtype=torch.float16),), steps=4)
    four.run(check_parity, options, ("stock",))


def test_accumulation_and_evaluation(four: Pool) -> None:
    four.run(
        check_parity,
        Options("odd", mesh="hsdp", steps=2, num_backwards=2, evaluate=True, set_to_none=False),
    )


def test_accumulation_with_int_reshard(four: Pool) -> None:
    options = Options("odd", reshard=2, steps=2, num_backwards=2, optimizer="sgd")
    four.run(check_parity, options, ("stock",), ("eager", "compiled"), *SUM_OF_FOUR)


def test_ops_run_unlowered(four: Pool) -> None:
    for options in (Options("odd", mesh="hsdp", steps=3), Options("odd", reshard=2, steps=3)):
        four.run(check_parity, options, ("unsharded",), ("aot_eager",), *SUM_OF_FOUR)
