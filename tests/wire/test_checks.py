"""Checksums: every bit counts, places count, and how a part lies in memory does not."""

from __future__ import annotations

import pytest
import torch
from kit.bit_flips import flip

from compiled_fsdp.wire.checks import CHUNK, checksum, checksums, difference

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64, torch.bool)
SIZES = (1, 3, 8, 511, 2 * CHUNK + 2, 4 * CHUNK + 5)


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_every_bit_counts(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    part = values(numel, dtype)
    before = checksum(part.view(1, -1)).item()
    num_bits = 8 * part.nbytes
    for bit in {0, 1, num_bits // 2, num_bits - 1, *torch.randint(0, num_bits, (40,)).tolist()}:
        flip(part, bit)
        assert checksum(part.view(1, -1)).item() != before, bit
        flip(part, bit)
    assert checksum(part.view(1, -1)).item() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[5, 1024, 3], [2048, 4096], [1, 1, 1]])
def test_the_same_sums_wherever_it_lies(dtype: torch.dtype, sizes: list[int]) -> None:
    """A sender's part, in a table with others' rows, message by message, and piece by piece."""
    torch.manual_seed(0)
    total = sum(sizes)
    parts = [values(total, dtype) for _ in range(3)]
    alone = torch.cat([checksums([part], 1, [total], sizes) for part in parts])
    assert torch.equal(alone, checksums([torch.cat(parts)], 3, [total], sizes))
    pieces = [torch.stack(piece) for piece in zip(*(p.split(sizes) for p in parts), strict=True)]
    assert torch.equal(alone, checksums(pieces, 3, sizes, sizes))
    buffer = torch.cat([piece.flatten() for piece in pieces])
    assert torch.equal(alone, checksums([buffer], 3, sizes, sizes))
    shifted = torch.cat([parts[0][:1], parts[1]])[1:]
    assert torch.equal(alone[1:2], checksums([shifted], 1, [total], sizes))


def test_places_count() -> None:
    part = torch.arange(8 * CHUNK, dtype=torch.int64)
    swapped = torch.cat([part[CHUNK : 2 * CHUNK], part[:CHUNK], part[2 * CHUNK :]])
    assert checksum(part[None]) != checksum(swapped[None])


@pytest.mark.parametrize("top", [0, 63])
@pytest.mark.parametrize("size", [2, 4])
def test_differences_of_all_ranks_add_up_to_zero(size: int, top: int) -> None:
    """Also where a sender has told all the same wrong sum, in whichever bit."""
    torch.manual_seed(1)
    sent = torch.randint(-(2**62), 2**62, (size, size, 3))  # by whom, to whom
    received = sent.transpose(0, 1).clone()

    def total() -> list[int]:
        return sum(difference(sent[r], received[r], r) for r in range(size)).tolist()  # type: ignore[union-attr]

    assert total() == [0, 0, 0]
    one = -(2**63) if top == 63 else 1
    received[1, 0, 2] ^= one
    assert [value != 0 for value in total()] == [False, False, True]
    received[1, 0, 2] ^= one
    sent[0, :, 1] ^= one
    assert [value != 0 for value in total()] == [False, True, False]
    sent[0, :, 1] ^= one
    sent[[0, 1]] = sent[[1, 0]]
    assert all(total())
