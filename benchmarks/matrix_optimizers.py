"""The optimizers that the benchmark `muon` compares, and seconds of their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from compiled_fsdp import Muon, overlap_optimizer
from compiled_fsdp.optim.newton_schulz import newton_schulz

LR = 2e-3
SECONDS: dict[str, list[float]] = {}  # of all optimizers of a step together, by variant


class GatheredMuon(torch.optim.Muon):
    """The usual way: each matrix is gathered when its turn comes, and orthogonalized on every rank,
    in fp32.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step, without a closure."""
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                whole = p.grad.lerp(buffer, group["momentum"]).full_tensor()
                update = newton_schulz(
                    whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                shard = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(shard, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"])


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """What Muon is for: the matrices of the blocks."""
    named = model.named_parameters()
    return {name: p for name, p in named if name.startswith("layers.") and p.ndim == 2}


def planned(params: Iterable[Any]) -> Muon:
    """Ours, in fp32 as the usual way here."""
    return Muon(params, lr=LR, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32)


def gathered(params: Iterable[Any]) -> GatheredMuon:
    """See the class."""
    return GatheredMuon(params, lr=LR, adjust_lr_fn="match_rms_adamw")


def by_dtensor(params: Iterable[Any]) -> torch.optim.Muon:
    """torch's, which iterates in bfloat16 by DTensor's collectives."""
    return torch.optim.Muon(params, lr=LR, adjust_lr_fn="match_rms_adamw")


def step_of(
    name: str,
    model: nn.Module,
    run: Callable[..., Tensor],
    batches: list[tuple[Tensor, Tensor]],
    make: Callable[[Iterable[Any]], torch.optim.Optimizer] | None,
    *,
    overlaps: bool = False,
) -> Callable[[int], Tensor]:
    """The training step of a variant: AdamW, and where `make` makes one, an optimizer of matrices
    behind it.
    """
    own = matrices(model) if make else {}
    others = [p for name, p in model.named_parameters() if name not in own]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=LR, fused=True)]
    if make is not None:
        optimizers.append(make(own.values()))
    if overlaps:
        overlap_optimizer(model, optimizers[-1])
    seconds = SECONDS.setdefault(name, [])

    def step(index: int) -> Tensor:
        loss = run(*batches[index % len(batches)])
        loss.backward()
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds.append(time.perf_counter() - begin)
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss.detach()

    return step
