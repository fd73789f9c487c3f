"""Kernels of the `fsdp::` ops of `schema.py`: fake ones, real ones, autograd, and how they reach a
unit.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from compiled_fsdp import progress
from compiled_fsdp.errors import check_dense, warn_once
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.matrices import sizes as sizes_of
from compiled_fsdp.ir.quantized import WIRE
from compiled_fsdp.ir.schema import REDUCE_GRAD, SCHEMAS, START_COPY, library
from compiled_fsdp.ir.spec import REGISTRY, ParamSpec
from compiled_fsdp.options import of_unit
from compiled_fsdp.torch_private.compiling import hurry
from compiled_fsdp.torch_private.dynamo import before_backend, is_dynamo_faking
from compiled_fsdp.torch_private.groups import group_named, reduce_op, register_work

from . import agreement, checks, codes, copies, gloo, launch, own_groups, ranges, unused_outputs
from .runs import note_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `start + numel` of a flat buffer, gathered in `dtype` over a group, in
    messages of these sizes.

    numels, codes: where bytes travel, the elements of each parameter and the codes that stand for
        them ("": it travels in `dtype`); `sizes` are in bytes then. Else neither.
    """

    start: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    group_size: int
    group: str
    numels: tuple[int, ...] = ()
    codes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        start: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        group_size: int,
        group: str,
        numels: Sequence[int],
        codes: Sequence[str],
    ) -> Piece:
        """From the arguments of `gather_ahead` and `gather_next`, which have lists."""
        return cls(start, tuple(sizes), dtype, group_size, group, tuple(numels), tuple(codes))

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return sum(self.numels or self.sizes)


class Owner(unused_outputs.Buffer, Protocol):
    """A flat buffer's unit, as the ops reach it at run time; offsets name its parameters."""

    def is_reached(self) -> bool:
        """Whether the running backward adds to the gradient of the flat buffer; if not, the ops
        below change nothing.
        """

    def mark(self, offsets: Sequence[int]) -> None:
        """Gradients of these are in the flat gradient that this backward delivers."""

    def retain(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """Keep gradients: `where` is "rows" (unreduced, [group_size, n]) or "partial" (over the
        shard axis only, [n]).
        """

    def add_retained(self, grads: Tensor, offsets: Sequence[int], where: str) -> None:
        """Add what was kept of these to `grads`, in place, and forget it."""

    def reduce_later(
        self, started: Tensor, offsets: Sequence[int], codes: Sequence[str], spec: ParamSpec
    ) -> None:
        """A reduction of these under way, with `spec.reduction`: its result is needed when somebody
        reads the gradients. `codes`: those in which each travels, if bytes do.
        """

    def step(self, flat_grad: Tensor, offsets: Sequence[int]) -> None:
        """Reduced gradients of these, in a buffer of the flat buffer's layout: to be used up now,
        or kept for the optimizer.
        """

    def update(
        self, flat_grad: Tensor, offsets: Sequence[int], step: str, found_inf: Tensor | None
    ) -> None:
        """Reduced gradients of these, for the optimizer of the whole step of this name; `found_inf`
        is 1 if gradients are scaled and some is inf or NaN.
        """

    def momentum(
        self,
        flat_grad: Tensor,
        offsets: Sequence[int],
        step: str,
        numel: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Reduced gradients of these matrices, for the optimizer of a whole step that needs them
        whole; returns this rank's pieces of what is to be orthogonalized, padded: [numel].
        """

    def orthogonalize(
        self, received: Tensor, offsets: Sequence[int], owners: Sequence[int], step: str
    ) -> Tensor:
        """The pieces of all ranks [N, n] of those matrices that this rank owns, at the beginning of
        `received`; returns their updates likewise.
        """

    def update_matrices(self, pieces: Tensor, offsets: Sequence[int], step: str) -> None:
        """This rank's pieces of the updates of these matrices, padded: [n]."""

    def norms(self, flat_grad: Tensor, offsets: Sequence[int]) -> Tensor:
        """2-norms [N] of this rank's parts of these gradients, each without its padding."""

    def judge(self, step: str) -> None:
        """The ranks compare what they have summed up in the whole step of this name; it raises if
        something differs.
        """

    def rested(self, sums: Tensor, names: Sequence[str], phase: str) -> tuple[int, ...]:
        """Checksums [P] of what the buffer holds of these, while they are gathered. Returns its
        version.
        """

    def gather(self, shard: Tensor, piece: Piece) -> Tensor:
        """Start to gather a piece, which `shard` holds, or hand over what is under way for it."""

    def gather_ahead(self, piece: Piece) -> None:
        """Start to gather a piece of what the buffer holds now, for `gather` to hand over."""


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


def set_owner(flat: Tensor, owner: Owner) -> None:
    """Make `owner` the one that ops find by a flat buffer; it is held weakly."""
    flat._fsdp_owner = weakref.ref(owner)  # type: ignore[attr-defined]


def owner_of(flat: Tensor, op: str) -> Owner:
    """The unit of a flat buffer; `op` names who asks, for errors."""
    owner: Owner | None = getattr(flat, "_fsdp_owner", lambda: None)()
    if owner is None:
        raise RuntimeError(
            f"fsdp::{op}: no unit owns the flat buffer of shape {tuple(flat.shape)}. The graph "
            "must be given the flat buffer itself, not a copy or a view of it"
        )
    return owner


def _reached(flat: Tensor, op: str) -> Owner | None:
    """The owner, if this backward was asked for the gradients of its parameters."""
    owner = owner_of(flat, op)
    return owner if owner.is_reached() else None


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        library.impl(name, fn, "CompositeExplicitAutograd")
        return fn

    return decorate


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(
        f"fsdp::{name}", lib=library
    )
    return decorate


def _consume(spec: ParamSpec, options: list[str]) -> None:
    """An op that no pass lowered does as these say."""
    unit = of_unit(spec.unit)
    if unit is not None:
        unit.consume("fsdp ops, not lowered", *options)


def _unaliased(result: Tensor, source: Tensor) -> Tensor:
    """Custom ops must not return views of their inputs (one rank: nothing was gathered)."""
    is_alias = result.untyped_storage()._cdata == source.untyped_storage()._cdata
    return result.clone() if is_alias else result


@_kernel("unshard")
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
        return _unaliased(comm.unshard(launch.call, flat, flat.numel(), flat.dtype, spec), flat)


@_fake("unshard")
def _unshard_fake(flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    TRACED.add(spec.unit)
    progress.seen(spec.unit)
    hurry()
    for settle in _settle_first:
        before_backend(settle)
    return flat.new_empty(spec.shape, dtype=spec.dtype, device=spec.device or flat.device)


@_kernel("reduce_grad")
def _reduce_grad(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args)
    unused_outputs.announce_zeros(grad, spec.fqn)
    _consume(spec, comm.reduce_options(spec))
    with torch.no_grad():
        result = comm.reduce_grad(
            launch.call, grad, grad.dtype, flat, flat.numel(), flat.dtype, spec
        )
    if result is None:
        return flat.new_zeros(flat.shape)
    _mark_grads(result, flat, (spec.offset,))
    return _unaliased(result, grad)


@_fake("reduce_grad")
def _reduce_grad_fake(grad: Tensor, flat: Tensor, *args: object) -> Tensor:
    ParamSpec.of(args)
    return flat.new_empty(flat.shape)


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


@_kernel("keep_slice")
def _keep_slice(param: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    rank = group_named(spec.group).rank()
    start = min(rank * spec.rows, spec.shape[spec.dim])
    rows = param.narrow(spec.dim, start, min(spec.rows, spec.shape[spec.dim] - start))
    kept = param.new_zeros(spec.shard_shape)
    kept.narrow(spec.dim, 0, rows.shape[spec.dim]).copy_(rows)
    return kept.flatten()


@_fake("keep_slice")
def _keep_slice_fake(param: Tensor, *args: object) -> Tensor:
    return param.new_empty(ParamSpec.of(args).over_post_group().shard_numel)


@_kernel("unshard_slice")
def _unshard_slice(kept: Tensor, *args: object) -> Tensor:
    spec = ParamSpec.of(args).over_post_group()
    return _unaliased(comm.unshard(launch.call, kept, kept.numel(), kept.dtype, spec), kept)


@_fake("unshard_slice")
def _unshard_slice_fake(kept: Tensor, *args: object) -> Tensor:
    return kept.new_empty(ParamSpec.of(args).shape)


@_kernel("mark_grads_")
def _mark_grads(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    if owner := _reached(flat, "mark_grads_"):
        owner.mark(offsets)


@_kernel("retain_")
def _retain(grads: Tensor, flat: Tensor, offsets: Sequence[int], where: str) -> None:
    if owner := _reached(flat, "retain_"):
        owner.retain(grads, offsets, where)


@_kernel("add_retained_")
def _add_retained(grads: Tensor, flat: Tensor, offsets: Sequence[int], where: str) -> None:
    if owner := _reached(flat, "add_retained_"):
        owner.add_retained(grads, offsets, where)


@_kernel("reduce_later_")
def _reduce_later(
    started: Tensor, flat: Tensor, offsets: Sequence[int], codes: Sequence[str], *args: object
) -> None:
    if owner := _reached(flat, "reduce_later_"):
        owner.reduce_later(started, offsets, codes, ParamSpec.of(args))
    else:
        launch.call(comm.WAIT, started)  # nobody will


@_kernel("step_")
def _step(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> None:
    if owner := _reached(flat, "step_"):
        owner.step(flat_grad, offsets)


@_kernel("update_")
def _update(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    found_inf: Tensor | None = None,
) -> None:
    _num_updates[step] += 1
    owner_of(flat, "update_").update(flat_grad, offsets, step, found_inf)


@_kernel("momentum_")
def _momentum(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    return owner_of(flat, "momentum_").momentum(flat_grad, offsets, step, numel, dtype)


@_fake("momentum_")
def _momentum_fake(
    flat_grad: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    step: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    return flat_grad.new_empty(numel, dtype=dtype)


@_kernel("to_owners")
def _to_owners(
    pieces: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    """Pieces [sum of numels], those of an owner next to each other and owners in order. An owner
    gets [group_size, n], rank by rank, at the beginning of what is as large on every rank.
    """
    sizes = sizes_of(numels, owners, group_size)
    out = pieces.new_empty(group_size * max(sizes))
    mine = [sizes[group_named(group).rank()]] * group_size
    received = out[: sum(mine)]
    work = launch.start_exchange(received, pieces, mine, sizes, group, what)
    register_work(out, work)
    return out


@_kernel("orthogonalize")
def _orthogonalize(
    received: Tensor,
    flat: Tensor,
    offsets: Sequence[int],
    owners: Sequence[int],
    step: str,
    flops: float,
) -> Tensor:
    """Flops: of the owner that has most to do; for prices alone."""
    return owner_of(flat, "orthogonalize").orthogonalize(received, offsets, owners, step)


@_fake("orthogonalize")
def _orthogonalize_fake(received: Tensor, *args: object) -> Tensor:
    return torch.empty_like(received)


@_kernel("from_owners")
def _from_owners(
    updates: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    """The way back of `to_owners`."""
    sizes = sizes_of(numels, owners, group_size)
    out = updates.new_empty(sum(sizes))
    mine = [sizes[group_named(group).rank()]] * group_size
    work = launch.start_exchange(out, updates[: sum(mine)], sizes, mine, group, what)
    register_work(out, work)
    return out


@_fake("to_owners")
def _to_owners_fake(
    pieces: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    return pieces.new_empty(group_size * max(sizes_of(numels, owners, group_size)))


@_fake("from_owners")
def _from_owners_fake(
    updates: Tensor,
    numels: Sequence[int],
    owners: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
) -> Tensor:
    return updates.new_empty(sum(numels))


@_kernel("update_matrices_")
def _update_matrices(pieces: Tensor, flat: Tensor, offsets: Sequence[int], step: str) -> None:
    owner_of(flat, "update_matrices_").update_matrices(pieces, offsets, step)


@_kernel("shard_norms")
def _shard_norms(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> Tensor:
    return owner_of(flat, "shard_norms").norms(flat_grad, offsets)


@_fake("shard_norms")
def _shard_norms_fake(flat_grad: Tensor, flat: Tensor, offsets: Sequence[int]) -> Tensor:
    return flat_grad.new_empty(len(offsets))


@_kernel("gather_ahead")
def _gather_ahead(shard: Tensor, flat: Tensor, *piece: Any) -> Tensor:
    return owner_of(flat, "gather_ahead").gather(shard, Piece.of(*piece))


@_fake("gather_ahead")
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


@_kernel("gather_next")
def _gather_next(flat: Tensor, *piece: Any) -> None:
    owner_of(flat, "gather_next").gather_ahead(Piece.of(*piece))


@_kernel("all_reduce_hook")
def _all_reduce_hook(grads: Tensor, key: str) -> Tensor:
    result = grads.clone()
    REGISTRY[key](result)
    return result


@_fake("all_reduce_hook")
def _all_reduce_hook_fake(grads: Tensor, key: str) -> Tensor:
    return torch.empty_like(grads)


def _custom(algorithm: str) -> Any:
    return REGISTRY[algorithm.removeprefix(comm.CUSTOM)]


@_kernel("custom_all_gather")
def _custom_all_gather(shard: Tensor, group_size: int, group: str, algorithm: str) -> Tensor:
    """Stock's contract: one `allocate`; the input is this rank's slice of the output."""
    communicate, process_group = _custom(algorithm), group_named(group)
    numel = shard.numel()
    out: Tensor = communicate.allocate(
        (group_size * numel,), dtype=shard.dtype, device=shard.device
    )
    mine = out.narrow(0, process_group.rank() * numel, numel)
    mine.copy_(shard)
    work = communicate(output_tensor=out, input_tensor=mine, group=process_group, async_op=True)
    if work is not None:
        register_work(out, work)
    return out


@_fake("custom_all_gather")
def _custom_all_gather_fake(shard: Tensor, group_size: int, group: str, algorithm: str) -> Tensor:
    return shard.new_empty(group_size * shard.numel())


@_kernel("custom_reduce_scatter")
def _custom_reduce_scatter(
    rows: Tensor, op: str, group_size: int, group: str, algorithm: str
) -> Tensor:
    """Stock's contract: `allocate` for the input and for the output; no `async_op`."""
    communicate = _custom(algorithm)
    source: Tensor = communicate.allocate((rows.numel(),), dtype=rows.dtype, device=rows.device)
    source.copy_(rows)
    out: Tensor = communicate.allocate(
        (rows.numel() // group_size,), dtype=rows.dtype, device=rows.device
    )
    work = communicate(
        output_tensor=out, input_tensor=source, group=group_named(group), op=reduce_op(op)
    )
    if work is not None:
        register_work(out, work)
    return out


@_fake("custom_reduce_scatter")
def _custom_reduce_scatter_fake(
    rows: Tensor, op: str, group_size: int, group: str, algorithm: str
) -> Tensor:
    return rows.new_empty(rows.numel() // group_size)


@_kernel("flatten_grad")
def _flatten_grad(grad: Tensor, start: int, numel: int, order: Sequence[int]) -> Tensor:
    piece = comm.flat_piece(launch.call, grad, order)
    result: Tensor = comm.flatten_grads(launch.call, {start: piece}, {start: grad.numel()}, numel)
    return result


@_fake("flatten_grad")
def _flatten_grad_fake(grad: Tensor, start: int, numel: int, order: Sequence[int]) -> Tensor:
    return grad.new_empty(numel)


@_kernel("copy_columns")
def _copy_columns(columns: Tensor) -> Tensor:
    return columns.clone(memory_format=torch.contiguous_format)


@_fake("copy_columns")
def _copy_columns_fake(columns: Tensor) -> Tensor:
    return columns.new_empty(columns.shape)


@_kernel("all_gather")
def _all_gather(
    shard: Tensor,
    sizes: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
    phase: str = "",
) -> Tensor:
    """The piece of n elements at `start` comes out at `group_size * start`: n from each rank, in
    rank order.

    So a parameter needs no copy out of its bucket: what the ranks hold of it lies back to back.
    """
    with ranges.around("all_gather", phase, what):
        out, work = launch.start_gather(shard, sizes, group_size, group, what, phase)
        register_work(out, work)
    return out


@_fake("all_gather")
def _all_gather_fake(
    shard: Tensor,
    sizes: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
    phase: str = "",
) -> Tensor:
    return shard.new_empty(gloo.gathered_shape(shard, group_size))


@_kernel("all_to_all")
def _all_to_all(
    rows: Sequence[Tensor], group_size: int, group: str, what: str = "", phase: str = ""
) -> Tensor:
    """From pieces [group_size, n_i]: [group_size, sum of n_i], row r being this rank's row of every
    piece of rank r.
    """
    with ranges.around("all_to_all", phase, what):
        if gloo.is_gloo(group, rows[0].device):
            return gloo.all_to_all(rows, group_size, group, what, phase)
        joined = torch.cat(list(rows), 1)
        out = torch.empty_like(joined)
        register_work(out, group_named(group).alltoall_base(out, joined, [], []))
        return out


@_fake("all_to_all")
def _all_to_all_fake(
    rows: Sequence[Tensor], group_size: int, group: str, what: str = "", phase: str = ""
) -> Tensor:
    return rows[0].new_empty(group_size, sum(piece.shape[1] for piece in rows))


@_kernel("all_reduce")
def _all_reduce(rows: Tensor, op: str, group: str, what: str = "", phase: str = "") -> Tensor:
    with ranges.around("all_reduce", phase, what):
        reduced: Tensor = comm.ALL_REDUCE(rows, op, group)
        return reduced


@_fake("all_reduce")
def _all_reduce_fake(rows: Tensor, op: str, group: str, what: str = "", phase: str = "") -> Tensor:
    return torch.empty_like(rows)


@_kernel("agree")
def _agree(token: Tensor, text: str, groups: Sequence[str], record: str = "") -> None:
    """The token is there for compilers: an op that writes to something is neither dropped nor moved
    past its like.
    """
    agreement.before_run(text, [name for name in groups if not comm.is_own_group(name)])
    own_groups.make(groups)
    note_run(record)
    ranges.mark(record)


@_kernel("watch_heads")
def _watch_heads(token: Tensor, flats: Sequence[Tensor], num_outputs: int, text: str) -> None:
    unused_outputs.watch([owner_of(flat, "watch_heads") for flat in flats], num_outputs, text)


@_kernel("copy_to")
def _copy_to(x: Tensor, device: str, pins: bool) -> Tensor:
    copied: Tensor = launch.call(comm.WAIT, START_COPY(x, device, pins))
    return copied


@_kernel("start_copy")
def _start_copy(x: Tensor, device: str, pins: bool) -> Tensor:
    copied, work = copies.begin(x, device, pins)
    register_work(copied, work)
    return copied


def _copy_fake(x: Tensor, device: str, pins: bool) -> Tensor:
    return x.new_empty(x.shape, device="cpu" if device == comm.HOST else device)


for _copy in ("copy_to", "start_copy"):
    _fake(_copy)(_copy_fake)


@_kernel("encode")
def _encode(pieces: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    return codes.encode(pieces, names)


@_fake("encode")
def _encode_fake(pieces: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    return pieces[0].new_empty(pieces[0].shape[0], codes.width(pieces, names), dtype=WIRE)


@_kernel("decode")
def _decode(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return codes.decode(payload, numel, dtype, name)


@_fake("decode")
def _decode_fake(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return payload.new_empty(payload.shape[0], numel, dtype=dtype)


@_kernel("decode_sum")
def _decode_sum(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return codes.decode_sum(payload, numel, dtype, name)


@_fake("decode_sum")
def _decode_sum_fake(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return payload.new_empty(numel, dtype=dtype)


@_kernel("checksum")
def _checksum(
    pieces: Sequence[Tensor], rows: int, messages: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    return checks.checksums(pieces, rows, messages, sizes)


@_fake("checksum")
def _checksum_fake(
    pieces: Sequence[Tensor], rows: int, messages: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    return pieces[0].new_empty(rows, len(sizes), dtype=torch.int64)


@_kernel("compare_")
def _compare(
    sent: Tensor,
    received: Tensor,
    rests: Sequence[Tensor],
    flats: Sequence[Tensor],
    counts: Sequence[int],
    collective: str,
    phase: str,
    names: Sequence[str],
) -> None:
    """Copies: who runs the graph may use the memory of the sums again."""
    ledger = checks.ledger_of(names[0])
    if ledger is None:
        raise RuntimeError(
            f"fsdp::compare_: no unit of this process is called {names[0].partition(':')[0]!r}, so "
            "nobody would compare what was summed up. Compile the model in this process"
        )
    rest = (torch.cat(list(rests), 1) if rests else sent.clone())[0]
    start = 0
    versions: tuple[int, ...] = ()
    for flat, count in zip(flats, counts, strict=True):
        stop = start + count
        versions += owner_of(flat, "compare_").rested(rest[start:stop], names[start:stop], phase)
        start = stop
    sums = sent.clone(), received.clone()
    ledger.add(checks.Entry(collective, phase, tuple(names), *sums, versions))


@_kernel("verdict_")
def _verdict(grads: Sequence[Tensor], sums: Sequence[Tensor], flat: Tensor, step: str) -> None:
    """What it is given is there for compilers: all sums are noted before it, and no gradient is used
    for an update but behind it.
    """
    owner_of(flat, "verdict_").judge(step)


@_kernel("note_counts_")
def _note_counts(received: Tensor, sent: Tensor) -> None:
    """It writes nothing; that it says so keeps it where it is, as with `agree`."""
    ranges.note_counts(sent, received)


@_kernel("free")
def _free(buffer: Tensor) -> None:
    """Nothing to do: the caller drops its last reference with this call, and `verify` saw that no
    view outlives it.
    """


def _nothing(*args: object, **kwargs: object) -> None:
    """Does to fake tensors what an op without a result does: nothing."""


for _schema in SCHEMAS:
    if _schema.endswith("-> ()"):
        _fake(_schema.partition("(")[0])(_nothing)
