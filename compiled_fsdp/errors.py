"""The error for a broken graph, and warnings that are given once."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


class GraphInvariantError(RuntimeError):
    """A pass, or a graph written by hand, broke a rule that the rest of the compiler relies on."""

    def __init__(self, where: str, invariant: str, detail: str, node: Node | None = None) -> None:
        from compiled_fsdp.dump.writer import around

        place = f"\n{around(node)}" if node is not None else ""
        super().__init__(
            f"after {where}: {detail}.\nInvariant: {invariant}\n"
            f"This is a bug in the pass named above, or in a pass added to the pipeline.{place}"
        )
        self.where, self.invariant, self.node = where, invariant, node


def named(thing: object) -> str:
    """An object for an error: its class, and a short text of it unless it is long."""
    text = repr(thing)
    kind = type(thing).__name__
    return kind if len(text) > 60 or "\n" in text else f"{kind} {text}"


_said: set[str] = set()


def warn_once(text: str, about: str = "") -> None:
    """Warn, the first time this text, or any text about the same, comes up in this process."""
    key = about or text
    if key not in _said:
        _said.add(key)
        warnings.warn(text, stacklevel=3)
