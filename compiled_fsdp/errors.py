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


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Names as a list that ends after three: "['a', 'b', 'c'] and 9 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{list(names[:most])}{more}"


_said: set[str] = set()


def warn_once(text: str, about: str = "") -> None:
    """Warn, the first time this text, or any text about the same, comes up in this process."""
    key = about or text
    if key not in _said:
        _said.add(key)
        warnings.warn(text, stacklevel=3)
