"""Training with `overlap_optimizer` and without it, for the tests that lay the two side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.harness import BACKENDS, Options, batch_of, build, local, shard
from kit.models import loss_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

from compiled_fsdp import fully_shard, overlap_optimizer
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.units.in_flight import InFlight

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
}


@dataclass
class Run:
    """A model under training, with or without the overlap."""

    model: nn.Module
    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    name: str

    def backward(self, step: int) -> float:
        loss = loss_of(self.call(*batch_of(self.name, step)))
        loss.backward()
        return float(loss.detach())

    def step(self, step: int) -> float:
        loss = self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[Any]:
        """Every parameter and every piece of the optimizer's state, this rank's shards."""
        found: list[Any] = [local(p) for p in self.model.parameters()]
        for p in self.model.parameters():
            found += [
                local(v) if isinstance(v, torch.Tensor) else v
                for v in self.optimizer.state.get(p, {}).values()
            ]
        return found

    def in_flight(self) -> list[str]:
        return [
            n
            for n, p in self.model.named_parameters()
            if p.grad is not None and is_in_flight(p.grad)
        ]

    def num_ahead(self) -> int:
        units = [state.unit for state in states_below(self.model)]
        eager = sum(bool(state.runtime.pending) for state in states_below(self.model))
        return eager + sum(len(flat.ahead) for unit in units for flat in unit.flats)


def is_in_flight(grad: Any) -> bool:
    return type(object.__getattribute__(grad, "_local_tensor")) is InFlight


def start(
    overlap: bool, kind: str, options: Options, optimizer: Any = OPTIMIZERS["adamw"], **more: Any
) -> Run:
    torch._dynamo.reset()  # models of one class share a limit of recompilations
    model = build(options.model)
    shard(model, options, fully_shard)
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    if overlap:
        overlap_optimizer(model, made, **more)
    call = (
        torch.compile(model, backend=BACKENDS[kind], fullgraph=True) if kind in BACKENDS else model
    )
    return Run(model, call, made, options.model)


def oracle_of(kind: str, options: Options) -> str:
    """What to run without the overlap: a compiled model is bit for bit the eager one, which need
    not be compiled.

    But for a unit called twice, whose gradients a graph adds up first; and Inductor's rounding is
    its own.
    """
    return "eager" if kind == "compiled" and options.model != "called_twice" else kind


def compare(
    script: Callable[[Run], Any],
    kind: str,
    options: Options,
    optimizer: Any = OPTIMIZERS["adamw"],
    oracle: str | None = None,
    **more: Any,
) -> None:
    """What a training script returns, and the state that it leaves, are the same with the overlap
    (and `more` arguments of it) as without.
    """
    runs = [
        start(False, oracle or oracle_of(kind, options), options, optimizer),
        start(True, kind, options, optimizer, **more),
    ]
    plain, ours = [script(run) for run in runs]
    check_equal(list(ours), list(plain), f"{kind}, {options}")
    check_equal(runs[1].state(), runs[0].state(), f"{kind}, {options}")


# -- scripts that both kinds of overlap run


def plain_training(run: Run) -> list[float]:
    """Four steps."""
    return [run.step(step) for step in range(4)]


def with_groups(params: list[Any]) -> torch.optim.Optimizer:
    """Weights and biases of one unit in different groups, with different settings."""
    groups = [
        {"params": params[::2], "weight_decay": 0.1},
        {"params": params[1::2], "lr": 0.05, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def evaluated(run: Run) -> list[float]:
    """Evaluations and checkpoints between steps."""
    losses = []
    for step in range(4):
        losses.append(run.step(step))
        run.model.eval()
        with torch.no_grad():
            losses.append(float(loss_of(run.call(*batch_of(run.name, 50 + step)))))
        run.model.train()
        saved = {name: value.to_local().clone() for name, value in run.model.state_dict().items()}
        losses.append(sum(float(v.sum()) for v in saved.values()))
    return losses


def changed_by_hand(run: Run) -> list[float]:
    """Parameters written to between a step and the forward: what was gathered ahead is out of
    date.
    """
    losses = []
    saved = {name: value.clone() for name, value in run.model.state_dict().items()}
    first = next(run.model.parameters())
    for step in range(7):
        losses.append(run.step(step))
        with torch.no_grad():
            if step == 0:
                first.mul_(2)
            elif step == 1:
                first.to_local().zero_()
        if step == 3:
            run.model.load_state_dict(saved)
        if step == 4:
            with torch.inference_mode():
                first.add_(1)
        if step == 5:
            load_in_place(run.model, saved)
    return losses


def load_in_place(model: Any, saved: dict[str, Any]) -> None:
    """As `torch.distributed.checkpoint.load` writes: to the local tensors of a state dict, which
    are not empty on any rank.
    """
    for name, value in model.state_dict().items():
        if len(value) >= dist.get_world_size():
            value.to_local().detach().copy_(saved[name].to_local())
