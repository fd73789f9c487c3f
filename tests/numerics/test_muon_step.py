"""`compile_step` with several optimizers, and with `Muon`: the numbers of the loop, matrices that
travel to their owners as nodes of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from kit.compare import check_equal, whole
from kit.harness import SLOW, Options, batch_of, build, shard
from kit.models import loss_of
from torch import nn

from compiled_fsdp import Muon, compile_step, fully_shard

if TYPE_CHECKING:
    from kit.pool import Pool

STEPS = 3


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.ndim == 2]


def adamw_and_muon(model: nn.Module, kind: Any = Muon, **settings: Any) -> list[Any]:
    """AdamW for what is no matrix, first."""
    held = {id(p) for _, p in matrices(model)}
    others = [p for p in model.parameters() if id(p) not in held]
    return [torch.optim.AdamW(others, lr=0.02), kind(matrices(model), lr=0.05, **settings)]


def loss_fn(model: Any, *batch: Any) -> Any:
    return loss_of(model(*batch))


def state_of(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}, {key}"] = whole(value) if torch.is_tensor(value) else value
    return found


def made(options: Options, make: Any) -> tuple[nn.Module, list[Any]]:
    torch._dynamo.reset()
    model = shard(build(options.model), options, fully_shard)
    return model, make(model)


def compare(options: Options, make: Any = adamw_and_muon, **more: Any) -> None:
    """Losses, parameters and states, of the step and of the eager loop."""
    model, optimizers = made(options, make)
    wanted = []
    for i in range(STEPS):
        loss = loss_fn(model, *batch_of(options.model, i))
        loss.backward()
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wanted.append(loss.item())
    ours, others = made(options, make)
    backend = more.pop("backend", "compiled_fsdp_eager")
    step = compile_step(ours, others, loss_fn, clip=options.max_norm, backend=backend, **more)
    losses = [step(*batch_of(options.model, i)).item() for i in range(STEPS)]
    assert len(set(wanted)) > 1, "the loop does not learn, so the comparison shows nothing"
    check_equal(losses, wanted, f"losses, {options}")
    check_equal(state_of(ours, others), state_of(model, optimizers), f"state, {options}")


def compare_models() -> None:
    compare(Options("odd"))
    compare(Options("tied", max_norm=0.05))
    compare(Options("equal_units", reshard=True))


def test_models(two: Pool) -> None:
    two.run(compare_models, timeout=SLOW)
