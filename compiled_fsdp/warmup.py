"""`warmup`: compile a model's forward and backward on every rank, before the first step and without any trace of it.

Private torch used here (tried on 2.13): `torch.utils._pytree`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .agreement import DivergenceError, agree, describe
from .errors import named
from .state import states_below
from .torch_private import uncompiled

if TYPE_CHECKING:
    from torch import nn


def warmup(model: nn.Module, *example: Any, **more: Any) -> None:
    """Run one forward and backward on `example`, and return when every rank has done so.

    Compiles both phases: call it after `torch.compile(fully_shard(model))`, on all ranks. Ranks that compile for longer are waited
    for, up to the timeout of `init_process_group`. Parameters, gradients, buffers and the state of the random generators are
    afterwards as before.

    Raises:
        TypeError: the model was not sharded.
        ValueError: no output requires a gradient.
        DivergenceError: ranks compiled different graphs.
    """
    inner = uncompiled(model)
    states = states_below(inner) if isinstance(inner, torch.nn.Module) else []
    if not states:
        raise TypeError(f"warmup: {named(model)} has no sharded module. Call fully_shard on it first")
    gradients = [(p, p.grad) for p in inner.parameters()]
    buffers = [(b, b.clone()) for b in inner.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = [] if states[0].unit.mesh_info.device.type == "cpu" else [states[0].unit.mesh_info.device]
    try:
        with torch.random.fork_rng(devices):
            _run(model, example, more)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, grad in gradients:
            parameter.grad = grad
    for group in dict.fromkeys(flat.mesh_info.shard_group for s in states for flat in s.unit.flats):
        texts = agree(group, "the end of warmup")
        if texts is not None:
            raise DivergenceError(describe(group, texts))


def _run(model: nn.Module, example: tuple[Any, ...], more: dict[str, Any]) -> None:
    with torch.enable_grad():
        leaves = tree_leaves(model(*example, **more))
        outputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        if not outputs:
            raise ValueError(
                f"warmup: none of the {len(leaves)} outputs of {named(model)} requires a gradient, so there is no backward "
                "to compile. Unfreeze a parameter, or leave warmup out"
            )
        sum(x.float().sum() for x in outputs).backward()  # type: ignore[union-attr]
