"""Texts of collectives that mean the same, though a rank does not know every size."""

from __future__ import annotations

import pytest

from compiled_fsdp.ir.sequence import same_where_known

ONE = "a forward graph of 2 collectives\nall_gather of 4 x f32: u\nall_reduce of 8 x f32: mine"


@pytest.mark.parametrize(
    ("texts", "is_same"),
    [
        ([ONE], True),
        ([ONE, ONE.replace("of 8", "of ?")], True),
        ([ONE, ONE.replace("of 8", "of ?"), ONE.replace("of 8", "of 9")], False),
        ([ONE, ONE.replace("of 8", "of 9")], False),
        ([ONE.replace("of 8", "of ?"), ONE.replace("all_reduce", "all_gather")], False),
        ([ONE, ONE + "\nall_reduce of ? x f32: mine"], False),
        ([ONE, ONE.replace("of 8 x", "of ? + 3 x")], False),
    ],
)
def test_sizes_that_only_some_ranks_know(texts: list[str], is_same: bool) -> None:
    assert same_where_known(texts) == is_same
