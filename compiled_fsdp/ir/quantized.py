"""Parameters and gradients as codes of eight bits with a scale for each block: which bytes they are
on the wire. What makes the bytes, and reads them, is `wire/codes.py`.

Blocks are `BLOCK` consecutive elements of what one rank holds of one parameter (or of the piece of
a gradient that is for one rank), so the values do not depend on what shares a message. As in
Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021, arXiv 2110.02861); packed and
sent as in Wang et al., "ZeRO++" (2023, arXiv 2306.10209).

A payload is [codes | scales]: a byte an element, whole blocks, then the scales in fp32. Exact
values may share the message, as their bytes. All payloads begin and end at multiples of `ALIGNMENT`
bytes, so that scales can be read where they lie.

- int8: scale = largest magnitude / 127, code = round(x / scale).
- float8_e4m3fn: scale = largest magnitude / 448, code = x / scale in that dtype.

A block of zeros has the least scale, `LEAST`; one with an inf or a nan has a scale of nan, so that
all of it arrives as nan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .spec import ParamSpec

BLOCK = 256  # elements that share a scale
ALIGNMENT = 8  # bytes: the largest element of what travels as it is
LEAST = 2.0**-126  # the smallest scale: its reciprocal is finite
SCALE = torch.float32
WIRE = torch.uint8  # what travels

# The largest code.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The error of an element is at most so much of the largest magnitude in its block, apart from the
# rounding of fp32: half the distance of two codes, at its largest.
ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16.0 / 448}


# What an op's arguments call them; "" for what travels as it is.
NAMES = {None: "", torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn"}
CODES = {name: codes for codes, name in NAMES.items()}


def gathers_bytes(specs: Sequence[ParamSpec]) -> bool:
    """Whether a bucket of these is gathered as bytes."""
    return specs[0].group_size > 1 and any(spec.gather_quantized for spec in specs)


def reduces_bytes(specs: Sequence[ParamSpec]) -> bool:
    """Whether gradients of these are sent to their ranks as bytes."""
    is_sent = specs[0].group_size > 1 and specs[0].sync != "retain"
    return is_sent and any(spec.reduce_quantized for spec in specs)


def codes_of_gather(specs: Sequence[ParamSpec]) -> list[str]:
    """The names of the codes in which each of these is gathered; [] if they are not as bytes."""
    return [NAMES[s.gather_quantized] for s in specs] if gathers_bytes(specs) else []


def numels_of_gather(specs: Sequence[ParamSpec]) -> list[int]:
    """The elements of each of these in one rank's part of a gather of bytes; [] of elements."""
    return [s.shard_numel for s in specs] if gathers_bytes(specs) else []


def codes_of_reduction(specs: Sequence[ParamSpec]) -> list[str]:
    """The names of the codes in which each of these is reduced; [] if they are not as bytes."""
    return [NAMES[s.reduce_quantized] for s in specs] if reduces_bytes(specs) else []


def payload(numel: int, dtype: torch.dtype, codes: torch.dtype | None) -> int:
    """Bytes that `numel` elements of `dtype` take on the wire; `codes` None: as they are."""
    num_bytes = (
        numel * dtype.itemsize if codes is None else -(-numel // BLOCK) * (BLOCK + SCALE.itemsize)
    )
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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
