"""The table in the documentation is what the tests say."""

from __future__ import annotations

from compat.table import DOCUMENT, MEANINGS, absent, marks, specification, statuses, text


def test_every_row_is_accounted_for() -> None:
    ids = [row for row, *_ in specification()]
    assert len(ids) == len(set(ids)) == 244
    assert set(marks()) <= set(ids)
    assert set(absent()) <= set(ids) - set(marks())
    assert {row: s for row, (s, _, _) in statuses().items() if s not in MEANINGS} == {}


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == text(), "run: python tests/compat/table.py"
