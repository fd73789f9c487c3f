"""Private torch: what Inductor pads. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph


def then_mark(mark_ours: Callable[[Graph], None]) -> None:
    """Let a function mark which values of a graph Inductor must not pad, once for all.

    On a device it pads rows of over 1,024 elements to 128 bytes, and copies them for who needs them
    in one piece. Its own marks go on to all that such a value is computed from, whose padding is of
    use: so ours are set behind them, before anything is lowered.
    """
    from torch._inductor import graph as lowering  # more than a second: only if Inductor compiles

    found: Any = lowering
    mark = found.mark_nodes_dislike_padding
    if hasattr(mark, "__wrapped__"):
        return

    @functools.wraps(mark)
    def mark_ours_too(graph: Graph, *args: Any) -> None:
        mark(graph, *args)
        mark_ours(graph)

    found.mark_nodes_dislike_padding = mark_ours_too
