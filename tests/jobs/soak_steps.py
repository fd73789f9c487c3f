"""Training by `compile_step` alone, a kind of step after another, beside the unsharded model.

    make soak ARGS="--kinds adamw clip accumulate muon scaler"

For each kind a model of its own, `steps` steps, and a verdict: the numbers of the unsharded model,
no recompile and no growth after the warm-up.
"""

from __future__ import annotations

import copy
import gc
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from kit.random_models import Program, Spec, batch, build, shard
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from compiled_fsdp import Muon, compile_step

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Program(
    0,
    (
        Spec(width=11),
        Spec(kind="scaled", shares=0, width=11),
        Spec(kind="normed", width=5, reshard=False),
    ),
)
SCALES = {"init_scale": 1024.0, "growth_interval": 20}
INFINITE = 37  # of so many steps of the scaler's, one has a loss that is infinite


@dataclass(frozen=True)
class Kind:
    """How `compile_step` is called. is_whole: matrices are given to a `Muon`."""

    clip: float | None = None
    accumulate: int = 1
    is_whole: bool = False
    is_scaled: bool = False


KINDS = {
    "adamw": Kind(),
    "clip": Kind(clip=0.05),
    "accumulate": Kind(accumulate=3),
    "muon": Kind(is_whole=True),
    "scaler": Kind(is_scaled=True),
}


def optimizers_of(model: nn.Module, kind: Kind, muon: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if kind.is_whole and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    adamw: torch.optim.Optimizer = torch.optim.AdamW(others, lr=1e-3)
    return [adamw, muon(matrices, lr=1e-3)] if kind.is_whole else [adamw]


def loss_of(model: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean() * factor
    return loss


class Training:
    """Ours and the unsharded model; learning rates of both follow a schedule."""

    def __init__(self, kind: Kind, steps: int) -> None:
        self.kind = kind
        self.reference = build(PROGRAM)
        self.model = shard(copy.deepcopy(self.reference), PROGRAM)
        ours = optimizers_of(self.model, kind, Muon)
        self.theirs = optimizers_of(self.reference, kind, torch.optim.Muon)
        self.schedules = [CosineAnnealingLR(each, steps) for each in self.theirs]
        scalers = [
            torch.amp.GradScaler("cpu", enabled=kind.is_scaled, **SCALES)  # type: ignore[arg-type]
            for _ in range(2)
        ]
        self.scaler = scalers[0]
        self.step: Callable[..., torch.Tensor] = compile_step(
            self.model,
            ours,
            loss_of,
            clip=kind.clip,
            accumulate=kind.accumulate,
            scaler=scalers[1] if kind.is_scaled else None,
            schedule=[CosineAnnealingLR(each, steps) for each in ours],
            backend="compiled_fsdp_eager",
        )

    def train(self, number: int) -> float:
        """One step of both; by how much their losses differ."""
        count = self.kind.accumulate
        is_infinite = self.kind.is_scaled and number % INFINITE == 0
        factor = torch.tensor(float("inf") if is_infinite else 1.0)
        batches = [(batch(count * number + micro), factor) for micro in range(count)]
        wanted = torch.stack([self._backward(*each) for each in batches]).sum()
        self._update()
        loss = self.step(*batches[0]) if count == 1 else self.step(batches)
        if torch.equal(loss, wanted):  # infinite ones too
            return 0.0
        gap = (loss - wanted).abs().item()
        return gap if math.isfinite(gap) else math.inf

    def _backward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.reference, x, factor) / self.kind.accumulate
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _update(self) -> None:
        for p in self.reference.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if self.kind.clip is not None:
            nn.utils.clip_grad_norm_(self.reference.parameters(), self.kind.clip)
        for optimizer in self.theirs:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        for schedule in self.schedules:
            schedule.step()

    def largest_gap(self) -> float:
        """Between parameters of the two."""
        pairs = zip(self.model.parameters(), self.reference.parameters(), strict=True)
        gaps = [(p.full_tensor() - q).abs().max().item() for p, q in pairs]
        return max(gaps)


def soak(
    name: str,
    steps: int,
    warm_up: int,
    every: int,
    counts: Callable[[], tuple[int, int, int]],
    problems_of: Callable[..., list[str]],
) -> bool:
    """Train by this kind; whether something is wrong. counts: graphs, live bytes, resident ones."""
    torch._dynamo.reset()
    training, start, gap = Training(KINDS[name], steps), time.perf_counter(), 0.0
    before = (0, 0, 0)
    for number in range(1, steps + 1):
        gap = max(gap, training.train(number))
        if number == warm_up:
            before = counts()
        if number % every == 0:
            gap = max(gap, training.largest_gap())
            graphs, live, resident = counts()
            say(
                f"{name}, step {number}: losses and parameters differ by at most {gap:.1e}, "
                f"{graphs} graphs, {live:,} live tensor bytes, resident {resident / 2**20:.0f} "
                f"MiB, {time.perf_counter() - start:.0f} s"
            )
    problems = problems_of(gap, *before)
    verdict = "no growth, no recompile, the numbers of the unsharded run"
    say(f"{name}: " + ("; ".join(problems) or verdict))
    del training
    gc.collect()
    return bool(problems)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
