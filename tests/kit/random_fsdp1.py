"""Seeded random models for `FullyShardedDataParallel`: the layers of `random_models`, a strategy, a
wrapping policy, a precision.

`legal` takes out what stock itself refuses or does wrongly: a weight shared by two instances, a
flat parameter of frozen and trained originals without `use_orig_params`, and a shared weight in
`no_sync` in 16 bits under NO_SHARD with `use_orig_params`.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kit.oracle_fsdp1 import hybrid_mesh
from kit.random_models import Layer, Model, Program, make
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    size_based_auto_wrap_policy,
    wrap,
)

if TYPE_CHECKING:
    from kit.oracle_fsdp1 import Api

BF16 = torch.bfloat16
ONE_GROUP = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
PRECISIONS: dict[str, MixedPrecision | None] = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16_reduced": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    "fp32_reduced_in_bf16": MixedPrecision(reduce_dtype=BF16),
    "fp16": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
}
BY_INDEX = ("none", "custom", "manual")  # the policies that can leave a layer to the root
PREFETCH = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


@dataclass(frozen=True)
class Wrapped(Program):
    """A model and how FSDP1 trains it; the first value of each field is the plainest.

    policy: which modules are instances: "none" (the root alone), "layers", "linears", "nested"
        (both), "size" (of 20 elements), "custom" (those with `Spec.unit`, with a strategy of their
        own by `Spec.reshard`), "manual" (those with `unit`, by `wrap`).
    no_sync: micro-batches but the last are not reduced.
    """

    strategy: str = "FULL_SHARD"
    policy: str = "none"
    use_orig_params: bool = True
    precision: str = "fp32"
    no_sync: bool = False
    prefetch: str = "pre"
    forward_prefetch: bool = False
    limit: bool = True
    max_norm: float | None = None
    evaluate: bool = False
    set_to_none: bool = True

    @property
    def is_low(self) -> bool:
        """Whether anything is rounded to 16 bits."""
        return self.precision != "fp32"

    @property
    def computes_low(self) -> bool:
        """Whether the parameters are, for computing."""
        policy = PRECISIONS[self.precision]
        return policy is not None and policy.param_dtype is not None

    @property
    def retains(self) -> bool:
        """Whether gradients wait for a later backward to be reduced."""
        return self.no_sync and self.micro_batches > 1


def wrapped(seed: int, world: int) -> Wrapped:
    """A random program; on four ranks half of them are hybrid."""
    r = random.Random(10_000 + seed)
    base = make(seed)
    micro = r.choice((1, 1, 2, 3))
    program = Wrapped(
        seed,
        base.specs,
        micro,
        strategy=r.choice(HYBRID if world == 4 and r.random() < 0.5 else ONE_GROUP),
        policy=r.choice(
            ("none", "layers", "linears", "nested", "size", "custom", "manual", "custom", "manual")
        ),
        use_orig_params=r.random() < 0.5,
        precision=r.choice(("fp32", "fp32", *PRECISIONS)),
        no_sync=r.random() < 0.6,
        prefetch=r.choice(tuple(PREFETCH)),
        forward_prefetch=r.random() < 0.3,
        limit=r.random() < 0.7,
        max_norm=r.choice((None, None, 0.5)),
        evaluate=r.random() < 0.3,
        set_to_none=r.random() < 0.7,
    )
    return legal(program)


def legal(program: Wrapped) -> Wrapped:
    """The program without what stock cannot train; see the module docstring."""
    specs = list(program.specs)
    sharing = {
        i
        for i, s in enumerate(specs)
        if s.shares is not None and s.shares < i and specs[s.shares].width == s.width
    }
    sharing |= {specs[i].shares for i in sharing}  # type: ignore[arg-type]
    policy = program.policy if not sharing or program.policy in BY_INDEX else "custom"
    for i, spec in enumerate(specs):
        unit = spec.unit and i not in sharing
        is_alone = policy == "layers" or (policy in BY_INDEX[1:] and unit)
        can_freeze = program.use_orig_params or is_alone
        specs[i] = replace(spec, unit=unit, is_frozen=spec.is_frozen and can_freeze)
    can_retain = not (
        sharing
        and program.computes_low
        and program.use_orig_params
        and program.strategy == "NO_SHARD"
    )
    return replace(
        program, specs=tuple(specs), policy=policy, no_sync=program.no_sync and can_retain
    )


def shard(api: Api, model: Model, program: Wrapped) -> Any:
    """The model as instances of `api`'s class."""
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[program.strategy],
        "mixed_precision": PRECISIONS[program.precision],
        "use_orig_params": program.use_orig_params,
        "backward_prefetch": PREFETCH[program.prefetch],
        "forward_prefetch": program.forward_prefetch,
        "limit_all_gathers": program.limit,
    }
    if program.strategy in HYBRID:
        options["device_mesh"] = hybrid_mesh()
    if program.policy == "manual":
        with enable_wrap(wrapper_cls=api.wrap, **options):
            for i, spec in enumerate(program.specs):
                model.layers[i] = wrap(model.layers[i]) if spec.unit else model.layers[i]
    return api.wrap(model, auto_wrap_policy=policy_of(program), **options)


def policy_of(program: Wrapped) -> Any:
    """As `auto_wrap_policy` takes it."""

    def overrides(module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, Layer) or not module.spec.unit:
            return False
        if module.spec.reshard is None or program.strategy == "NO_SHARD":
            return True
        kept, dropped = (
            (HYBRID[1], HYBRID[0]) if program.strategy in HYBRID else (ONE_GROUP[1], ONE_GROUP[0])
        )
        return {"sharding_strategy": ShardingStrategy[dropped if module.spec.reshard else kept]}

    policies: dict[str, Any] = {
        "layers": ModuleWrapPolicy({Layer}),
        "linears": ModuleWrapPolicy({nn.Linear}),
        "nested": ModuleWrapPolicy({Layer, nn.Linear}),
        "size": partial(size_based_auto_wrap_policy, min_num_params=20),
        "custom": CustomPolicy(overrides),
    }
    return policies.get(program.policy)


def unreduced(model: Any, program: Wrapped, micro: int) -> AbstractContextManager[Any]:
    """`no_sync` for the micro-batches that the program says."""
    return (
        model.no_sync() if program.no_sync and micro < program.micro_batches - 1 else nullcontext()
    )


def whole(api: Api, model: Any) -> dict[str, Tensor]:
    """Every original parameter, unsharded, by its name in the unsharded model."""
    with api.FSDP.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
            for name, p in model.named_parameters()
        }
