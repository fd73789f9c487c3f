"""`compile_step`: a whole training step as one graph, with the numbers of the ordinary loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from kit.compare import check_equal
from kit.harness import BACKENDS, Options, batch_of
from kit.models import loss_of
from kit.overlap import OPTIMIZERS, Run, oracle_of, start

from compiled_fsdp import compile_step

if TYPE_CHECKING:
    pass


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def whole(
    options: Options, optimizer: Any = OPTIMIZERS["adamw"], kind: str = "compiled"
) -> tuple[Run, Any]:
    """A model, and its step."""
    run = start(False, "eager", options, optimizer)
    backend = BACKENDS[kind].replace("inductor", "compiled_fsdp")
    return run, compile_step(
        run.model, run.optimizer, loss_fn, clip=options.max_norm, backend=backend
    )


def looped(run: Run, options: Options) -> list[float]:
    losses = []
    for step in range(options.steps):
        losses.append(run.backward(step))
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), options.max_norm)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


def compare(
    options: Options,
    optimizer: Any = OPTIMIZERS["adamw"],
    kind: str = "compiled",
    oracle: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Losses, parameters, buffers and the optimizer's state, of the step and of the loop."""
    loop = start(False, oracle or oracle_of(kind, options), options, optimizer)
    run, step = whole(options, optimizer, kind)
    wanted = looped(loop, options)
    losses = [step(*batch_of(options.model, i)).item() for i in range(options.steps)]
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    assert all(p.grad is None for p in run.model.parameters())
    check_equal(losses, wanted, f"losses, {kind}, {options}", rtol, atol)
    check_equal(run.state(), loop.state(), f"state, {kind}, {options}", rtol, atol)
    buffers = [dict(r.model.named_buffers()) for r in (run, loop)]
    check_equal(*buffers, f"buffers, {kind}, {options}", rtol, atol)
