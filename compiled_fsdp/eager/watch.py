"""Where autograd says that a backward comes to a unit,
and that all gradients inside of it are done.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.autograd import (
    accumulates,
    backward_number,
    call_before_theirs,
    run_of,
)
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.spmd import note_types_of

from .containers import map_tensors
from .tree import in_backward

if TYPE_CHECKING:
    from torch import Tensor

    from .runtime import Runtime


def watch_inputs(runtime: Runtime, inputs: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """Inputs of a forward in which those that require a gradient are others, whose backward runs
    once all gradients inside the module are done; and these others.
    """
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, inputs)
    if not found:
        return inputs, ()
    again = None
    if in_backward():
        again = object()
        runtime.awaited.add(again)
    function: Any = _Watch
    given: tuple[Tensor, ...] = function.apply(runtime, again, _probe(), *found)
    for like, tensor in zip(found, given, strict=True):
        note_types_of(like, tensor)
    watched = iter(given)
    return map_tensors(lambda t: next(watched) if t.requires_grad else t, inputs), given


def watch_output(runtime: Runtime, tensor: Tensor) -> Tensor:
    """Let the unit know of a backward before it comes to it.

    A write to a view in place drops hooks on it: autograd then goes past it, but still by what its
    base was computed with, if that was in this forward. A view of an input needs no parameter.
    """
    if not tensor.requires_grad:
        return tensor
    base = tensor._base
    if base is None or base.grad_fn is None or run_of(base.grad_fn) < runtime.began:
        call_before_theirs(tensor, runtime._pre_backward)
        return tensor
    last = [-1]  # the backward that has come by the tensor itself

    @untraced
    def by_view(grad: Tensor) -> Tensor:
        last[0] = backward_number()
        return runtime._pre_backward(grad)

    @untraced
    def by_base(grads: tuple[Tensor, ...]) -> None:
        if last[0] != backward_number():
            runtime._pre_backward(grads[0])

    call_before_theirs(tensor, by_view)
    base.grad_fn.register_prehook(by_base)
    return tensor


def watch_leaves(runtime: Runtime) -> None:
    """A backward through a backward need not come to the unit's outputs:
    its parameters' gradients say that it was here.
    """
    me = weakref.ref(runtime)

    @untraced
    def enter(_: Tensor) -> None:
        found = me()
        if found is not None:
            found.tree.enter_backward(found)

    for param in runtime.unit.params:
        full = param.unsharded
        if full is not None and full.requires_grad and not hasattr(full, "_fsdp_enters"):
            full._fsdp_enters = True  # type: ignore[attr-defined]
            full.register_post_accumulate_grad_hook(enter)


@cache
def _probe() -> Tensor:
    """A leaf that nobody asks for: what adds to its gradient is a whole backward."""
    return torch.zeros(0, requires_grad=True)


class _Watch(torch.autograd.Function):
    """Identity whose backward runs once all gradients inside the module are done."""

    @staticmethod
    def forward(
        ctx: Any, runtime: Runtime, again: object | None, probe: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.runtime, ctx.again = runtime, again
        return tensors

    @staticmethod
    @untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tree = ctx.runtime.tree
        tree.enter_backward(ctx.runtime)
        tree.note_double(ctx.runtime)
        tree.delivers = tree.delivers or accumulates(_probe())
        ctx.runtime.come_to_inputs(ctx.again)
        return None, None, None, *grads
