"""Chapters 5 and 6: activation checkpointing around instances, and inside them."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from kit.compare import plain
from kit.oracle_fsdp1 import (
    STRATEGIES,
    Api,
    Block,
    eager_same,
    grads,
    rows,
    same,
    train_step,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from kit.pool import Pool


class Checkpointed(nn.Module):
    """A wrapped block, recomputed in backward."""

    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.reentrant = nn.Linear(3, 5), block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@rows("6.27")
def test_checkpointing(two: Pool) -> None:
    two.run(checkpointing_rows)


def checkpointing_rows() -> None:
    same(lambda api: checkpointing(api, reentrant=False))
    same(lambda api: checkpointing(api, reentrant=True), kinds=("eager",))


def checkpointing(api: Api, *, reentrant: bool) -> Any:
    found = []
    for use_orig_params in (True, False):
        torch.manual_seed(3)
        model = Checkpointed(Block(5), reentrant=reentrant)
        model.block = api.wrap(model.block, use_orig_params=use_orig_params)
        model = api.wrap(model, use_orig_params=use_orig_params)
        call = api.compile(model)
        found += [train_step(call), train_step(call, 1), plain(grads(model))]
    return found


@rows("6.27", "5.18", status="eager")
def test_checkpoints_inside_an_instance(two: Pool) -> None:
    two.run(eager_same, checkpoints_inside)


def checkpoints_inside(api: Api) -> Any:
    """As `apply_activation_checkpointing` makes them: what is recomputed in backward reads
    parameters, outside any forward.
    """
    found: list[Any] = []
    for strategy, use_orig_params in itertools.product(STRATEGIES[:2], (True, False)):
        for kind in CheckpointImpl:
            model = api.blocks(sharding_strategy=strategy, use_orig_params=use_orig_params)
            wrapper = partial(checkpoint_wrapper, checkpoint_impl=kind)
            last = model.module[3]
            apply_activation_checkpointing(
                model, wrapper, lambda m, last=last: type(m) is Block or m is last
            )
            found += [train_step(model), train_step(model, 1), plain(grads(model))]
    return found
