"""The layout of a dump is said once: names of files in `dump/layout.py`, and types that the reader
checks JSON by.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from kit.rooms import files, tree

from compiled_fsdp.dump import layout
from compiled_fsdp.dump.layout import Measured, MeasuredStep, Times
from compiled_fsdp.inspection.check import Check, DumpError

NAMES = {
    value
    for name, value in vars(layout).items()
    if name.isupper() and isinstance(value, str) and "." in value
}


def test_no_other_file_names_a_file_of_a_dump() -> None:
    assert {"timeline.json.gz", "settings.json", ".json.gz"} <= NAMES
    found = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path in files()
        if path != Path(layout.__file__)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]
    assert found == []


TIMES = {"issued": 0, "issuing": 0.5, "begin": 1, "end": 2.0, "awaited": None, "exposed": 0}
STEP = {
    **dict.fromkeys(("began", "total", "waiting", "starting", "compiling"), 1.0),
    **{"largest": None, "parts": [], "waits": [[0, 1.5, "gather"]], "starts": [], "notes": []},
}


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (TIMES, Times),
        ({**TIMES, "awaited": 3, "more": "is let through"}, Times),
        (STEP, MeasuredStep),
        ({**STEP, "largest": ["gather", 0.5]}, MeasuredStep),
        ({"format": 3, "source": "", "graphs": {}, "step": STEP}, Measured),
        ({"a": [1, 2]}, dict[str, list[int]]),
        ([None, {}, "x"], list[Any]),
    ],
)
def test_json_of_a_type(value: object, form: object) -> None:
    Check(Path("file.json"), "reading")(value, form)


@pytest.mark.parametrize(
    ("value", "form", "says"),
    [
        ({**TIMES, "end": "1"}, Times, "end is '1', should be a number"),
        ({**TIMES, "end": True}, Times, "end is 'True', should be a number"),
        ({**TIMES, "awaited": "never"}, Times, "awaited is 'never', should be a number"),
        ({"issued": 0}, Times, "the top has no 'issuing'"),
        ({**STEP, "notes": ["a", 1]}, MeasuredStep, r"notes\[1\] is '1', should be text"),
        ({**STEP, "waits": [[0, 1]]}, MeasuredStep, r"waits\[0\] has 2 columns, should have 3"),
        ({**STEP, "waits": [[0, 1, 2]]}, MeasuredStep, r"waits\[0\] is '2', should be text"),
        ({**STEP, "largest": {}}, MeasuredStep, r"largest is '\{\}', should be a list"),
        ({"a": [1, 2.5]}, dict[str, list[int]], r"a\[1\] is '2.5', should be an integer"),
        ([], dict[str, Any], r"the top is '\[\]', should be an object"),
    ],
)
def test_json_of_another_type(value: object, form: object, says: str) -> None:
    with pytest.raises(DumpError, match=f"reading: file.json: {says}; it is garbled"):
        Check(Path("file.json"), "reading")(value, form)
