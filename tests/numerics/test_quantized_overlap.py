"""Codes on the wire while the optimizer's step overlaps: `overlap_optimizer`, its step inside of
backward, and gathers of a whole step's next one; the numbers of a plain loop with the same codes,
bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.compare import check_equal
from kit.harness import BACKENDS, SLOW, Options, batch_of
from kit.models import loss_of
from kit.overlap import BF16, Run, compare, plain_training, start

from compiled_fsdp import compile_step, planned
from compiled_fsdp.frontend.state import states_below

if TYPE_CHECKING:
    from kit.pool import Pool

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BOTH: dict[str, Any] = {"gather_quantized": INT8, "reduce_quantized": INT8}
GPT = Options("gpt_of_one_layer")


def overlapped(run: Run) -> list[float]:
    """Plain training, in which codes are under way after each backward, and after each step."""
    losses = []
    is_ours = hasattr(run.optimizer, "_fsdp_overlap")
    for step in range(3):
        losses.append(run.backward(step))
        assert bool(run.in_flight()) == is_ours
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert bool(run.num_ahead()) == is_ours
        pieces = [
            piece
            for state in states_below(run.model)
            for flat in state.unit.flats
            for piece in flat.ahead.pieces
        ]
        assert all("int8" in piece.codes or not piece.codes for piece in pieces)
        if run.call is not run.model and is_ours:
            assert any("int8" in piece.codes for piece in pieces)
    return losses


def compare_all(kind: str) -> None:
    with planned(**BOTH):
        compare(overlapped, kind, GPT)
    with planned(reduce_quantized=FP8):
        compare(plain_training, kind, Options("equal_units", policies=(BF16,)))
    if kind == "compiled":
        with planned(**BOTH):
            compare(plain_training, kind, GPT, in_backward=True)


@pytest.mark.parametrize("kind", ["compiled", "eager"])
def test_overlap(two: Pool, kind: str) -> None:
    two.run(compare_all, kind, timeout=SLOW)


def replicated() -> None:
    """What is awaited late is the all-reduce over replicas, of what the codes stand for."""
    with planned(**BOTH):
        compare(plain_training, "compiled", Options("equal_units", mesh="hsdp"))


def test_hsdp(four: Pool) -> None:
    four.run(replicated)


def whole_steps() -> None:
    """The graph of a whole step gathers codes for the next one."""
    found = []
    with planned(**BOTH):
        for is_whole in (False, True):
            run = start(False, "eager", GPT)
            step = run.step
            if is_whole:
                taken = compile_step(
                    run.model,
                    run.optimizer,
                    lambda model, *batch: loss_of(model(*batch)),
                    backend=BACKENDS["compiled"],
                )
                step = lambda i, taken=taken: float(taken(*batch_of(GPT.model, i)))  # noqa: E731
            losses = [step(i) for i in range(3)]
            assert bool(run.num_ahead()) == is_whole
            found.append([losses, run.state()])
    check_equal(found[1], found[0], "whole step")


def test_whole_step(two: Pool) -> None:
    two.run(whole_steps)


def plan_changes_in_between() -> None:
    """Codes of the forward's graph count, whatever the plan says when a backward or a later forward
    runs.
    """
    losses = []
    for kind in ("eager", "compiled"):
        run = start(kind == "compiled", kind, GPT)
        with planned(**BOTH):
            losses.append([run.step(0)])
        losses[-1].append(run.step(1))
        with planned(**BOTH):
            losses[-1].append(run.step(2))
            loss = loss_of(run.call(*batch_of(GPT.model, 3)))
        loss.backward()
        run.optimizer.step()
        losses[-1].append(float(loss.detach()))
        losses[-1].append(run.step(4))
    check_equal(losses[1][:-1], losses[0][:-1], "the plan changes between steps")


def test_plan_changes(two: Pool) -> None:
    two.run(plan_changes_in_between)
