"""`warmup`: compile a model's forward and backward on every rank, before the first step and without
any trace of it.

Private torch used here (tried on 2.13): `torch.utils._pytree`.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from compiled_fsdp.errors import named
from compiled_fsdp.torch_private.compiled import uncompiled
from compiled_fsdp.wire.agreement import agree
from compiled_fsdp.wire.divergence import DivergenceError, describe

from .state import states_below

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from compiled_fsdp.eager.tree import Tree

    from .state import State


def warmup(model: nn.Module, *example: Any, **more: Any) -> None:
    """Run one forward and backward on `example`, and return when every rank has done so.

    Compiles both phases: call it after `torch.compile(fully_shard(model))`, on all ranks. Ranks
    that compile for longer are waited for, up to the timeout of `init_process_group`. Parameters,
    gradients, buffers and the state of the random generators are afterwards as before.

    Raises:
        TypeError: the model was not sharded.
        RuntimeError: a backward of the model is not finalized.
        ValueError: no output requires a gradient.
        DivergenceError: ranks compiled different graphs.
    """
    states = sharded_below(model, "warmup")
    with without_trace(model, "warmup"):
        run_both(model, example, more, "warmup")
    for group in dict.fromkeys(flat.mesh_info.shard_group for s in states for flat in s.unit.flats):
        texts = agree(group, "the end of warmup")
        if texts is not None:
            raise DivergenceError(describe(group, texts))


def sharded_below(model: nn.Module, doing: str) -> list[State]:
    """The states of all sharded modules of a model.

    Raises:
        TypeError: there is none.
    """
    inner = uncompiled(model)
    states = states_below(inner) if isinstance(inner, torch.nn.Module) else []
    if isinstance(inner, FunctionType | MethodType):
        raise TypeError(
            f"{doing}: the function {inner.__qualname__} is in the place of the model. Pass the "
            "module that was given to fully_shard, first"
        )
    if not states:
        raise TypeError(
            f"{doing}: {named(model)} has no sharded module. Call fully_shard on it first"
        )
    return states


@contextmanager
def without_trace(model: nn.Module, doing: str) -> Iterator[None]:
    """Afterwards, gradients, also those of backwards without synchronization, buffers and the state
    of the random generators are as they were, and parameters are sharded; also if what is inside
    raises.

    Raises:
        RuntimeError: a backward is not finalized (`set_manual_backward_finalization`).
    """
    inner = uncompiled(model)
    states = states_below(inner)
    device = states[0].unit.mesh_info.device
    trees = list(dict.fromkeys(state.runtime.tree for state in states))
    _check_finalized(trees, doing)
    for tree in trees:
        tree.recover()
        tree.rest()
    flats = [flat for state in states for flat in state.unit.flats]
    aside = [(flat, flat.set_aside()) for flat in flats]
    gradients = [(p, p.grad) for p in inner.parameters()]
    buffers = [(b, b.clone()) for b in inner.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            yield
    finally:
        for tree in trees:
            if tree.has_callback or tree.finalization.held:
                tree.reset()
            tree.rest()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for flat, kept in aside:
            flat.put_back(kept)
        for parameter, grad in gradients:
            _put_back(parameter, grad)
        for flat in flats:
            flat.show_unreduced()


def _put_back(parameter: nn.Parameter, grad: Tensor | None) -> None:
    """Assign a gradient, whatever its dtype is."""
    try:
        parameter.grad = grad
    except RuntimeError:  # FSDP1's `keep_low_precision_grads`
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.data = grad  # type: ignore[assignment]


def _check_finalized(trees: list[Tree], doing: str) -> None:
    held = [runtime.unit.name for tree in trees for runtime in tree.finalization.held]
    if held:
        raise RuntimeError(
            f"{doing}: the backward of {held[0]} is not finalized, and its gradients would be "
            "mixed with those of this one. Call finalize_backward() first"
        )


def run_both(model: nn.Module, example: tuple[Any, ...], more: dict[str, Any], doing: str) -> None:
    """One forward, and one backward from the sum of its outputs."""
    with torch.enable_grad():
        leaves = tree_leaves(model(*example, **more))
        outputs = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        if not outputs:
            raise ValueError(
                f"{doing}: none of the {len(leaves)} outputs of {named(model)} requires a "
                f"gradient, so there is no backward to run. Unfreeze a parameter, or leave {doing} "
                "out"
            )
        sum(x.float().sum() for x in outputs).backward()  # type: ignore[union-attr]
