"""The tables in the documentation are what the tests say."""

from __future__ import annotations

import pytest
from kit.table import FRONTS, MEANINGS, Front, absent, marks, specification, statuses, text

ROWS = {"fsdp2": 267, "fsdp1": 191}


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.name)
def test_every_row_is_accounted_for(front: Front) -> None:
    ids = [row for row, *_ in specification(front)]
    assert len(ids) == len(set(ids)) == ROWS[front.name]
    assert set(marks(front)) <= set(ids)
    assert set(absent(front)) <= set(ids) - set(marks(front))
    assert {row: s for row, (s, _, _) in statuses(front).items() if s not in MEANINGS} == {}


@pytest.mark.parametrize("front", FRONTS, ids=lambda front: front.name)
def test_the_document_is_up_to_date(front: Front) -> None:
    assert front.document.read_text() == text(front), "run: python tests/kit/table.py"
