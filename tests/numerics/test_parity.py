"""fp32, two ranks: bit for bit the same as stock FSDP2 and as the unsharded model, over five AdamW
steps.

With two ranks a mean has one order of summation and halving is exact, so nothing may differ.
Kernels are those of eager mode in every case compared here.
"""

from __future__ import annotations

import pytest
from kit.harness import Options, check_parity
from kit.pool import Pool

MODELS = (
    "gpt",
    "llama",
    "llama_tied_unit",
    "moe",
    "conv",
    "odd",
    "one_unit",
    "frozen",
    "unused",
    "read_twice",
    "list_units",
    "halves",
    "branches",
)


@pytest.mark.parametrize("model", MODELS)
def test_model(two: Pool, model: str) -> None:
    two.run(check_parity, Options(model))


@pytest.mark.parametrize(
    ("model", "reshard"),
    [("tied", True), ("odd", True), ("frozen", False), ("list_units", False)],
)
def test_reshard_after_forward(two: Pool, model: str, reshard: bool) -> None:
    two.run(check_parity, Options(model, steps=4, reshard=reshard))


def test_unit_called_twice(two: Pool) -> None:
    # Eager FSDP reduces after each call's backward and adds the results; a graph adds first and
    # reduces once, as the unsharded model does. (a + b) / 2 + (c + d) / 2 is not (a + c + b + d) /
    # 2 bit for bit.
    options = Options("called_twice")
    two.run(check_parity, options, ("stock",), ("eager",))
    two.run(check_parity, options, ("unsharded",), ("compiled",))
    two.run(check_parity, options, ("stock",), ("unsharded",), 1e-4, 1e-6)


@pytest.mark.parametrize("model", ["tied", "unused"])
def test_ops_run_unlowered(two: Pool, model: str) -> None:
    # aot_eager merges no unshards, so the two gradients of a tied weight are reduced one by one:
    # another order of sums.
    tolerance = (1e-4, 1e-5) if model == "tied" else (0.0, 0.0)
    two.run(check_parity, Options(model, steps=4), ("unsharded",), ("aot_eager",), *tolerance)
