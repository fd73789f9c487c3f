"""Units in parts, other messages, other reductions: the same numbers as stock, and the collectives
that were asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.graphs import captured
from kit.harness import ROUNDING, Options, batch_of, check_parity, make
from kit.models import loss_of
from kit.pool import Pool
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

from compiled_fsdp import planned
from compiled_fsdp.ir.collectives import ALL_TO_ALL, REDUCE_SCATTER
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.regions import find_regions

FROM_COSTS: dict[str, Any] = dict.fromkeys(
    (
        "prefetch",
        "backward_prefetch",
        "reduces_in_flight",
        "bucket_bytes",
        "split_bytes",
        "own_message",
        "reductions",
        "copy_out",
    )
)
PLANS: dict[str, dict[str, Any]] = {
    "parts": {"split_bytes": 20_000},
    "a parameter each": {"split_bytes": 1},
    "one message": {"own_message": 1 << 40},
    "messages": {"own_message": 0, "split_bytes": 20_000},
    "reduce-scatter": {"reductions": "reduce_scatter", "split_bytes": 20_000},
    "from costs": FROM_COSTS,
}


def planned_parity(
    options: Options, plan: dict[str, Any], kind: str, rtol: float, atol: float
) -> None:
    with planned(**plan):
        check_parity(options, kinds=(kind,), against=("stock",), rtol=rtol, atol=atol)


MIXED = Options("llama", steps=2, policies=(Policy(torch.bfloat16, torch.float32), Policy()))


@pytest.mark.parametrize("plan", PLANS)
def test_same_as_stock(two: Pool, plan: str) -> None:
    two.run(planned_parity, Options("gpt_of_one_layer", steps=2), PLANS[plan], "compiled", 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "plan"),
    [(Options("unused", steps=2), "parts"), (MIXED, "messages")],
    ids=["unused", "mixed"],
)
def test_other_models(two: Pool, options: Options, plan: str) -> None:
    two.run(planned_parity, options, PLANS[plan], "compiled", 0.0, 0.0)


def test_four_ranks(four: Pool) -> None:
    options = Options(
        "tied", steps=2, optimizer="sgd", mesh="hsdp"
    )  # gradients are summed in another order than stock's
    four.run(planned_parity, options, PLANS["a parameter each"], "compiled", *ROUNDING)


def collectives_of(plan: dict[str, Any]) -> tuple[int, int, int, int]:
    """Gathers and reductions of forward and backward; of these, reduce-scatters and all-to-alls."""
    with planned(bucket_bytes=0, **plan), captured() as halves:
        _, call, _ = make("compiled", Options("odd"))
        loss_of(call(*batch_of("odd", 0))).backward()
    gathers, reductions = (
        sum(bool(r.starts) for h in halves for r in find_regions(h, kind))
        for kind in ("gather", "reduce")
    )
    return (
        gathers,
        reductions,
        *(sum(len(find(h, target)) for h in halves) for target in (REDUCE_SCATTER, ALL_TO_ALL)),
    )


def test_what_was_asked_for_is_in_the_graph(two: Pool) -> None:
    whole, parts, scattered = (
        two.run(collectives_of, plan)[0]
        for plan in ({}, PLANS["a parameter each"], PLANS["reduce-scatter"] | {"split_bytes": 1})
    )
    assert whole[2:] == (0, whole[1]), "on gloo, all-to-alls"
    assert parts[0] > whole[0]
    assert parts[1] > whole[1]
    assert scattered == (parts[0], parts[1], parts[1], 0)
