"""Communications in a lowered graph: which nodes make up one, where it comes from and what it
yields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from . import meta
from .collectives import STARTS, WAIT
from .graph import is_backward, value
from .schema import REDUCE_LATER
from .spec import AGAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx import Graph, Node

    from .spec import ParamSpec


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes of one communication, in graph order."""

    tag: meta.CommTag
    nodes: tuple[Node, ...]
    is_of_backward: bool  # the graph

    @property
    def spec(self) -> ParamSpec:
        """The spec of the only parameter, or of the first."""
        return self.tag.specs[0]

    @property
    def is_in_backward(self) -> bool:
        """Whether this is for backward: in a backward graph, or gathered again in that of a whole
        step.
        """
        return self.spec.reshard == AGAIN or self.is_of_backward

    @property
    def source(self) -> Node:
        """Returns what an unbucketed communication communicates: the first value that it reads; a
        flat buffer may follow.
        """
        return self.sources[0]

    @property
    def sources(self) -> tuple[Node, ...]:
        """Returns what it reads, in order of first reading."""
        inside = set(self.nodes)
        found = dict.fromkeys(
            n for node in self.nodes for n in node.all_input_nodes if n not in inside
        )
        return tuple(found)

    @property
    def result(self) -> Node:
        """Returns what an unbucketed communication yields: its last node."""
        return self.nodes[-1]

    @property
    def starts(self) -> tuple[Node, ...]:
        """The nodes that start a collective."""
        return tuple(n for n in self.nodes if n.target in STARTS)

    @property
    def waits(self) -> tuple[Node, ...]:
        """The nodes that wait for one."""
        return tuple(n for n in self.nodes if n.target is WAIT)

    @property
    def is_left_in_flight(self) -> bool:
        """Whether the unit awaits this reduction, since the graph does not."""
        return any(node.target is REDUCE_LATER for node in self.nodes)

    @property
    def sent_bytes(self) -> int:
        """The bytes that its first collective sends, this rank's part included: alive until it is
        awaited; 0 if it starts none.
        """
        return sum(value(n).nbytes for start in self.starts[:1] for n in start.all_input_nodes)


def find_regions(graph: Graph, kind: str) -> list[Region]:
    """Communications of a kind ("gather" or "reduce"), in the order of their first nodes."""
    found: dict[int, list[Node]] = {}
    tags: dict[int, meta.CommTag] = {}
    for node in graph.nodes:
        tag = meta.get_tag(node)
        if tag is not None and tag.kind == kind:
            found.setdefault(tag.region, []).append(node)
            tags[tag.region] = tag
    is_of_backward = is_backward(graph)
    return [Region(tags[number], tuple(nodes), is_of_backward) for number, nodes in found.items()]


def together(units: Iterable[T], size: Callable[[T], float], limit: float) -> list[list[T]]:
    """Neighbours together while they are no larger than the limit; what is larger stays alone."""
    found: list[list[T]] = []
    total = 0.0
    for unit in units:
        total += size(unit)
        if found and total <= limit:
            found[-1].append(unit)
        else:
            found.append([unit])
            total = size(unit)
    return found
