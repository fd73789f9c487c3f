"""Parameters and gradients as codes of eight bits with a scale for each block: how they are packed
into bytes, and what they are taken for where they arrive.

Blocks are `BLOCK` consecutive elements of what one rank holds of one parameter (or of the piece of
a gradient that is for one rank), so the values do not depend on what shares a message. As in
Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021, arXiv 2110.02861); packed and
sent as in Wang et al., "ZeRO++" (2023, arXiv 2306.10209).

A payload is [codes | scales]: a byte an element, whole blocks, then the scales in fp32. Exact values
may share the message, as their bytes. All payloads begin and end at multiples of `ALIGNMENT` bytes,
so that scales can be read where they lie.

- int8: scale = largest magnitude / 127, code = round(x / scale).
- float8_e4m3fn: scale = largest magnitude / 448, code = x / scale in that dtype.

A block of zeros has the least scale, `LEAST`; one with an inf or a nan has a scale of nan, so that
all of it arrives as nan. All of it is arithmetic of torch's, so that compilers fuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .spec import ParamSpec

    Value = Any  # a torch.Tensor, or an fx.Node standing for one
    Run = Callable[..., Value]

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
BITS = aten.view.dtype  # the same memory, as another dtype

BLOCK = 256  # elements that share a scale
ALIGNMENT = 4  # bytes
LEAST = 2.0**-126  # the smallest scale: its reciprocal is finite
SCALE = torch.float32
WIRE = torch.uint8  # what travels

# The largest code.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The error of an element is at most so much of the largest magnitude in its block, apart from the
# rounding of fp32: half the distance of two codes, at its largest.
ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16.0 / 448}


def gathers_bytes(specs: Sequence[ParamSpec]) -> bool:
    """Whether a bucket of these is gathered as bytes."""
    return specs[0].group_size > 1 and any(spec.gather_quantized for spec in specs)


def reduces_bytes(specs: Sequence[ParamSpec]) -> bool:
    """Whether gradients of these are sent to their ranks as bytes."""
    is_sent = specs[0].group_size > 1 and specs[0].sync != "retain"
    return is_sent and any(spec.reduce_quantized for spec in specs)


def payload(numel: int, dtype: torch.dtype, codes: torch.dtype | None) -> int:
    """Bytes that `numel` elements of `dtype` take on the wire; `codes` None: as they are."""
    if codes is None:
        return -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return -(-numel // BLOCK) * (BLOCK + SCALE.itemsize)


def gathered_payloads(specs: Sequence[ParamSpec]) -> list[int]:
    """Bytes of each of these in one rank's part of a gather."""
    return [payload(s.shard_numel, s.dtype, s.gather_quantized) for s in specs]


def reduced_payloads(specs: Sequence[ParamSpec]) -> list[int]:
    """Bytes of each of these in what a rank sends to one rank to reduce."""
    return [payload(s.shard_numel, s.reduce_dtype, s.reduce_quantized) for s in specs]


def gathered_bytes(specs: Sequence[ParamSpec]) -> int:
    """Bytes of a gathered bucket, all ranks' parts together."""
    if gathers_bytes(specs):
        return specs[0].group_size * sum(gathered_payloads(specs))
    return sum(spec.full_bytes() for spec in specs)


def reduced_bytes(specs: Sequence[ParamSpec]) -> int:
    """Bytes of a bucket of gradients, the parts for all ranks together."""
    if reduces_bytes(specs):
        return specs[0].group_size * sum(reduced_payloads(specs))
    return sum(spec.full_bytes(spec.reduce_dtype) for spec in specs)


def encode(
    run: Run, x: Value, rows: int, numel: int, dtype: torch.dtype, codes: torch.dtype | None
) -> list[Value]:
    """The payload of [rows, numel] of `dtype`, as pieces [rows, bytes] to be laid side by side."""
    if codes is None:
        return _as_bytes(run, x, numel * dtype.itemsize)
    blocks = -(-numel // BLOCK)
    x = x if dtype == SCALE else run(CONVERT, x, SCALE)
    if blocks * BLOCK > numel:
        x = run(aten.constant_pad_nd.default, x, [0, blocks * BLOCK - numel])
    x = run(aten.reshape.default, x, [rows, blocks, BLOCK])
    largest = run(aten.amax.default, run(aten.abs.default, x), [2], True)
    scale = run(aten.mul.Tensor, largest, 1.0 / LARGEST[codes])
    scale = run(aten.clamp_min.default, scale, LEAST)
    # Finite minus itself is 0; of an inf or a nan it is nan.
    scale = run(aten.add.Tensor, scale, run(aten.sub.Tensor, scale, scale))
    x = run(aten.mul.Tensor, x, run(aten.reciprocal.default, scale))
    if not codes.is_floating_point:
        x = run(aten.round.default, x)
    coded = run(BITS, run(CONVERT, x, codes), WIRE)
    scales = run(BITS, run(aten.reshape.default, scale, [rows, blocks]), WIRE)
    return [run(aten.reshape.default, coded, [rows, blocks * BLOCK]), scales]


def _as_bytes(run: Run, x: Value, num_bytes: int) -> list[Value]:
    x = run(BITS, x, WIRE)
    missing = -num_bytes % ALIGNMENT
    return [run(aten.constant_pad_nd.default, x, [0, missing])] if missing else [x]


def decode(
    run: Run,
    table: Value,
    start: int,
    rows: int,
    numel: int,
    dtype: torch.dtype,
    codes: torch.dtype | None,
) -> Value:
    """What the payload from column `start` of `table` [rows, bytes] stands for: [rows, numel]; in
    `dtype`, or of codes in fp32.
    """
    if codes is None:
        end = start + numel * dtype.itemsize
        return run(BITS, run(aten.slice.Tensor, table, 1, start, end), dtype)
    blocks = -(-numel // BLOCK)
    end = start + blocks * BLOCK
    coded = run(BITS, run(aten.slice.Tensor, table, 1, start, end), codes)
    scales = run(
        BITS,
        run(aten.slice.Tensor, table, 1, end, end + blocks * SCALE.itemsize),
        SCALE,
    )
    coded = run(CONVERT, run(aten.view.default, coded, [rows, blocks, BLOCK]), SCALE)
    x = run(aten.mul.Tensor, coded, run(aten.view.default, scales, [rows, blocks, 1]))
    x = run(aten.view.default, x, [rows, blocks * BLOCK])
    return x if blocks * BLOCK == numel else run(aten.slice.Tensor, x, 1, 0, numel)
