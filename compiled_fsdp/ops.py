"""The IR: the `fsdp::` ops that a sharded model traces to, and what they do when nothing lowers them.

| op | means |
| --- | --- |
| `unshard(flat, *spec) -> param` | the full parameter `spec.shape` of `spec.dtype`, from this unit's flat local buffer |
| `reduce_grad(grad, flat, *spec) -> flat_grad` | the gradient of `flat` that one parameter's gradient contributes |
| `keep_slice(param, *spec) -> slice` | this rank's 1/post_size of a parameter, kept from forward to backward (int reshard) |
| `unshard_slice(slice, *spec) -> param` | the parameter again, gathered over the small group |
| `mark_grads_(flat_grad, flat, offsets)` | tells the unit which of its parameters have a gradient in this backward |
| `copy_columns(columns) -> param` | a contiguous copy: `clone` in a gather, where Inductor would compile a kernel |
| `all_gather(shard, group_size, group) -> gathered` | started, not awaited: the all-gather over gloo, see `gloo.py` |
| `free(buffer)` | the lifetime of a gathered or bucket buffer ends here |

`spec` stands for the fields of `compiled_fsdp.spec.ParamSpec`, in order. All but the last two are functional, have fake
kernels, and never alias their inputs. `unshard` is differentiable once; its formula is `reduce_grad`, which takes the flat
buffer for its size, its dtype, and so that `mark_grads_` can reach the unit at run time without any registry.

Run as they are (`backend="aot_eager"`, say) the ops are correct and slow: one collective per parameter, none overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import collectives as comm
from . import gloo
from .errors import warn_once
from .spec import ParamSpec
from .torch_private import group_named

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = (
    "SymInt offset, SymInt[] shape, ScalarType dtype, SymInt group_size, str group, str reshard, SymInt post_size, "
    "str post_group, ScalarType reduce_dtype, str reduce_op, str reduce_algorithm, float pre_divide, "
    "float post_divide, SymInt replicate_size, str replicate_group, str unit, str fqn"
)

library = torch.library.Library("fsdp", "DEF")
library.define(f"unshard(Tensor flat, {SPEC}) -> Tensor")
library.define(f"reduce_grad(Tensor grad, Tensor flat, {SPEC}) -> Tensor")
library.define(f"keep_slice(Tensor param, {SPEC}) -> Tensor")
library.define(f"unshard_slice(Tensor slice, {SPEC}) -> Tensor")
library.define("mark_grads_(Tensor(a!) flat_grad, Tensor flat, SymInt[] offsets) -> ()")
library.define("copy_columns(Tensor columns) -> Tensor")
library.define("all_gather(Tensor shard, SymInt group_size, str group) -> Tensor")
library.define("free(Tensor buffer) -> ()")

fsdp = torch.ops.fsdp
UNSHARD = fsdp.unshard.default
REDUCE_GRAD = fsdp.reduce_grad.default
KEEP_SLICE = fsdp.keep_slice.default
UNSHARD_SLICE = fsdp.unshard_slice.default
MARK_GRADS = fsdp.mark_grads_.default
COPY_COLUMNS = fsdp.copy_columns.default
ALL_GATHER = fsdp.all_gather.default
FREE = fsdp.free.default


# Flat buffer -> what to call with the offsets that got a gradient. Weak, and keyed by identity.
grad_listeners: Any = WeakTensorKeyDictionary()


def _real(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        library.impl(name, fn, "CompositeExplicitAutograd")
        return fn

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(f"fsdp::{name}", lib=library)
    return decorate


def _own(result: Tensor, source: Tensor) -> Tensor:
    """Custom ops must not return views of their inputs (one rank: nothing was gathered)."""
    is_alias = result.untyped_storage()._cdata == source.untyped_storage()._cdata
    return result.clone() if is_alias else result


@_real("unshard")
def _unshard(flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    warn_once(
        "compiled_fsdp: a graph reached its backend without our passes, so every parameter is gathered by a collective of its "
        f"own, none overlapped ({spec.fqn} was the first). The results are right. Use torch.compile's default backend or "
        "'compiled_fsdp_eager', and do not overwrite Inductor's joint_custom_post_pass and post_grad_custom_post_pass"
    )
    with torch.no_grad():
        return _own(comm.unshard(comm.call, flat, flat.numel(), flat.dtype, spec), flat)


@_fake("unshard")
def _unshard_fake(flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    return flat.new_empty(spec.shape, dtype=spec.dtype)


@_real("reduce_grad")
def _reduce_grad(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    with torch.no_grad():
        result = comm.reduce_grad(comm.call, grad, grad.dtype, flat.numel(), flat.dtype, spec)
    _mark_grads(result, flat, (spec.offset,))
    return _own(result, grad)


@_fake("reduce_grad")
def _reduce_grad_fake(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    ParamSpec.of(args)
    return flat.new_empty(flat.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    flat, *ctx.spec = inputs
    ctx.save_for_backward(flat)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (flat,) = ctx.saved_tensors
    return REDUCE_GRAD(grad, flat, *ctx.spec), *([None] * len(ctx.spec))


torch.library.register_autograd("fsdp::unshard", _unshard_backward, setup_context=_setup_context, lib=library)


@_real("keep_slice")
def _keep_slice(param: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    rank = group_named(spec.group).rank()
    start = min(rank * spec.rows, spec.shape[0])
    rows = param[start : start + spec.rows]
    kept = param.new_zeros(spec.rows, *spec.shape[1:])
    kept[: rows.shape[0]] = rows
    return kept.flatten()


@_fake("keep_slice")
def _keep_slice_fake(param: Tensor, *args: object) -> Tensor:
    return param.new_empty(ParamSpec.of(args).over_post_group().shard_numel)


@_real("unshard_slice")
def _unshard_slice(kept: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    return _own(comm.unshard(comm.call, kept, kept.numel(), kept.dtype, spec), kept)


@_fake("unshard_slice")
def _unshard_slice_fake(kept: Tensor, *args: object) -> Tensor:
    return kept.new_empty(ParamSpec.of(args).shape)


@_real("mark_grads_")
def _mark_grads(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    listener = grad_listeners.get(flat)
    if listener is None:
        raise RuntimeError(
            f"fsdp::mark_grads_: no unit owns the flat buffer of shape {tuple(flat.shape)}. The graph must be given the "
            "flat buffer itself, not a copy or a view of it"
        )
    listener(offsets)


@_fake("mark_grads_")
def _mark_grads_fake(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    return None


@_real("copy_columns")
def _copy_columns(columns: Tensor) -> Tensor:
    return columns.clone(memory_format=torch.contiguous_format)


@_fake("copy_columns")
def _copy_columns_fake(columns: Tensor) -> Tensor:
    return columns.new_empty(columns.shape)


@_real("all_gather")
def _all_gather(shard: Tensor, group_size: int, group: str) -> Tensor:
    return gloo.all_gather(shard, group_size, group)


@_fake("all_gather")
def _all_gather_fake(shard: Tensor, group_size: int, group: str) -> Tensor:
    return shard.new_empty(group_size * shard.numel())


@_real("free")
def _free(buffer: Tensor) -> None:
    """Nothing to do: the caller drops its last reference with this call, and `verify` saw that no view outlives it."""


@_fake("free")
def _free_fake(buffer: Tensor) -> None:
    return None


torch.fx.node.has_side_effect(FREE)
torch.fx.node.has_side_effect(MARK_GRADS)
