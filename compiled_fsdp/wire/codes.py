"""Makes the bytes of `ir/quantized.py` of real tensors, and reads them.

On a CPU a few blocks at a time, so that what is between memory and bytes stays in the cache: about
what one fused kernel would take, without one to be compiled for every shape and place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_fsdp.ir.quantized import ALIGNMENT, BLOCK, CODES, LARGEST, LEAST, SCALE, WIRE, payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

AT_ONCE = 1024  # blocks


def width(pieces: Sequence[Tensor], names: Sequence[str]) -> int:
    """Bytes of each row of these pieces [rows, n_i], coded as named."""
    return sum(
        payload(piece.shape[1], piece.dtype, CODES[name])
        for piece, name in zip(pieces, names, strict=True)
    )


def encode(pieces: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """The payloads of pieces [rows, n_i] side by side: [rows, bytes]."""
    out = pieces[0].new_empty(pieces[0].shape[0], width(pieces, names), dtype=WIRE)
    start = 0
    for piece, name in zip(pieces, names, strict=True):
        codes, numel = CODES[name], piece.shape[1]
        part = out.narrow(1, start, payload(numel, piece.dtype, codes))
        start += part.shape[1]
        part[:, -ALIGNMENT:].zero_()
        if codes is None:
            part[:, : numel * piece.itemsize].view(piece.dtype).copy_(piece)
            continue
        num_blocks = -(-numel // BLOCK)
        coded, scales = part[:, : num_blocks * BLOCK], part[:, num_blocks * BLOCK :].view(SCALE)
        for row, its_codes, its_scales in zip(piece, coded, scales, strict=True):
            _encode_row(row, its_codes.view(codes).view(-1, BLOCK), its_scales[:num_blocks])
    return out


def _encode_row(row: Tensor, coded: Tensor, scales: Tensor) -> None:
    """Codes [blocks, BLOCK] and scales [blocks] of [n]."""
    num_blocks = coded.shape[0]
    step = AT_ONCE if row.device.type == "cpu" else num_blocks
    for i in range(0, num_blocks, step):
        x = row[i * BLOCK : (i + step) * BLOCK].to(SCALE)
        count = min(step, num_blocks - i)
        if x.numel() < count * BLOCK:
            x = torch.nn.functional.pad(x, (0, count * BLOCK - x.numel()))
        x = x.reshape(count, BLOCK)
        scale = x.abs().amax(1, keepdim=True).mul_(1.0 / LARGEST[coded.dtype]).clamp_min_(LEAST)
        scale += scale - scale  # finite minus itself is 0; of an inf or a nan it is nan
        x = x * scale.reciprocal()
        coded[i : i + count] = x if coded.dtype.is_floating_point else x.round_()
        scales[i : i + count] = scale.view(-1)


def decode(table: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """What a payload in each row of [rows, bytes] stands for: [rows, numel] of `dtype`."""
    out = table.new_empty(table.shape[0], numel, dtype=dtype)
    codes = CODES[name]
    for row, values in zip(table, out, strict=True):
        if codes is None:
            values.copy_(row[: numel * dtype.itemsize].view(dtype))
        else:
            _decode_row(row, values, codes)
    return out


def decode_sum(table: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """The sum over rows, in order, of what the payloads stand for: [numel] of `dtype`; of codes,
    added in fp32.
    """
    codes = CODES[name]
    if codes is None:
        return table[:, : numel * dtype.itemsize].view(dtype).sum(0)
    total = table.new_empty(numel, dtype=SCALE)
    for i, row in enumerate(table):
        _decode_row(row, total, codes, adds=i > 0)
    return total.to(dtype)


def _decode_row(row: Tensor, out: Tensor, codes: torch.dtype, *, adds: bool = False) -> None:
    """Write or add what [bytes] stand for to [n]."""
    numel = out.numel()
    num_blocks = -(-numel // BLOCK)
    coded = row[: num_blocks * BLOCK].view(codes).view(num_blocks, BLOCK)
    scales = row[num_blocks * BLOCK : num_blocks * (BLOCK + SCALE.itemsize)].view(SCALE)
    step = AT_ONCE if row.device.type == "cpu" else num_blocks
    for i in range(0, num_blocks, step):
        x = coded[i : i + step].to(SCALE).mul_(scales[i : i + step].unsqueeze(1)).view(-1)
        into = out[i * BLOCK : (i + step) * BLOCK]
        x = x[: into.numel()]
        if adds:
            into += x
        else:
            into.copy_(x)
