"""Where some ranks are in a graph and others are not: those that are leave it, before it has done
anything.

A branch that depends on the rank and that Dynamo cannot trace (`if rank == 0: print(x)`) breaks the
graph on one rank alone. Units are gathered one by one there, and in buckets in the other ranks'
graph. The comparison before the first collective finds that (`agreement.py`). A graph that has run
nothing yet can still be left: its module is called again, eagerly. Who leaves follows from the
texts, which all ranks see, so that nobody has to be asked; then all compare again. A rank that
should leave and cannot, since its graph is under way or other Python code has run before it, says
so, and all raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

OUTSIDE = "outside a graph"  # the end of the first line of an eager unit's text
REDUCING = "in an eager backward"  # likewise, of one that is about to reduce gradients
FORWARD = "a forward graph of "  # how a graph's begins (`ir/sequence.py`)
STAYS = "a graph that cannot be left any more"

# Why the graph that now runs cannot be left for the ranks of a group, or ""; set by those who call
# modules.
why_stays: Callable[[dist.ProcessGroup], str] = lambda _: "nobody can call it again"  # noqa: E731


class LeftGraph(Exception):  # nothing is wrong yet
    """Raised through a graph that has done nothing: its module is to be called again, eagerly.

    ranks: those that are not in this graph.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} are not in this graph")
        self.ranks = list(ranks)


def outside(unit: str, names: str) -> str:
    """The text of a unit that is about to gather these parameters outside a graph."""
    return f"unit {unit} {OUTSIDE}\ngather of {names}"


def reduction(unit: str, names: str) -> str:
    """The text of a unit that is about to reduce these gradients outside a graph."""
    return f"unit {unit} {REDUCING}\nreduction of {names}"


def is_outside(text: str) -> bool:
    """Whether the text is of a unit outside a graph."""
    return text.partition("\n")[0].endswith(OUTSIDE)


def is_reduction(text: str) -> bool:
    """Whether the text is of gradients that are about to be reduced outside a graph."""
    return text.partition("\n")[0].endswith(REDUCING)


def leavers(texts: Sequence[str]) -> list[int]:
    """Of the ranks with these texts (those that are missing are ""), the ones that are to leave
    their graphs: all that are in one, if the others run a unit outside.
    """
    known = [text for text in texts if text]
    in_graph = [rank for rank, text in enumerate(texts) if text.startswith(FORWARD)]
    num_outside = sum(map(is_outside, known))
    return in_graph if num_outside and len(in_graph) + num_outside == len(known) else []
