"""Calls of sharded modules that are under way."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType, FrameType

CALLS: set[CodeType] = set()  # `__call__` of the classes of sharded modules


def innermost() -> tuple[Any, list[CodeType]]:
    """The sharded module whose call, outside any graph, is the innermost of those under way, or
    None; and the code of what it has called, from the innermost frame out.
    """
    frame: FrameType | None = sys._getframe()
    inside: list[CodeType] = []
    while frame is not None and not any(frame.f_code is code for code in CALLS):
        inside.append(frame.f_code)
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"], inside
