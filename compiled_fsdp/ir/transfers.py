"""Whole transfers, of one parameter or of a bucket of several: from flat buffers to full
parameters, and from gradients to flat gradients.

As in `collectives.py`, of which these consist, every function takes `run`, which applies an op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import quantized, schema
from .collectives import (
    ALL_TO_ALL,
    WAIT,
    after_shard_axis,
    all_gather,
    convert,
    divide,
    from_host,
    from_rows,
    joined,
    rank_rows,
    reduce_scatter,
    to_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .spec import ParamSpec

    Value = Any  # a torch.Tensor, or an fx.Node standing for one
    Run = Callable[..., Value]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Source:
    """A flat buffer as an input of a bucket: its value, elements and dtype."""

    flat: Value
    numel: int
    dtype: torch.dtype


def unshard(run: Run, flat: Value, numel: int, dtype: torch.dtype, spec: ParamSpec) -> Value:
    """From a flat local buffer [numel] of `dtype` to one parameter of `spec.shape` and
    `spec.dtype`.
    """
    if quantized.gathers_bytes([spec]):
        gathered = gather_bucket(run, [(Source(flat, numel, dtype), spec)])
        return GatheredBucket([spec]).copy_out(run, gathered, 0)
    end = spec.offset + spec.shard_numel
    shard = (
        flat
        if (spec.offset, end) == (0, numel)
        else run(aten.slice.Tensor, flat, 0, spec.offset, end)
    )
    here = from_host(run, shard, spec)
    gathered = all_gather(run, convert(run, here, dtype, spec.dtype), spec)
    return from_rows(run, gathered, spec)


def reduce_grad(
    run: Run,
    grad: Value,
    grad_dtype: torch.dtype,
    flat: Value,
    numel: int,
    dtype: torch.dtype,
    spec: ParamSpec,
) -> Value | None:
    """From one parameter's gradient of `spec.shape` to its part of the flat local gradient [numel]
    of a flat buffer of `dtype`.

    None if the policy is to keep the gradient for a later backward.
    """
    piece = reduce_bucket(run, [(grad, grad_dtype, spec)], flat, dtype)
    return None if piece is None else place(run, piece, numel, spec)


@dataclass(frozen=True, slots=True)
class Message:
    """Neighbours in a bucket that travel in one message: places in the bucket, and columns `start`
    to `start + numel`.
    """

    members: tuple[int, ...]
    start: int
    numel: int


def messages_of(specs: Sequence[ParamSpec], dtype: torch.dtype) -> list[Message]:
    """Cut a bucket of these parameters, of `dtype` on the wire, into messages: copying costs time
    and memory, messages time.

    Large parameters travel by themselves, and are neither packed nor unpacked; runs of small ones
    travel together.
    """
    pieces: list[Message] = []
    start = 0
    is_open = False  # whether the next small parameter may join the last piece
    for place, spec in enumerate(specs):
        is_small = spec.full_bytes(dtype) < spec.own_message
        if is_small and is_open:
            last = pieces[-1]
            pieces[-1] = Message((*last.members, place), last.start, last.numel + spec.shard_numel)
        else:
            pieces.append(Message((place,), start, spec.shard_numel))
        is_open = is_small
        start += spec.shard_numel
    return pieces


def gather_bucket(run: Run, members: Sequence[tuple[Source, ParamSpec]]) -> Value:
    """One all-gather for several parameters: flat, [group_size * sum of shard_numel];
    `GatheredBucket` finds each in it.
    """
    specs = [s for _, s in members]
    spec = specs[0]
    if quantized.gathers_bytes(specs):
        return all_gather(run, _payload(run, members), spec)
    parts = _pieces(run, members)
    shard = parts[0] if len(parts) == 1 else run(aten.cat.default, parts)
    sizes = [piece.numel for piece in gather_messages(specs)]
    if spec.group_size == 1:
        return run(aten.view.default, shard, [sum(sizes)])  # a result of `run`, as every bucket
    if len(sizes) == 1:
        return all_gather(run, shard, spec)
    return run(WAIT, run(schema.ALL_GATHER, shard, sizes, spec.group_size, spec.group))


def _pieces(run: Run, members: Sequence[tuple[Source, ParamSpec]]) -> list[Value]:
    """The members' shards in the compute dtype; neighbours in one flat buffer come as one slice of
    it.
    """
    ranges: list[tuple[Source, int, int]] = []
    for source, spec in members:
        start, end = spec.offset, spec.offset + spec.shard_numel
        if ranges and ranges[-1][0].flat is source.flat and ranges[-1][2] == start:
            ranges[-1] = (source, ranges[-1][1], end)
        else:
            ranges.append((source, start, end))
    pieces = []
    for source, start, end in ranges:
        is_all = (start, end) == (0, source.numel)
        piece = source.flat if is_all else run(aten.slice.Tensor, source.flat, 0, start, end)
        piece = from_host(run, piece, members[0][1])
        pieces.append(convert(run, piece, source.dtype, members[0][1].dtype))
    return pieces


def _payload(run: Run, members: Sequence[tuple[Source, ParamSpec]]) -> Value:
    """What this rank sends of a bucket that is gathered as bytes: [bytes]."""
    pieces: list[Value] = []
    for source, spec in members:
        start, numel = spec.offset, spec.shard_numel
        is_all = numel == source.numel
        shard = (
            source.flat if is_all else run(aten.slice.Tensor, source.flat, 0, start, start + numel)
        )
        if spec.gather_quantized is None:
            shard = convert(run, shard, source.dtype, spec.dtype)
        pieces.append(run(aten.view.default, shard, [1, numel]))
    specs = [spec for _, spec in members]
    total = sum(quantized.gathered_payloads(specs))
    coded = run(schema.ENCODE, pieces, quantized.codes_of_gather(specs))
    return run(aten.view.default, coded, [total])


def gather_messages(specs: Sequence[ParamSpec]) -> list[Message]:
    """The messages of an all-gather of these; one row, bytes, or a user's all-gather, know nothing
    of pieces.
    """
    if quantized.gathers_bytes(specs):
        total = sum(quantized.gathered_payloads(specs))
        return [Message(tuple(range(len(specs))), 0, total)]
    if specs[0].group_size == 1 or specs[0].gather_algorithm:
        return [Message(tuple(range(len(specs))), 0, sum(s.shard_numel for s in specs))]
    return messages_of(specs, specs[0].dtype)


class GatheredBucket:
    """Where each parameter of a gathered bucket lies in it; made once for all of them.

    messages: the pieces that travelled.
    places: of each parameter, its message and its first column there.
    is_bytes: whether columns are bytes, some of them codes (`quantized.py`), not elements.
    """

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self.specs = specs
        self.messages = gather_messages(specs)
        self.is_bytes = quantized.gathers_bytes(specs)
        self.widths = (
            quantized.gathered_payloads(specs) if self.is_bytes else [s.shard_numel for s in specs]
        )
        self.places: list[tuple[Message, int]] = []
        for message in self.messages:
            start = 0
            for place in message.members:
                self.places.append((message, start))
                start += self.widths[place]

    def columns(self, run: Run, gathered: Value, place: int) -> Value:
        """Returns what the ranks hold of parameter `place`: a view of the bucket, [group_size,
        shard_numel], or flat if contiguous; what travelled as codes, of what they stand for.
        """
        spec, (message, start) = self.specs[place], self.places[place]
        if self.is_bytes:
            table = run(aten.view.default, gathered, [spec.group_size, message.numel])
            payload = run(aten.slice.Tensor, table, 1, start, start + self.widths[place])
            name = quantized.NAMES[spec.gather_quantized]
            return run(schema.DECODE, payload, spec.shard_numel, spec.dtype, name)
        rows = gathered
        if len(self.messages) > 1:
            first = spec.group_size * message.start
            end = first + spec.group_size * message.numel
            rows = run(aten.slice.Tensor, gathered, 0, first, end)
        if len(message.members) == 1:
            return rows
        table = run(aten.view.default, rows, [spec.group_size, message.numel])
        return run(aten.slice.Tensor, table, 1, start, start + spec.shard_numel)

    def copy_out(self, run: Run, gathered: Value, place: int, *, is_copied: bool = True) -> Value:
        """Parameter `place`: a view of the bucket, or a copy if what the ranks hold of it lies
        apart; without `is_copied`, a reshape that leaves it to the compiler whether to copy.
        """
        spec, (message, _) = self.specs[place], self.places[place]
        rows = self.columns(run, gathered, place)
        is_decoded = self.is_bytes  # into one piece
        is_apart = not is_decoded and spec.group_size > 1 and len(message.members) > 1
        if is_apart and is_copied:
            rows = run(aten.clone.default, rows, memory_format=torch.contiguous_format)
        elif is_apart:
            rows = run(aten.reshape.default, rows, [spec.group_size * spec.shard_numel])
        return from_rows(run, rows, spec)


def reduce_bucket(
    run: Run, grads: Sequence[tuple[Value, torch.dtype, ParamSpec]], flat: Value, dtype: torch.dtype
) -> Value | None:
    """One reduction for the gradients of several parameters of a flat buffer of `dtype`: this
    rank's [sum of shard_numel], in order.

    None if the policy is to keep them for a later backward; the owner of `flat` has them then.
    """
    summed = sum_bucket(run, grads, flat)
    return None if summed is None else finished(run, summed, grads[0][2], dtype)


def sum_bucket(
    run: Run, grads: Sequence[tuple[Value, torch.dtype, ParamSpec]], flat: Value
) -> Value | None:
    """The same before the sums are divided, in the dtype of the reduction."""
    specs = [s for _, _, s in grads]
    spec = specs[0]
    how = spec.reduction
    offsets = [s.offset for s in specs]
    rows = [rank_rows(run, _cast(run, g, d, s), s) for g, d, s in grads]
    if how.sync == "retain":
        run(schema.RETAIN, joined(run, rows), flat, offsets, "rows")
        return None
    if how.is_accumulating:
        whole = joined(run, rows)
        if len(rows) == 1:  # a view of the gradient, which may be somebody else's too
            whole = run(aten.clone.default, whole, memory_format=torch.contiguous_format)
        run(schema.ADD_RETAINED, whole, flat, offsets, "rows")
        rows = [convert(run, whole, how.first_dtype, how.dtype)]
    if quantized.reduces_bytes(specs):
        return after_shard_axis(run, _exchange_bytes(run, rows, specs), spec, flat, offsets)
    if how.algorithm == "all_to_all" and not how.is_accumulating:
        pieces = messages_of(specs, spec.reduce_dtype)
        rows = [joined(run, [rows[n] for n in piece.members]) for piece in pieces]
    total = sum(s.shard_numel for s in specs)
    return reduce_scatter(run, rows, spec, flat, offsets, total)


def _cast(run: Run, grad: Value, dtype: torch.dtype, spec: ParamSpec) -> Value:
    """Cast a gradient to the dtype in which it is first added or sent. What is coded as it is needs
    no cast that only widens it: codes are made in fp32.
    """
    how, fp32 = spec.reduction, quantized.SCALE
    is_coded = quantized.reduces_bytes([spec]) and not how.is_accumulating
    if is_coded and how.pre_divide == 1.0 and how.first_dtype == fp32:
        if torch.promote_types(dtype, fp32) == fp32:
            return grad
    return convert(run, grad, dtype, how.first_dtype)


def finished(run: Run, summed: Value, spec: ParamSpec, dtype: torch.dtype) -> Value:
    """Sums over ranks as gradients of a flat buffer of `dtype`: shown to the user's hook, divided,
    in the dtype in which they are kept.
    """
    divided = divide(run, summed, spec.reduction)
    return convert(run, divided, spec.reduce_dtype, spec.kept_dtype(dtype))


def _exchange_bytes(run: Run, rows: Sequence[Value], specs: Sequence[ParamSpec]) -> Value:
    """Send each rank its rows of the gradients, some of them as codes, and add up what they stand
    for: this rank's [sum of shard_numel], in the dtype of the reduction.

    Each value is coded once, and added in fp32, as torch's sum adds what is not coded.
    rows: [group_size, shard_numel] of each, or one of all of them, side by side.
    """
    spec, how, size = specs[0], specs[0].reduction, specs[0].group_size
    if how.pre_divide != 1.0:
        rows = [run(aten.div.Tensor, joined(run, rows), how.pre_divide)]
    if len(rows) < len(specs):
        (whole,), rows, start = rows, [], 0
        for each in specs:
            rows.append(run(aten.slice.Tensor, whole, 1, start, start + each.shard_numel))
            start += each.shard_numel
    names = quantized.codes_of_reduction(specs)
    coded = run(schema.ENCODE, list(rows), names)
    received = run(WAIT, run(ALL_TO_ALL, [coded], size, spec.reduce_group))
    return _sum_of_bytes(run, received, [each.shard_numel for each in specs], names, how.dtype)


def _sum_of_bytes(
    run: Run, received: Value, numels: Sequence[int], names: Sequence[str], dtype: torch.dtype
) -> Value:
    """The sums over ranks of what the bytes of these parameters stand for, [group_size, bytes]:
    [sum of numels] of `dtype`.
    """
    sums, start = [], 0
    for numel, name in zip(numels, names, strict=True):
        width = quantized.payload(numel, dtype, quantized.CODES[name])
        part = run(aten.slice.Tensor, received, 1, start, start + width)
        sums.append(run(schema.DECODE_SUM, part, numel, dtype, name))
        start += width
    return sums[0] if len(sums) == 1 else run(aten.cat.default, sums)


def finish_bucket(
    run: Run,
    started: Value,
    spec: ParamSpec,
    dtype: torch.dtype,
    numels: Sequence[int],
    codes: Sequence[str],
) -> Value:
    """Do what `reduce_bucket` does from the start of its last collective on: await it, add up,
    divide, cast.

    numels, codes: of each parameter, the elements of its shard, and the codes in which its gradient
        travels; no codes: the bucket travels as it is.
    """
    how = spec.reduction
    x = run(WAIT, started)
    if codes and how.replicate_size == 1:
        x = _sum_of_bytes(run, x, numels, codes, how.dtype)
    elif how.algorithm == "all_to_all" and how.replicate_size == 1:
        x = run(aten.sum.dim_IntList, x, [0])
    return finished(run, x, spec, dtype)


def part_of_bucket(
    run: Run, summed: Value, start: int, stop: int, spec: ParamSpec, dtype: torch.dtype
) -> Value:
    """One unit's part of what several units summed up together (`sum_bucket`), finished, in storage
    of its own: it becomes a gradient.
    """
    part = run(aten.slice.Tensor, summed, 0, start, stop)
    done = finished(run, part, spec, dtype)
    if done is not part:
        return done
    return run(aten.clone.default, part, memory_format=torch.contiguous_format)


def place(run: Run, piece: Value, numel: int, spec: ParamSpec) -> Value:
    """A flat buffer [numel] of zeros, with `piece` [shard_numel] at `spec.offset`, where the
    parameter rests.
    """
    after = numel - spec.offset - spec.shard_numel
    if spec.offset or after:
        piece = run(aten.constant_pad_nd.default, piece, [spec.offset, after])
    return to_host(run, piece, spec)


def place_bucket(run: Run, reduced: Value, specs: Sequence[ParamSpec], numel: int) -> Value:
    """A flat gradient [numel] from a bucket's result: itself when nothing is missing, else zeros in
    the gaps; where the parameters rest.
    """
    total = sum(s.shard_numel for s in specs)
    if total == numel:
        return to_host(run, reduced, specs[0])
    pieces: list[Value] = []
    position = start = 0
    for spec in specs:
        piece = run(aten.slice.Tensor, reduced, 0, start, start + spec.shard_numel)
        before = spec.offset - position
        start, position = start + spec.shard_numel, spec.offset + spec.shard_numel
        after = numel - position if spec is specs[-1] else 0
        pieces.append(
            run(aten.constant_pad_nd.default, piece, [before, after]) if before or after else piece
        )
    placed = pieces[0] if len(pieces) == 1 else run(aten.cat.default, pieces)
    return to_host(run, placed, specs[0])


def flat_piece(run: Run, grad: Value, order: Sequence[int]) -> Value:
    """The elements of a parameter's gradient as the parameter lies in memory: flat; `order`: its
    dims, slowest first.
    """
    if list(order) != sorted(order):
        grad = run(aten.permute.default, grad, list(order))
    return run(aten.reshape.default, grad, [-1])


def flatten_grads(run: Run, pieces: dict[int, Value], sizes: dict[int, int], numel: int) -> Value:
    """A flat gradient [numel] of pieces at their starts, each of so many elements; zeros in the
    gaps. A copy, never a view.
    """
    padded: list[Value] = []
    position = 0
    starts = sorted(pieces)
    for start in starts:
        before = start - position
        position = start + sizes[start]
        after = numel - position if start == starts[-1] else 0
        piece = pieces[start]
        padded.append(
            run(aten.constant_pad_nd.default, piece, [before, after]) if before or after else piece
        )
    if len(padded) == 1:
        is_copied = sizes[starts[0]] < numel
        return (
            padded[0]
            if is_copied
            else run(aten.clone.default, padded[0], memory_format=torch.contiguous_format)
        )
    return run(aten.cat.default, padded)
