"""Words of errors, and warnings that are given once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def named(thing: object) -> str:
    """An object for an error: its class, and a short text of it unless it is long."""
    text = repr(thing)
    kind = type(thing).__name__
    return kind if len(text) > 60 or "\n" in text else f"{kind} {text}"


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]


_said: set[str] = set()


def warn_once(text: str, about: str = "") -> None:
    """Warn, the first time this text, or any text about the same, comes up in this process."""
    key = about or text
    if key not in _said:
        _said.add(key)
        warnings.warn(text, stacklevel=3)
