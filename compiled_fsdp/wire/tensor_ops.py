"""Kernels of the `fsdp::` ops on tensors: collectives, copies, codes on the wire, checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.quantized import WIRE
from compiled_fsdp.ir.schema import START_COPY
from compiled_fsdp.ir.spec import REGISTRY
from compiled_fsdp.torch_private.groups import group_named, reduce_op, register_work

from . import checks, codes, copies, gloo, launch, ranges
from .ignored import ignored_of
from .kernels import fake, kernel, owner_of


def _custom(algorithm: str) -> Any:
    return REGISTRY[algorithm.removeprefix(comm.CUSTOM)]


@kernel("custom_all_gather")
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


@fake("custom_all_gather")
def _custom_all_gather_fake(shard: Tensor, group_size: int, group: str, algorithm: str) -> Tensor:
    return shard.new_empty(group_size * shard.numel())


@kernel("custom_reduce_scatter")
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


@fake("custom_reduce_scatter")
def _custom_reduce_scatter_fake(
    rows: Tensor, op: str, group_size: int, group: str, algorithm: str
) -> Tensor:
    return rows.new_empty(rows.numel() // group_size)


@kernel("copy_columns")
def _copy_columns(columns: Tensor) -> Tensor:
    return columns.clone(memory_format=torch.contiguous_format)


@fake("copy_columns")
def _copy_columns_fake(columns: Tensor) -> Tensor:
    return columns.new_empty(columns.shape)


@kernel("all_gather")
def _all_gather(
    shard: Tensor,
    sizes: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
    phase: str = "",
) -> Tensor:
    """The piece of n elements at `start` comes out at `group_size * start`: n from each rank, in
    rank order. No sizes: one piece.

    So a parameter needs no copy out of its bucket: what the ranks hold of it lies back to back.
    """
    with ranges.around("all_gather", phase, what):
        pieces = sizes or [shard.numel()]
        out, work = launch.start_gather(shard, pieces, group_size, group, what, phase)
        register_work(out, work)
    return out


@fake("all_gather")
def _all_gather_fake(
    shard: Tensor,
    sizes: Sequence[int],
    group_size: int,
    group: str,
    what: str = "",
    phase: str = "",
) -> Tensor:
    return shard.new_empty(gloo.gathered_shape(shard, group_size))


@kernel("all_to_all")
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


@fake("all_to_all")
def _all_to_all_fake(
    rows: Sequence[Tensor], group_size: int, group: str, what: str = "", phase: str = ""
) -> Tensor:
    return rows[0].new_empty(group_size, sum(piece.shape[1] for piece in rows))


@kernel("all_reduce")
def _all_reduce(rows: Tensor, op: str, group: str, what: str = "", phase: str = "") -> Tensor:
    with ranges.around("all_reduce", phase, what):
        reduced: Tensor = comm.ALL_REDUCE(rows, op, group)
        return reduced


@fake("all_reduce")
def _all_reduce_fake(rows: Tensor, op: str, group: str, what: str = "", phase: str = "") -> Tensor:
    return torch.empty_like(rows)


@kernel("copy_to")
def _copy_to(x: Tensor, device: str, pins: bool) -> Tensor:
    copied: Tensor = launch.call(comm.WAIT, START_COPY(x, device, pins))
    return copied


@kernel("start_copy")
def _start_copy(x: Tensor, device: str, pins: bool) -> Tensor:
    copied, work = copies.begin(x, device, pins)
    register_work(copied, work)
    return copied


@kernel("offload")
def _offload(x: Tensor, pins: bool) -> Tensor:
    copied, work = copies.begin(x, comm.HOST, pins, is_for_device=True)
    register_work(copied, work)
    return copied


@kernel("reload")
def _reload(x: Tensor, device: str) -> Tensor:
    copied, work = copies.begin(x, device, False)
    register_work(copied, work)
    return copied


@fake("offload")
def _offload_fake(x: Tensor, pins: bool) -> Tensor:
    return _copy_fake(x, comm.HOST, pins)


@fake("reload")
def _reload_fake(x: Tensor, device: str) -> Tensor:
    return _copy_fake(x, device, False)


def _copy_fake(x: Tensor, device: str, pins: bool) -> Tensor:
    """Of the same strides: an activation is read again as it was."""
    where = "cpu" if device == comm.HOST else device
    return x.new_empty_strided(x.shape, x.stride(), device=where)


for _copy in ("copy_to", "start_copy"):
    fake(_copy)(_copy_fake)


@kernel("encode")
def _encode(pieces: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    return codes.encode(pieces, names)


@fake("encode")
def _encode_fake(pieces: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    return pieces[0].new_empty(pieces[0].shape[0], codes.width(pieces, names), dtype=WIRE)


@kernel("decode")
def _decode(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return codes.decode(payload, numel, dtype, name)


@fake("decode")
def _decode_fake(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return payload.new_empty(payload.shape[0], numel, dtype=dtype)


@kernel("decode_sum")
def _decode_sum(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return codes.decode_sum(payload, numel, dtype, name)


@fake("decode_sum")
def _decode_sum_fake(payload: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    return payload.new_empty(numel, dtype=dtype)


@kernel("checksum")
def _checksum(
    pieces: Sequence[Tensor], rows: int, messages: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    return checks.checksums(pieces, rows, messages, sizes)


@fake("checksum")
def _checksum_fake(
    pieces: Sequence[Tensor], rows: int, messages: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    return pieces[0].new_empty(rows, len(sizes), dtype=torch.int64)


@kernel("compare_")
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


@kernel("verdict_")
def _verdict(grads: Sequence[Tensor], sums: Sequence[Tensor], flat: Tensor, step: str) -> None:
    """What it is given is there for compilers: all sums are noted before it, and no gradient is
    used for an update but behind it.
    """
    (ignored_of(flat) or owner_of(flat, "verdict_")).judge(step)


@kernel("note_counts_")
def _note_counts(received: Tensor, sent: Tensor) -> None:
    """It writes nothing; that it says so keeps it where it is, as with `agree`."""
    ranges.note_counts(sent, received)


@kernel("free")
def _free(buffer: Tensor) -> None:
    """Nothing to do: the caller drops its last reference with this call, and `verify` saw that no
    view outlives it.
    """
