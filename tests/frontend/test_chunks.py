"""`in_chunks`: rows in pieces, and their results together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_fsdp import in_chunks

X, Y = torch.randn(7, 3), torch.arange(7)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 9])
def test_as_whole(num_chunks: int) -> None:
    """Also where some pieces are empty."""
    seen: list[int] = []

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return x + y[:, None], y * 2

    found = in_chunks(both, num_chunks, X, Y)
    assert isinstance(found, tuple)
    assert all(map(torch.equal, found, both(X, Y)))
    assert seen[:-1] == [7 // num_chunks + (i < 7 % num_chunks) for i in range(num_chunks)]
    assert torch.equal(in_chunks(lambda x: x.relu(), num_chunks, X), X.relu())


@pytest.mark.parametrize(
    ("num_chunks", "rows", "fn", "said"),
    [
        (0, [X], torch.neg, "num_chunks=0; should be a number of pieces, at least 1"),
        (True, [X], torch.neg, "num_chunks=True"),
        (2, [], torch.neg, "have shapes []; give at least one"),
        (2, [X, Y[:6]], torch.add, "have shapes [(7, 3), (6,)]"),
        (2, [X, X.sum()], torch.add, "have shapes [(7, 3), ()]"),
        (2, [X], torch.sum, "fn returned () for a piece of 4 rows"),
        (2, [X], lambda x: (x, len(x)), "fn returned int for a piece of 4 rows"),
        (2, [X], lambda x: x[1:], "fn returned (3, 3) for a piece of 4 rows"),
    ],
)
def test_refused(num_chunks: int, rows: list[Tensor], fn: Any, said: str) -> None:
    error = TypeError if said.startswith("fn") else ValueError
    with pytest.raises(error, match="^in_chunks: .*" + re.escape(said)):
        in_chunks(fn, num_chunks, *rows)
