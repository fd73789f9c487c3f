"""Kernels of the `fsdp::` ops on parameters and gradients: fake ones, real ones, autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_fsdp import progress
from compiled_fsdp.errors import check_dense, warn_once
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.schema import REDUCE_GRAD, library
from compiled_fsdp.ir.spec import REGISTRY, ParamSpec
from compiled_fsdp.options import of_unit
from compiled_fsdp.torch_private.compiling import hurry
from compiled_fsdp.torch_private.dynamo import before_backend, is_dynamo_faking
from compiled_fsdp.torch_private.fakes import empty_like_fake
from compiled_fsdp.torch_private.groups import group_named

# matrix_ops, state_ops and tensor_ops register theirs
from . import (  # noqa: F401
    agreement,
    launch,
    matrix_ops,
    own_groups,
    ranges,
    state_ops,
    tensor_ops,
    unused_outputs,
)
from .captured import each_run
from .ignored import taken_of
from .kernels import Piece, fake, kernel, owner_of, reached
from .runs import note_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule


_settle_first: list[Callable[[GraphModule], None]] = []


def before_traced_reads(fn: Callable[[GraphModule], None]) -> None:
    """Let `fn` see every graph of Dynamo's that reads a parameter, once it is whole and before its
    backend gets it.
    """
    _settle_first.append(fn)


_num_updates: Counter[str] = Counter()


def num_updates(step: str) -> int:
    """How often a graph has given gradients to the whole step of this name."""
    return _num_updates[step]


_may_be_traced: list[Callable[[ParamSpec], str]] = []


def in_traced_backwards(fn: Callable[[ParamSpec], str]) -> None:
    """Ask `fn`, when Dynamo traces a backward itself, why the gradient of a parameter cannot leave
    the graph; "" if it can: then the graph's end delivers it, and Dynamo finds none.
    """
    _may_be_traced.append(fn)


def refusal(what: str, why: str) -> str:
    """The error for a compiled function whose own backward would train nothing."""
    return (
        f"compiled_fsdp: a compiled function computes the gradient of {what} itself, by "
        "loss.backward() or torch.autograd.grad (torch._dynamo.config.trace_autograd_ops is True), "
        f"and it would arrive nowhere: {why}. For a whole step in one graph, write "
        "step = compiled_fsdp.compile_step(model, optimizer, loss_fn); loss = step(batch). "
        "Otherwise return the loss from the compiled function and call loss.backward() outside, or "
        "set trace_autograd_ops to False, and Dynamo breaks the graph there"
    )


# Units that a graph reads, by the name in their ops: what no eager hook sees.
TRACED: set[str] = set()


def _consume(spec: ParamSpec, options: list[str]) -> None:
    """An op that no pass lowered does as these say."""
    unit = of_unit(spec.unit)
    if unit is not None:
        unit.consume("fsdp ops, not lowered", *options)


def _unaliased(result: Tensor, source: Tensor) -> Tensor:
    """Custom ops must not return views of their inputs (one rank: nothing was gathered)."""
    is_alias = result.untyped_storage()._cdata == source.untyped_storage()._cdata
    return result.clone() if is_alias else result


@kernel("unshard")
def _unshard(flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    if spec.is_checked:
        raise NotImplementedError(
            f"Plan(check='checksums'): the graph that reads {spec.fqn} has reached its backend "
            "without our passes, so nothing would be compared. Use torch.compile's default backend "
            "or 'compiled_fsdp_eager', or set check=None"
        )
    warn_once(
        "compiled_fsdp: a graph reached its backend without our passes, so every parameter is "
        f"gathered by a collective of its own, none overlapped ({spec.fqn} was the first). The "
        "results are right. Use torch.compile's default backend or 'compiled_fsdp_eager', and do "
        "not overwrite Inductor's joint_custom_post_pass and post_grad_custom_post_pass",
        about="a graph without our passes",
    )
    unused_outputs.announce()
    _consume(spec, comm.gather_options(spec))
    with torch.no_grad():
        return _unaliased(
            transfers.unshard(launch.call, flat, flat.numel(), flat.dtype, spec), flat
        )


@fake("unshard")
def _unshard_fake(flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    TRACED.add(spec.unit)
    progress.seen(spec.unit)
    hurry()
    for settle in _settle_first:
        before_backend(settle)
    if not spec.device:
        return empty_like_fake(flat, spec.shape, spec.dtype)
    return flat.new_empty(spec.shape, dtype=spec.dtype, device=spec.device)


@kernel("reduce_grad")
def _reduce_grad(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    unused_outputs.announce_zeros(grad, spec.fqn)
    if spec.grad_dtype is not None and spec.grad_dtype.itemsize > flat.dtype.itemsize:
        warn_once(
            "compiled_fsdp: a graph reached its backend without our passes, so torch's compiler "
            f"rounds the gradient of {spec.fqn}, and of others with a grad_dtype of "
            f"{spec.grad_dtype}, to {flat.dtype} on its way to .grad. Use torch.compile's default "
            "backend or 'compiled_fsdp_eager'",
            about="grad_dtype without our passes",
        )
    _consume(spec, comm.reduce_options(spec))
    with torch.no_grad():
        result = transfers.reduce_grad(
            launch.call, grad, grad.dtype, flat, flat.numel(), flat.dtype, spec
        )
    if result is None:
        return flat.new_zeros(flat.shape, dtype=spec.kept_dtype(flat.dtype))
    _mark_grads(result, flat, (spec.offset,))
    return _unaliased(result, grad)


@fake("reduce_grad")
def _reduce_grad_fake(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    return empty_like_fake(flat, flat.shape, spec.kept_dtype(flat.dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    flat, *ctx.spec = inputs
    ctx.save_for_backward(flat)


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (flat,) = ctx.saved_tensors
    if grad.layout is not torch.strided:
        check_dense(grad, ParamSpec.of(ctx.spec).fqn)
    if is_dynamo_faking(grad):
        spec = ParamSpec.of(ctx.spec)
        why_not = [why for asked in _may_be_traced if (why := asked(spec))]
        if _may_be_traced and not why_not:
            return None, *([None] * len(ctx.spec))  # what the graph does with it stands in its end
        raise NotImplementedError(refusal(spec.fqn, "; ".join(why_not)))
    return REDUCE_GRAD(grad, flat, *ctx.spec), *([None] * len(ctx.spec))


torch.library.register_autograd(
    "fsdp::unshard", _unshard_backward, setup_context=_setup_context, lib=library
)


@kernel("keep_slice")
def _keep_slice(param: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    rank = group_named(spec.group).rank()
    start = min(rank * spec.rows, spec.shape[spec.dim])
    rows = param.narrow(spec.dim, start, min(spec.rows, spec.shape[spec.dim] - start))
    kept = param.new_zeros(spec.shard_shape)
    kept.narrow(spec.dim, 0, rows.shape[spec.dim]).copy_(rows)
    return kept.flatten()


@fake("keep_slice")
def _keep_slice_fake(param: Tensor, *args: object) -> Tensor:
    return param.new_empty(ParamSpec.of(args).over_post_group().shard_numel)


@kernel("unshard_slice")
def _unshard_slice(kept: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    return _unaliased(transfers.unshard(launch.call, kept, kept.numel(), kept.dtype, spec), kept)


@fake("unshard_slice")
def _unshard_slice_fake(kept: Tensor, *args: object) -> Tensor:
    return kept.new_empty(ParamSpec.of(args).shape)


@kernel("mark_grads_")
def _mark_grads(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    if owner := reached(flat, "mark_grads_"):
        each_run(partial(owner.mark, tuple(offsets)))


@kernel("retain_")
def _retain(grads: Tensor, flat: Tensor, offsets: Sequence[int], where: str) -> None:
    if owner := reached(flat, "retain_"):
        owner.retain(grads, offsets, where)


@kernel("add_retained_")
def _add_retained(grads: Tensor, flat: Tensor, offsets: Sequence[int], where: str) -> None:
    if owner := reached(flat, "add_retained_"):
        owner.add_retained(grads, offsets, where)


@kernel("reduce_later_")
def _reduce_later(
    started: Tensor, flat: Tensor, offsets: Sequence[int], codes: Sequence[str], *args: object
) -> None:
    if owner := reached(flat, "reduce_later_"):
        owner.reduce_later(started, offsets, codes, ParamSpec.of(args))
    else:
        launch.call(comm.WAIT, started)  # nobody will


@kernel("step_")
def _step(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    if owner := reached(flat, "step_"):
        owner.step(flat_grad, offsets)


@kernel("update_")
def _update(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    found_inf: Tensor | None = None,
    state_numel: int = 0,
    is_hosted: bool = False,
    state: Tensor | None = None,
) -> None:
    _num_updates[step] += 1
    if offsets:
        owner_of(flat, "update_").update(flat_grad, offsets, step, found_inf, state)
    else:
        taken_of(flat, "update_").update(flat_grad, step, found_inf)


@kernel("shard_norms")
def _shard_norms(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> Tensor:
    return owner_of(flat, "shard_norms").norms(flat_grad, offsets)


@fake("shard_norms")
def _shard_norms_fake(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> Tensor:
    return flat_grad.new_empty(len(offsets))


@kernel("gather_ahead")
def _gather_ahead(shard: Tensor, flat: Tensor, *piece: Any) -> Tensor:
    return owner_of(flat, "gather_ahead").gather(shard, Piece.of(*piece))


@fake("gather_ahead")
def _gather_ahead_fake(
    shard: Tensor,
    flat: Tensor,
    start: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    group_size: int,
    *_: Any,
) -> Tensor:
    return shard.new_empty(group_size * shard.numel())


@kernel("gather_next")
def _gather_next(flat: Tensor, *piece: Any) -> None:
    owner_of(flat, "gather_next").gather_ahead(Piece.of(*piece))


@kernel("all_reduce_hook")
def _all_reduce_hook(grads: Tensor, key: str) -> Tensor:
    result = grads.clone()
    REGISTRY[key](result)
    return result


@fake("all_reduce_hook")
def _all_reduce_hook_fake(grads: Tensor, key: str) -> Tensor:
    return torch.empty_like(grads)


@kernel("flatten_grad")
def _flatten_grad(grad: Tensor, start: int, numel: int, order: Sequence[int]) -> Tensor:
    piece = transfers.flat_piece(launch.call, grad, order)
    result: Tensor = transfers.flatten_grads(
        launch.call, {start: piece}, {start: grad.numel()}, numel
    )
    return result


@fake("flatten_grad")
def _flatten_grad_fake(grad: Tensor, start: int, numel: int, order: Sequence[int]) -> Tensor:
    return grad.new_empty(numel)


@kernel("cast_grad")
def _cast_grad(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.to(dtype, copy=True)


@fake("cast_grad")
def _cast_grad_fake(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_like_fake(grad, grad.shape, dtype)


@kernel("agree")
def _agree(token: Tensor, text: str, groups: Sequence[str], record: str = "") -> None:
    """The token is there for compilers: an op that writes to something is neither dropped nor moved
    past its like.
    """
    each_run(partial(_begin, text, groups, record))


def _begin(text: str, groups: Sequence[str], record: str) -> None:
    agreement.before_run(text, [name for name in groups if not comm.is_own_group(name)])
    own_groups.make(groups)
    note_run(record)
    ranges.mark(record)


@kernel("watch_heads")
def _watch_heads(token: Tensor, flats: Sequence[Tensor], num_outputs: int, text: str) -> None:
    unused_outputs.watch([owner_of(flat, "watch_heads") for flat in flats], num_outputs, text)
