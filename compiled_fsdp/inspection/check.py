"""Read JSON that others wrote: a clear error that names the file, instead of a surprise further
down.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin, get_type_hints, is_typeddict

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


class DumpError(ValueError):
    """A folder is no dump, a file of one, or a profile, is missing, garbled or of another version,
    or something is asked for that it does not hold.
    """


def read(path: Path, doing: str) -> str:
    """The text in a file, which may be compressed by gzip.

    Raises:
        DumpError: it cannot be read, or is no text; names the file.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DumpError(
            f"{doing}: {path} cannot be read as text: {error}; dump again, or leave it out"
        ) from error


def load(path: Path, doing: str) -> Any:
    """The JSON in a file, which may be compressed by gzip.

    Raises:
        DumpError: it cannot be read, or is no JSON; names the file.
    """
    text = read(path, doing)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise DumpError(
            f"{doing}: {path} is no JSON: {error}; it is cut off or garbled: write it again"
        ) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


@cache
def _fields(form: type) -> dict[str, Any]:
    return get_type_hints(form)


class Check:
    """Whether JSON is of a type: a TypedDict (whose keys must be there, others may), a list, a dict
    with names for keys, a tuple (a list of this length), null or something, or a plain value.
    """

    def __init__(self, path: Path, doing: str) -> None:
        self.path, self.doing = path, doing

    def __call__(self, value: Any, form: Any, where: str = "") -> None:
        """Raise a DumpError that names the file and the place unless the value is of the type."""
        inside = {dict: self._dict, list: self._list, tuple: self._tuple, UnionType: self._or}
        if form in NAMES:
            self._is(value, form, where)
        elif is_typeddict(form):
            self._fields(value, _fields(form), where)
        elif form is not Any:
            inside[get_origin(form)](value, get_args(form), where)

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

    def _fields(self, value: Any, fields: dict[str, Any], where: str) -> None:
        self._is(value, dict, where)
        for name, form in fields.items():
            if name not in value:
                self.fail(f"{where or 'the top'} has no {name!r}")
            self(value[name], form, f"{where}.{name}".lstrip("."))

    def _dict(self, value: Any, forms: tuple[Any, ...], where: str) -> None:
        self._is(value, dict, where)
        for name, entry in value.items():
            self(entry, forms[1], f"{where}.{name}".lstrip("."))

    def _list(self, value: Any, forms: tuple[Any, ...], where: str) -> None:
        self._is(value, list, where)
        for index, entry in enumerate(value):
            self(entry, forms[0], f"{where}[{index}]")

    def _or(self, value: Any, forms: tuple[Any, ...], where: str) -> None:
        if value is not None:
            self(value, next(form for form in forms if form is not NoneType), where)

    def _tuple(self, value: Any, forms: tuple[Any, ...], where: str) -> None:
        self._is(value, list, where)
        if len(value) != len(forms):
            self.fail(f"{where} has {len(value)} columns, should have {len(forms)}")
        for entry, form in zip(value, forms, strict=True):
            self(entry, form, where)

    def _is(self, value: Any, kind: type, where: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and math.isfinite(value) if kind is float else isinstance(value, kind)
        if not fits or (kind is int and isinstance(value, bool)):
            self.fail(f"{where or 'the top'} is {str(value)[:60]!r}, should be {NAMES[kind]}")
