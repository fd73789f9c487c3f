"""A step that an exception ends, which the script catches on all ranks, and goes on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from kit.beside import Net, Side, beside

if TYPE_CHECKING:
    from kit.pool import Pool


def dropped(side: Side) -> None:
    """The backward of a last micro-batch raises. With what the warning says, the step is as if it
    had not begun.
    """
    model = side.shard(Net(), "a", "b")
    fails = False

    def hook(grad: torch.Tensor) -> None:
        if fails:
            raise ValueError("a bad gradient")

    def watch(module: object, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    model.b.register_forward_hook(watch)
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        try:
            for part in range(2):
                if side.is_ours:
                    model.set_requires_gradient_sync(part == 1)
                fails = (step, part) == (1, 1)
                model(side.batch(2 * step + part)).square().mean().backward()
        except ValueError:
            optimizer.zero_grad()
            texts = evaluated(side, model)
            if side.is_ours:
                assert any("an exception left a backward while" in text for text in texts)
                model.reset_iter_state()
            continue
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


def evaluated(side: Side, model: Any) -> list[str]:
    """What is said in a forward, which finds that the backward before has not ended."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        side.note("evaluated", model(side.batch(9)))
    return [str(warning.message) for warning in caught]


def test_a_backward_that_raises(two: Pool) -> None:
    two.run(eager)


def eager() -> None:
    beside(dropped, kinds=("eager",))
