"""How much a graph communicates, before and after a pass: a line of the log, and of a
comparison of dumps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find, is_heavy, starts
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import FREE, traits_of

if TYPE_CHECKING:
    from torch.fx import Graph


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers that a log line about a pass compares.

    places: for each start and wait of a collective, how many matmuls stand before it.
    """

    nodes: int
    gathers: int
    reductions: int
    frees: int
    places: dict[str, int]

    @classmethod
    def of(cls, graph: Graph) -> Counts:
        """Counts a graph, before or after lowering."""
        places: dict[str, int] = {}
        heavy = 0
        kept = {*starts(graph)}
        for node in graph.nodes:
            heavy += is_heavy(node)
            if node in kept or node.target is WAIT:
                places[node.name] = heavy
        unlowered = [traits_of(node.target).lowers_to for node in graph.nodes]
        gathers, reductions = (
            unlowered.count(kind) + sum(bool(r.starts) for r in find_regions(graph, kind))
            for kind in ("gather", "reduce")
        )
        return cls(len(graph.nodes), gathers, reductions, len(find(graph, FREE)), places)

    def changes(self, after: Counts) -> str:
        """Says in words what is different in `after`."""
        named = (
            ("nodes", "nodes"),
            ("all-gathers", "gathers"),
            ("reductions", "reductions"),
            ("frees", "frees"),
        )
        found = [
            f"{text} {getattr(self, name)} -> {getattr(after, name)}"
            for text, name in named
            if getattr(self, name) != getattr(after, name)
        ]
        moved = sum(place != after.places.get(name, place) for name, place in self.places.items())
        if moved:
            found.append(f"{moved} of {len(after.places)} starts and waits moved past matmuls")
        return ", ".join(found) or "no change"
