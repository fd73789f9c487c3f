"""The bytes of `ir/quantized.py` on a device, by kernels of Triton: one for a piece, where torch's
own ops are a dozen that read and write it each time.

The bytes are those of `codes.py`: every product and quotient is rounded by itself
(`enable_fp_fusion=False`, `div_rn`). Importing this needs Triton, which torch's CUDA builds bring.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from compiled_fsdp.ir.quantized import BLOCK, LARGEST, LEAST

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AT_ONCE = 8  # blocks of a program
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 4}


def encode_rows(table: Tensor, part: Tensor, codes: torch.dtype) -> None:
    """Write the codes and scales of [rows, n] into bytes [rows, m], behind each other in each row;
    what fills a row up is left as it is.
    """
    num_rows, numel = table.shape
    num_blocks = -(-numel // BLOCK)
    _encode[(-(-num_blocks // AT_ONCE), num_rows)](
        *(table, *table.stride(), part, part.stride(0), numel, num_blocks),
        *(1.0 / LARGEST[codes], LEAST),
        IS_INT=not codes.is_floating_point,
        BLOCK=BLOCK,
        AT_ONCE=AT_ONCE,
        **OPTIONS,
    )


def decode_rows(part: Tensor, out: Tensor, codes: torch.dtype) -> None:
    """Write what bytes [rows, m] stand for to [rows, n], contiguous."""
    num_rows, numel = out.shape
    num_blocks = -(-numel // BLOCK)
    _decode[(-(-num_blocks // AT_ONCE), num_rows)](
        *(part, part.stride(0), out, numel, num_blocks * BLOCK),
        IS_INT=not codes.is_floating_point,
        BLOCK=BLOCK,
        TILE=AT_ONCE * BLOCK,
        **OPTIONS,
    )


def sum_rows(part: Tensor, out: Tensor, codes: torch.dtype) -> None:
    """Write the sum of what the rows of bytes [rows, m] stand for to [n], added in fp32, in
    order.
    """
    numel = out.shape[0]
    num_blocks = -(-numel // BLOCK)
    _sum[(-(-num_blocks // AT_ONCE),)](
        *(part, part.stride(0), out, numel, num_blocks * BLOCK),
        NUM_ROWS=part.shape[0],
        IS_INT=not codes.is_floating_point,
        BLOCK=BLOCK,
        TILE=AT_ONCE * BLOCK,
        **OPTIONS,
    )


@triton.jit
def _codes_at(part, IS_INT: tl.constexpr):
    if IS_INT:
        codes = part.to(tl.pointer_type(tl.int8), bitcast=True)
    else:
        codes = part.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    return codes


@triton.jit
def _scales_at(part, num_codes):
    return (part + num_codes).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _encode(
    x,
    x_row,
    x_column,
    part,
    part_row,
    numel,
    num_blocks,
    inverse,
    least,
    IS_INT: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(
        x + row * x_row + place.to(tl.int64) * x_column, mask=place < numel, other=0.0
    ).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    # Finite minus itself is 0; of an inf or a nan it is nan, as all of the block.
    scale = tl.maximum(largest * inverse, least) + tl.sum(values - values, axis=1)
    ratio = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    if IS_INT:
        ratio = (ratio + 12582912.0) - 12582912.0  # to the next integer, a tie to the even one
    part += row * part_row
    coded = _codes_at(part, IS_INT)
    is_there = block < num_blocks
    tl.store(coded + place, ratio.to(coded.dtype.element_ty), mask=is_there[:, None])
    tl.store(_scales_at(part, num_blocks * BLOCK) + block, scale, mask=is_there)


@triton.jit
def _read(part, place, mask, num_codes, IS_INT: tl.constexpr, BLOCK: tl.constexpr):
    code = tl.load(_codes_at(part, IS_INT) + place, mask=mask, other=0.0)
    scale = tl.load(_scales_at(part, num_codes) + place // BLOCK, mask=mask, other=0.0)
    return code.to(tl.float32) * scale


@triton.jit
def _decode(
    part,
    part_row,
    out,
    numel,
    num_codes,
    IS_INT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = place < numel
    values = _read(part + row * part_row, place, mask, num_codes, IS_INT, BLOCK)
    tl.store(out + row * numel + place, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(
    part,
    part_row,
    out,
    numel,
    num_codes,
    NUM_ROWS: tl.constexpr,
    IS_INT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = place < numel
    total = tl.zeros((TILE,), tl.float32)
    for _ in range(NUM_ROWS):
        total = total + _read(part, place, mask, num_codes, IS_INT, BLOCK)
        part += part_row
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
