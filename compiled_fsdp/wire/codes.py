"""Makes the bytes of `ir/quantized.py` of real tensors, and reads them.

On a CPU a few blocks at a time, so that what is between memory and bytes stays in the cache: about
what one fused kernel would take, without one to be compiled for every shape and place. On a device
all rows at once, by one kernel of Triton (`triton_codes.py`), or else by torch's ops; the bytes are
the same.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.ir.quantized import BLOCK, CODES, LARGEST, LEAST, SCALE, WIRE, payload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

AT_ONCE = 1024  # blocks
HALVES = 2.0**8  # by what a code of eight bits is more than the half that has its bits
SIGN_AND_VALUE = -0x4080  # the bits of a half that a code of eight bits sets: 0xBF80


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
        num_blocks = -(-numel // BLOCK)
        used = num_blocks * (BLOCK + SCALE.itemsize) if codes else numel * piece.itemsize
        if used < part.shape[1]:
            part[:, used:].zero_()
        if codes is None:
            part[:, :used].view(piece.dtype).copy_(piece)
            continue
        if kernels := _kernels(part.device, codes):
            kernels.encode_rows(piece, part, codes)
            continue
        coded, scales = _parts(part, num_blocks, codes)
        if not _by_row(piece):
            _encode_rows(piece, coded, scales)
            continue
        for row, its_codes, its_scales in zip(piece, coded, scales, strict=True):
            _encode_row(row, its_codes, its_scales)
    return out


@cache
def _kernels(device: torch.device, codes: torch.dtype) -> ModuleType | None:
    """Triton's kernels, if they run on this device. None on a CPU, and, with a warning, where
    torch's ops have to do: they make the same bytes by a dozen launches for each piece.
    """
    if device.type == "cpu":
        return None
    if why := _why_no_kernels(device, codes):
        warn_once(f"codes of {codes} on {device.type} take a dozen launches for each tensor: {why}")
        return None
    from . import triton_codes

    return triton_codes


def _why_no_kernels(device: torch.device, codes: torch.dtype) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return "there are kernels for NVIDIA's devices alone"
    if codes.is_floating_point and torch.cuda.get_device_capability(device) < (8, 9):
        return "Triton converts to fp8 on devices of compute capability 8.9 and later"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, which torch's CUDA builds bring"
    return ""


def _by_row(table: Tensor) -> bool:
    return table.device.type == "cpu"


def _parts(table: Tensor, num_blocks: int, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [rows, blocks, BLOCK] and scales [rows, blocks] in [rows, bytes]."""
    end = num_blocks * BLOCK
    coded = table[:, :end].view(codes).unflatten(1, (num_blocks, BLOCK))
    return coded, table[:, end : end + num_blocks * SCALE.itemsize].view(SCALE)


def _encode_rows(table: Tensor, coded: Tensor, scales: Tensor) -> None:
    """Codes [rows, blocks, BLOCK] and scales [rows, blocks] of [rows, n]."""
    num_rows, num_blocks, _ = coded.shape
    x = table.to(SCALE)
    if more := num_blocks * BLOCK - x.shape[1]:
        x = torch.nn.functional.pad(x, (0, more))
    x = x.reshape(num_rows, num_blocks, BLOCK)
    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True)
    scale = _scale_of(largest, coded.dtype)
    ratio = x * scale.reciprocal()
    coded.copy_(ratio if coded.dtype.is_floating_point else ratio.round_())
    scales.copy_(scale.squeeze(-1))


def _scale_of(largest: Tensor, codes: torch.dtype) -> Tensor:
    """Of blocks with these largest values, in their place."""
    scale = largest.mul_(1.0 / LARGEST[codes]).clamp_min_(LEAST)
    scale += scale - scale  # finite minus itself is 0; of an inf or a nan it is nan
    return scale


def _encode_row(row: Tensor, coded: Tensor, scales: Tensor) -> None:
    """Codes [blocks, BLOCK] and scales [blocks] of [n]."""
    num_blocks = coded.shape[0]
    step = min(AT_ONCE, num_blocks)
    scratch = row.new_empty(step, BLOCK, dtype=SCALE)
    for i in range(0, num_blocks, step):
        x = row[i * BLOCK : (i + step) * BLOCK].to(SCALE)
        count = min(step, num_blocks - i)
        if x.numel() < count * BLOCK:
            x = torch.nn.functional.pad(x, (0, count * BLOCK - x.numel()))
        x, ratio = x.reshape(count, BLOCK), scratch[:count]
        largest = torch.abs(x, out=ratio).amax(1, keepdim=True)
        scale = _scale_of(largest, coded.dtype)
        torch.mul(x, scale.reciprocal(), out=ratio)
        coded[i : i + count] = ratio if coded.dtype.is_floating_point else ratio.round_()
        scales[i : i + count] = scale.view(-1)


def decode(table: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """What a payload in each row of [rows, bytes] stands for: [rows, numel] of `dtype`."""
    out = table.new_empty(table.shape[0], numel, dtype=dtype)
    codes = CODES[name]
    if codes is None:
        return out.copy_(table[:, : numel * dtype.itemsize].view(dtype))
    if kernels := _kernels(table.device, codes):
        kernels.decode_rows(table, out, codes)
        return out
    if not _by_row(table):
        _decode_rows(table, out, codes)
        return out
    for row, values in zip(table, out, strict=True):
        _decode_row(row, values, codes)
    return out


def decode_sum(table: Tensor, numel: int, dtype: torch.dtype, name: str) -> Tensor:
    """The sum over rows of what the payloads stand for: [numel] of `dtype`; of codes, added in
    fp32, on a CPU in order.
    """
    codes = CODES[name]
    if codes is None:
        return table[:, : numel * dtype.itemsize].view(dtype).sum(0)
    if kernels := _kernels(table.device, codes):
        out = table.new_empty(numel, dtype=dtype)
        kernels.sum_rows(table, out, codes)
        return out
    if not _by_row(table):
        values = table.new_empty(table.shape[0], numel, dtype=SCALE)
        _decode_rows(table, values, codes)
        return values.sum(0).to(dtype)
    total = table.new_empty(numel, dtype=SCALE)
    for i, row in enumerate(table):
        _decode_row(row, total, codes, adds=i > 0)
    return total.to(dtype)


def _decode_rows(table: Tensor, out: Tensor, codes: torch.dtype) -> None:
    """Write what [rows, bytes] stand for to [rows, n]."""
    num_blocks = -(-out.shape[1] // BLOCK)
    coded, scales = _parts(table, num_blocks, codes)
    x: Tensor = coded.to(SCALE) if codes.is_floating_point else coded  # codes of ints are promoted
    if out.shape[1] == num_blocks * BLOCK:
        torch.mul(x, scales.unsqueeze(-1), out=out.view(-1, num_blocks, BLOCK))
    else:
        out.copy_((x * scales.unsqueeze(-1)).flatten(1)[:, : out.shape[1]])


def _decode_row(row: Tensor, out: Tensor, codes: torch.dtype, *, adds: bool = False) -> None:
    """Write or add what [bytes] stand for to [n]."""
    numel = out.numel()
    num_blocks = -(-numel // BLOCK)
    ((coded,), (scales,)) = _parts(row.unsqueeze(0), num_blocks, codes)
    step = min(AT_ONCE, num_blocks)
    scratch = row.new_empty(step, BLOCK, dtype=SCALE)
    for i in range(0, num_blocks, step):
        into = out[i * BLOCK : (i + step) * BLOCK]
        x, scale = scratch[: min(step, num_blocks - i)], scales[i : i + step].unsqueeze(1)
        if codes is torch.float8_e4m3fn:
            x.copy_(_halves(coded[i : i + step]))
            scale = scale * HALVES
        else:
            x.copy_(coded[i : i + step])
        if adds:
            into += x.mul_(scale).view(-1)[: into.numel()]
        elif into.numel() == x.numel() and out.dtype is SCALE:
            torch.mul(x, scale, out=into.view(x.shape))
        else:
            into.copy_(x.mul_(scale).view(-1)[: into.numel()])


def _halves(coded: Tensor) -> Tensor:
    """The values of codes in float8_e4m3fn over `HALVES`, in fp16, exactly: torch's own cast takes
    an element at a time on a CPU, six times as long as all else.

    A half has three more bits behind the fraction's and one more in the exponent, whose bias is
    larger by 8. Sign-extended to 16 bits and shifted by 7, a code has its exponent and fraction
    where a half has them, and its sign, beside a copy of it that is cleared. Codes of nan, which
    stand in no block but one whose scale is nan too, become 480.
    """
    bits = coded.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(SIGN_AND_VALUE)
    return bits.view(torch.float16)
