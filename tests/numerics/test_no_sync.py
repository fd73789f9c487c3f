"""FSDP1's `no_sync`: gradients that are not reduced yet are `.grad`, and who drops those has
dropped them, whatever ran since.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import Net, Side, beside

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
