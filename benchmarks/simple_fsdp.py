"""SimpleFSDP in a few lines (Zhang et al., 2024; torchtitan's experiment of that name), as a peer
to measure against.

Every parameter becomes a property that gathers its shard. In a whole graph autograd makes the
reduce-scatter of its gradient, and a checkpoint around the gather makes backward gather again.
Nothing buckets or schedules these collectives but Inductor's defaults. Gradients are sums over the
ranks: divide the loss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def simple_fsdp(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Keep one shard of every parameter of `model`, cut on dim 0, and gather it at every read."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if parameter.shape[0] % size:
                raise ValueError(
                    f"{name} of shape {tuple(parameter.shape)} does not divide by {size}"
                )
            module._parameters[name] = nn.Parameter(parameter.detach().chunk(size)[rank].clone())
        if own:
            reads = {name: _property(name, group) for name in own}
            module.__class__ = type(type(module).__name__, (type(module),), reads)


def _property(name: str, group: Any) -> property:
    def read(module: nn.Module) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _gather_again)
        shard = module._parameters[name]
        gathered: Tensor = checkpoint(
            _gather, shard, group, use_reentrant=False, context_fn=contexts
        )
        return gathered

    return property(read)


def _gather(shard: Tensor, group: Any) -> Tensor:
    gathered: Tensor = all_gather_tensor_autograd(shard, 0, group)
    return gathered


def _gather_again(_context: Any, _op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
