"""How gradients of a flat buffer become those of its parameters: `.grad` of each is a view of the
first that comes, and later ones are added to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from compiled_fsdp.torch_private.autograd import grad_dtype_set
from compiled_fsdp.torch_private.dtensors import make_dtensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .flat import FlatBuffer
    from .param import ShardedParam


def add(flat: FlatBuffer, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
    """Add a reduced flat gradient to `.grad` of these: at once, where it is one buffer."""
    fresh = [p for p in params if p.sharded.grad is None]
    buffer = None if fresh else _buffer_of(flat, params)
    if buffer is not None:
        buffer.add_(flat_grad)
    else:
        add_each(flat, flat_grad, params)


def add_each(flat: FlatBuffer, flat_grad: Tensor, params: Sequence[ShardedParam]) -> None:
    """The same, one by one."""
    for param in params:
        view = flat.local_view(flat_grad, param)
        if param.sharded.grad is None:
            put(param, make_dtensor(view, param.sharded))
        else:
            _local_grad(param).add_(view)


def put(param: ShardedParam, grad: DTensor) -> None:
    """Let this be the gradient of a parameter.

    Raises:
        RuntimeError: somebody has set `grad_dtype` of it since the first forward, or whatever else
            torch has against it.
    """
    try:
        param.sharded.grad = grad
    except RuntimeError as error:
        is_set, asked = grad_dtype_set(param.sharded)
        if not is_set or asked in (None, grad.dtype):
            raise
        raise RuntimeError(
            f"backward: grad_dtype of the sharded parameter {param.fqn} was set to {asked} after "
            f"the first forward, and its gradient was reduced in {grad.dtype}, which torch does "
            "not put there. Set grad_dtype before fully_shard, or before the first forward"
        ) from error


def _buffer_of(flat: FlatBuffer, params: Sequence[ShardedParam]) -> Tensor | None:
    """The one buffer that all gradients are still views of, if they are; None if these are not all
    parameters.
    """
    if len(params) != len(flat.params):
        return None
    grads = [_local_grad(p) for p in params]
    starts = {g.storage_offset() - p.layout.offset for g, p in zip(grads, params, strict=True)}
    storages = {(g.untyped_storage()._cdata, g.dtype) for g in grads}
    if len(starts) > 1 or len(storages) > 1:
        return None
    (start,) = starts
    if grads[0].untyped_storage().nbytes() < (start + flat.layout.numel) * grads[0].itemsize:
        return None
    return grads[0].as_strided((flat.layout.numel,), (1,), start)


def _local_grad(param: ShardedParam) -> Tensor:
    """This rank's part of a gradient that is there.

    Raises:
        AssertionError: a user has put a plain tensor there; torch's type for it.
    """
    grad = param.sharded.grad
    if isinstance(grad, DTensor):
        return grad._local_tensor
    raise AssertionError(
        f"a gradient of {param.fqn} is reduced and to be added to its .grad, which is a "
        f"{type(grad).__name__} that somebody has assigned, as p.grad = p.grad.full_tensor() does; "
        "should be None, or a DTensor placed as the parameter. Keep the full tensor under another "
        "name, or call zero_grad() before this backward"
    )
