"""How the gradient of a shard becomes that of the flat parameter and of the originals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .stock import FlatParamHandle


@torch.no_grad()
def accumulate(keeper: FlatParamHandle, new: Tensor) -> None:
    """Add in full precision; keep the sum in the dtype that the policy says.

    With `use_orig_params` each original's `.grad` becomes a view of it.
    """
    flat: Any = keeper.flat_param
    if keeper._use_orig_params:
        if flat.grad is not None:  # the user may have dropped the originals' since
            keeper._reset_flat_param_grad_info_if_needed()
        # Autograd gives them some where a loss names them outside of forward (a penalty).
        is_held = any(original.grad is not None for original in flat._params)
        if is_held and not keeper._skip_writeback_check:
            keeper._writeback_orig_params()
    old = flat.grad
    if old is not None and old.dtype == new.dtype and old.shape == new.shape:
        total = old.add_(new)
    else:
        total = new if old is None or old.shape != new.shape else old.to(new.dtype).add_(new)
    dtype = low_precision(keeper)
    set_grad(flat, total if dtype is None else total.to(dtype))
    if keeper._use_orig_params:
        for i, original in enumerate(flat._params):
            if original.requires_grad:
                flat._is_grad_none_mask[i] = False
        keeper._use_sharded_grad_views()
        _step_in_backward(flat)


def low_precision(keeper: FlatParamHandle) -> torch.dtype | None:
    """Returns what `keep_low_precision_grads` leaves gradients in; None for full precision."""
    if not keeper._keep_low_precision_grads or keeper._force_full_precision:
        return None
    return keeper._fwd_bwd_param_dtype if keeper.uses_sharded_strategy else keeper._reduce_dtype


def set_grad(param: Tensor, grad: Tensor) -> None:
    """Assign a gradient of any dtype, shape and device; torch wants the parameter's own."""
    if (grad.dtype, grad.shape, grad.device) == (param.dtype, param.shape, param.device):
        param.grad = grad
        return
    param.grad = torch.empty_like(param)
    param.grad.data = grad


def put_grad(param: Tensor, grad: Tensor | None) -> None:
    """Assign a gradient as `set_grad` does, or take it away (None)."""
    param.grad = None
    if grad is not None:
        set_grad(param, grad)


def reads_at_once(keeper: FlatParamHandle) -> bool:
    """Whether an optimizer steps as soon as gradients are there."""
    originals = keeper.flat_param._params or ()
    return any(getattr(original, "_in_backward_optimizers", ()) for original in originals)


def _step_in_backward(flat: Any) -> None:
    """Optimizers that torch's `_apply_optimizer_in_backward` gave to originals step right after the
    reduction.
    """
    for original in flat._params:
        optimizers = getattr(original, "_in_backward_optimizers", ())
        if original.grad is None or not optimizers:
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        flat.grad = None


@torch.no_grad()
def show_unsharded_grads(keeper: FlatParamHandle, full: Tensor) -> None:
    """Let `.grad` of the originals be views of a gradient that is not reduced yet, whatever their
    own shapes are.
    """
    views = keeper._get_unflat_views(full)
    for original, view in zip(keeper.flat_param._params, views, strict=True):  # type: ignore[arg-type]
        if not original.requires_grad:
            continue
        set_grad(original, view)
