"""Read JSON that others wrote: a clear error that names the file, instead of a surprise further
down.
"""

from __future__ import annotations

import gzip
import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = (int, float)
NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    NUMBER: "a number",
}


class DumpError(ValueError):
    """A file of a dump, or a profile, is missing, garbled or of another version."""


def load(path: Path, doing: str) -> Any:
    """The JSON in a file, which may be compressed by gzip.

    Raises:
        DumpError: it cannot be read, or is no JSON; names the file.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()
        return json.loads(text, parse_constant=_no_constant)
    except (OSError, EOFError) as error:
        raise DumpError(
            f"{doing}: {path} cannot be read: {error}; dump again, or leave it out"
        ) from error
    except ValueError as error:
        raise DumpError(
            f"{doing}: {path} is no JSON: {error}; it is cut off or garbled: write it again"
        ) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class Check:
    """Whether a value has a shape, given as an example of types: `{"a": NUMBER}`, `[str]` (a list
    of), `(str, None)` (or null).

    Keys that are not asked for are let through.
    """

    def __init__(self, path: Path, doing: str) -> None:
        self.path, self.doing = path, doing

    def __call__(self, value: Any, shape: Any, where: str = "") -> None:
        """Raise a DumpError that names the file and the place unless the value has the shape."""
        if isinstance(shape, dict):
            self._is(value, dict, where)
            for key, inner in shape.items():
                if key not in value:
                    self.fail(f"{where or 'the top'} has no {key!r}")
                self(value[key], inner, f"{where}.{key}".lstrip("."))
        elif isinstance(shape, list):
            self._is(value, list, where)
            for index, entry in enumerate(value):
                self(entry, shape[0], f"{where}[{index}]")
        elif isinstance(shape, tuple) and shape != NUMBER:
            if value is not None:
                self(value, shape[0], where)
        else:
            self._is(value, shape, where)

    def same_length(self, where: str, *lists: list[Any]) -> None:
        """Raise unless lists that belong together are equally long."""
        if len({len(entries) for entries in lists}) > 1:
            self.fail(
                f"{where} have {' and '.join(str(len(entries)) for entries in lists)} entries, "
                "should be the same number"
            )

    def fail(self, what: str) -> NoReturn:
        """Raise, naming the file."""
        raise DumpError(
            f"{self.doing}: {self.path}: {what}; it is garbled or of another version: write it "
            "again"
        )

    def _is(self, value: Any, kind: Any, where: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = (is_number and math.isfinite(value)) if kind == NUMBER else isinstance(value, kind)
        if not fits or (kind is int and isinstance(value, bool)):
            self.fail(f"{where or 'the top'} is {str(value)[:60]!r}, should be {NAMES[kind]}")
