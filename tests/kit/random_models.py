"""Seeded random models: shared, frozen, unused and oddly shaped parameters, random units and
settings.

A model is a list of `Spec`s, plain data that prints, so that a failure can be shrunk by leaving
parts out and shown as text.
"""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_fsdp import MixedPrecisionPolicy, fully_shard, planned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Spec:
    """One layer. shares: the index of an earlier layer whose first weight it uses too; unit: it is
    a unit of its own.
    """

    kind: str = "linear"
    width: int = 4
    bias: bool = True
    shares: int | None = None
    is_frozen: bool = False
    is_unused: bool = False
    twice: bool = False
    unit: bool = True
    reshard: bool | None = None


@dataclass(frozen=True)
class Program:
    """A model and how it is trained."""

    seed: int
    specs: tuple[Spec, ...]
    micro_batches: int = 1
    low_precision: bool = False


BUCKETS = (0, 1 << 20, 400)  # bytes up to which units share collectives: none, all, some; by seed
P = TypeVar("P", bound=Program)


class Layer(nn.Module):
    """x [rows, 4] -> [rows, 4] through a hidden width of any size."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.first = nn.Linear(4, spec.width, bias=spec.bias)
        self.second = nn.Linear(spec.width, 4, bias=spec.bias)
        self.scale = (
            nn.Parameter(torch.ones(1, 3, 4)[:, 1].contiguous()) if spec.kind == "scaled" else None
        )
        self.norm = nn.LayerNorm(4) if spec.kind == "normed" else None
        for p in self.parameters():
            p.requires_grad_(not spec.is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) if self.norm is not None else x
        h = self.second(torch.tanh(self.first(h)))
        return x + (h * self.scale if self.scale is not None else h)


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spec) for spec in program.specs)
        for i, spec in enumerate(program.specs):
            if (
                spec.shares is not None
                and spec.shares < i
                and program.specs[spec.shares].width == spec.width
            ):
                self.layers[i].first.weight = self.layers[spec.shares].first.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not layer.spec.is_unused:
                x = layer(layer(x)) if layer.spec.twice else layer(x)
        return self.out(x)


def make(seed: int) -> Program:
    """A random program."""
    r = random.Random(seed)
    specs: list[Spec] = []
    for i in range(r.randint(1, 5)):
        shares = r.randrange(i) if i and r.random() < 0.25 else None
        specs.append(
            Spec(
                kind=r.choice(("linear", "scaled", "normed")),
                width=specs[shares].width if shares is not None else r.choice((1, 2, 3, 5, 8, 11)),
                bias=r.random() < 0.7,
                shares=shares,
                is_frozen=r.random() < 0.2,
                is_unused=r.random() < 0.15,
                twice=r.random() < 0.2,
                unit=r.random() < 0.75,
                reshard=r.choice((None, True, False)),
            )
        )
    return Program(seed, tuple(specs), r.choice((1, 1, 2, 3)), r.random() < 0.25)


def build(program: Program) -> Model:
    torch.manual_seed(program.seed)
    return Model(program)


def shard(model: Model, program: Program) -> Model:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if program.low_precision else None, reduce_dtype=torch.float32
    )
    for layer, spec in zip(model.layers, program.specs, strict=True):
        if spec.unit:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=spec.reshard)
    fully_shard(model, mp_policy=policy)
    return model


def smaller(program: P) -> Iterator[P]:
    """Programs with one thing less."""
    for i in range(len(program.specs)):
        yield replace(program, specs=program.specs[:i] + program.specs[i + 1 :])
    for i, spec in enumerate(program.specs):
        for change in (
            {"kind": "linear"},
            {"bias": True},
            {"shares": None},
            {"is_frozen": False},
            {"is_unused": False},
            {"twice": False},
            {"unit": False},
            {"reshard": None},
        ):
            if any(getattr(spec, key) != value for key, value in change.items()):
                changed: Any = replace(spec, **change)
                yield replace(program, specs=(*program.specs[:i], changed, *program.specs[i + 1 :]))
    for field in fields(program):
        if field.default is not MISSING and getattr(program, field.name) != field.default:
            plainer: Any = {field.name: field.default}
            yield replace(program, **plainer)


def shrink(program: P, fails: Callable[[P], str | None], tries: int = 40) -> tuple[P, str]:
    """The smallest program found that still fails, and how."""
    reason = fails(program) or "does not fail any more"
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(program):
            tries -= 1
            if tries < 0:
                return program, reason
            found = fails(candidate) if candidate.specs else None
            if found:
                program, reason, is_smaller = candidate, found, True
                break
    return program, reason


def batch(number: int) -> Tensor:
    """Different on every rank."""
    return torch.randn(
        6, 4, generator=torch.Generator().manual_seed(100 * number + dist.get_rank())
    )


def problem_of(compare: Callable[[P], None], program: P) -> str | None:
    """What `compare` raises for a program on any rank; None if it returns on all."""
    torch._dynamo.reset()
    problem = None
    try:
        with planned(bucket_bytes=BUCKETS[program.seed % len(BUCKETS)]):
            compare(program)
    except Exception as error:  # noqa: BLE001
        problem = f"{type(error).__name__}: {str(error)[:500]}"
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return next(filter(None, everyone), None)
