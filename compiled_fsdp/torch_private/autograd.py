"""Private torch: autograd's engine, versions of tensors, storages, functorch's transformations.
Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def backward_number() -> int:
    """The number of the backward that autograd runs, another one for each; -1 outside."""
    return torch._C._current_graph_task_id()


def grad_dtype_set(leaf: Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether somebody has set `grad_dtype` of a leaf, and to what: None lets a gradient have any
    dtype. Before torch 2.15 nothing tells the leaf's own dtype from none that was set.
    """
    wanted = leaf.grad_dtype
    return getattr(leaf, "_has_grad_dtype_override", wanted != leaf.dtype), wanted


def accumulates(leaf: Tensor) -> bool:
    """Whether the backward that autograd runs adds to `.grad` of this leaf, as far as the graph
    leads to it.

    One that was asked for other gradients does not: `autograd.grad`, or `backward(inputs=...)`.
    True outside any backward.
    """
    if backward_number() == -1:
        return True
    if not leaf.requires_grad:
        return False
    # Below autograd, as inside of an operator that calls a graph, it must be asked all the same.
    without = torch._C._dispatch_tls_local_exclude_set() - AUTOGRAD
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without):
        node = get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # What torch raises for a leaf that `autograd.grad` was asked for: it is returned, not
        # added.
        return False


def call_before_theirs(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Register a hook of this package on the tensor, behind others of the package and before those
    of users: these may run a backward of their own through what the hook makes ready.

    Autograd calls the hooks of a tensor in the order in which they entered its dict.
    """
    hooks: dict[int, Any] = tensor._backward_hooks or {}
    package = __name__.partition(".")[0]
    theirs = [key for key, fn in hooks.items() if not _is_from(package, fn)]
    moved = {key: hooks.pop(key) for key in theirs}
    tensor.register_hook(hook)
    hooks.update(moved)


def _is_from(package: str, fn: Any) -> bool:
    return str(getattr(fn, "__module__", "")).partition(".")[0] == package


def has_hooks_of_users(leaf: Any) -> bool:
    """Whether others than this package have hooks on a leaf that autograd calls with its gradient.
    Tried on 2.13.
    """
    package = __name__.partition(".")[0]
    tables = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return any(not _is_from(package, fn) for table in tables for fn in (table or {}).values())


def is_transformed() -> bool:
    """Whether code runs inside of `torch.func.grad`, `vmap`, `jvp` or their like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Handle tensors as if these were not there."""
    return temporarily_clear_interpreter_stack()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that `torch.func.grad`, `vmap`, `jvp` and their like have wrapped, or itself."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def run_of(node: Any) -> int:
    """A number for one run of a graph that autograd has recorded."""
    number: int = node._sequence_nr()
    return number


def next_run() -> int:
    """What `run_of` will say of the node that this thread records next."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def running_node() -> Any:
    """The node whose backward autograd runs; None outside."""
    return torch._C._current_autograd_node()


def current_run() -> int:
    """`run_of` the node whose backward autograd runs; -1 outside."""
    node = running_node()
    return -1 if node is None else run_of(node)


def allocate(tensor: Tensor, num_bytes: int) -> None:
    """Give a tensor's storage this size; one that has it stays where it is (`resize_` alone would
    move it).
    """
    storage = tensor.untyped_storage()
    if storage.size() != num_bytes:
        storage.resize_(num_bytes)


def preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Write to `tensor` without autograd taking it for a change of what it saved: the values are
    the same again.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set what autograd compares with the version of what it saved; tried on 2.11, 2.13 and
    2.15.
    """
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def without_torch_function() -> AbstractContextManager[None]:
    """Handle tensors of a class with `__torch_function__` without calling it."""
    return torch._C.DisableTorchFunctionSubclass()
