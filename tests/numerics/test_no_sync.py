"""FSDP1's `no_sync`: gradients that are not reduced yet are `.grad`, and who drops those has
dropped them, whatever ran since.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import Net, Side, beside
from kit.compare import check_equal
from torch.distributed.fsdp import MixedPrecision

from compiled_fsdp import warmup

if TYPE_CHECKING:
    from kit.pool import Pool

WHEN = ("at once", "behind an evaluation", "before a backward")


def dropped(side: Side, when: str, use_orig_params: bool) -> None:
    """A micro-batch whose gradients are dropped, then one of which the step is."""
    model: Any = side.wrap(Net(), "a", "b", use_orig_params=use_orig_params)
    call = side.compile(model)
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        with model.no_sync() if side.is_ours else contextlib.nullcontext():
            call(side.batch(10 + step)).square().mean().backward()
        if when == "behind an evaluation":
            with torch.no_grad():
                side.note("evaluated", call(side.batch(20 + step)))
        if when != "before a backward":
            optimizer.zero_grad()
        loss = call(side.batch(step)).square().mean()
        if when == "before a backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("when", WHEN)
def test_dropped(two: Pool, when: str, use_orig_params: bool) -> None:
    two.run(beside, dropped, when, use_orig_params)


def around(side: Side, use_orig_params: bool) -> None:
    """A larger function is compiled, whose trace looks at parameters and their gradients; and what
    is not reduced yet does not hinder a checkpoint, with forwards in between or not.
    """
    model: Any = side.wrap(Net(), "a", "b", use_orig_params=use_orig_params)
    call = side.compile(lambda x: model(x).square().mean())
    optimizer = side.sgd(model.parameters())
    for step in range(2):
        with model.no_sync() if side.is_ours else contextlib.nullcontext():
            call(side.batch(10 + step)).backward()
        for name, value in sorted(model.state_dict().items()):
            side.note(name, value)
        with torch.no_grad():
            side.note("evaluated", model(side.batch(20 + step)))
        side.note_params(model)
        call(side.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_around(two: Pool, use_orig_params: bool) -> None:
    two.run(beside, around, use_orig_params)


def low(use_orig_params: bool) -> None:
    """Gradients stay in bfloat16: hidden and shown, and put aside, as they are."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    side = Side("eager")
    model = side.wrap(Net(), "a", "b", use_orig_params=use_orig_params, mixed_precision=policy)
    grads = []
    for warms in (False, True):
        for part in range(3):
            with model.no_sync() if part == 1 else contextlib.nullcontext():
                model(side.batch(part)).float().square().mean().backward()
            if warms:
                warmup(model, side.batch(9))
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    check_equal(grads[1], grads[0], "with a warmup", 0, 0)
    assert {grad.dtype for grad in grads[0] if grad is not None} == {torch.bfloat16}


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_low_precision(two: Pool, use_orig_params: bool) -> None:
    two.run(low, use_orig_params)


def kept(side: Side) -> None:
    """The same, kept: an evaluation takes nothing away."""
    model: Any = side.wrap(Net(), "a", "b")
    call = side.compile(model)
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        for part in range(2):
            with model.no_sync() if side.is_ours and part == 0 else contextlib.nullcontext():
                call(side.batch(10 * part + step)).square().mean().backward()
            with torch.no_grad():
                side.note("evaluated", call(side.batch(20 + step)))
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


def test_kept(two: Pool) -> None:
    two.run(beside, kept)
