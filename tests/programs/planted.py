"""Faults that were mended once, planted again: the generator must find each of them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {}


def planted(name: str) -> contextlib.AbstractContextManager[object]:
    """Ours with that fault; nothing for ""."""
    return PLANTS[name]() if name else contextlib.nullcontext()
