"""Which computation between collectives repeats: layers that compute the same with other
weights.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .graph import is_view
from .schema import COPIES_OUT, TRAITS
from .spans import Span, spans, without_parts_of_writes, yields_dynamic
from .storage import may_alias, read_first
from .subgraphs import unit_called_by

if TYPE_CHECKING:
    from torch.fx import Graph, Node

LEAST_NODES = 8  # that compute, in a span that is worth a call
LEAST_TIMES = 3  # that it occurs


@dataclass(frozen=True, slots=True)
class Repeats:
    """All spans of a graph; of those that are worth a call, groups of equal ones, and those without
    enough equals.

    is_dynamic: whether a value has a size that is not known.
    """

    spans: list[Span]
    groups: list[list[Span]]
    alone: list[Span]
    is_dynamic: bool

    @property
    def why_none(self) -> str:
        """Why there are no groups; "" if there are."""
        if self.groups:
            return ""
        return "dynamic shapes" if self.is_dynamic else f"nothing occurs {LEAST_TIMES} times"

    def why_alone(self, span: Span) -> str:
        """Returns how often a span occurs, if more than once, or how it differs from the group that
        it has most nodes in common with.
        """
        times = sum(other.form == span.form for other in self.alone)
        if times > 1:
            return f"it occurs {times} times, and is called from {LEAST_TIMES} on"
        best, at = max(
            ((g[0], _first_difference(span, g[0])) for g in self.groups),
            key=lambda found: found[1],
            default=(None, 0),
        )
        if best is None:
            return "nothing repeats"
        if at >= len(span.nodes) or at >= len(best.nodes):
            here, there = len(span.nodes), len(best.nodes)
            if at >= here and at >= there:
                return f"others read other results of it than of {best.unit or 'its like'}"
            return f"{here} nodes where {best.unit or 'its like'} has {there}"
        return (
            f"%{span.nodes[at].name} ({span.nodes[at].target}) where {best.unit or 'its like'} "
            f"has %{best.nodes[at].name} ({best.nodes[at].target})"
        )


def find_repeats(graph: Graph) -> Repeats:
    """Returns the repeats of a graph in its final order."""
    groups: dict[Any, list[Span]] = defaultdict(list)
    found = spans(graph)
    for span in found:
        if _is_large(span) and span.is_callable:
            groups[span.form].append(span)
    often = [group for group in groups.values() if len(group) >= LEAST_TIMES]
    often = [_without_parts_of_writes(group, found) for group in often]
    alone = [span for group in groups.values() if len(group) < LEAST_TIMES for span in group]
    return Repeats(found, often, alone, is_dynamic=any(map(yields_dynamic, graph.nodes)))


def _without_parts_of_writes(group: list[Span], among: list[Span]) -> list[Span]:
    """Equal spans without what is part of a write behind them, if that is so of all of them, in
    their place among all spans.
    """
    smaller = [without_parts_of_writes(span) for span in group]
    is_better = (
        all(span.left_out for span in smaller)
        and len({span.form for span in smaller}) == 1
        and all(_is_large(span) and span.is_callable for span in smaller)
    )
    if not is_better:
        return group
    for span, instead in zip(group, smaller, strict=True):
        among[among.index(span)] = instead
    return smaller


def _is_large(span: Span) -> bool:
    """Whether a span computes enough to be worth a call."""
    calls_unit = any(unit_called_by(n) is not None for n in span.nodes)
    return calls_unit or sum(not may_alias(n) for n in span.nodes) >= LEAST_NODES


def widened(group: list[Span]) -> list[Span]:
    """Equal spans with the views that their copies out of a bucket are made of, where these are
    equal too: the bucket goes in instead of a piece for each parameter.
    """
    wider = [Span([*_copied_from(span), *span.nodes]) for span in group]
    is_same = len({span.form for span in wider}) == 1 and all(span.is_callable for span in wider)
    return wider if is_same else group


def _copied_from(span: Span) -> list[Node]:
    """The views that nothing but copies out of buckets reads, of the span, in graph order."""
    found: set[Node] = set()
    for node in span.inputs:
        read = all(user.target in COPIES_OUT and user in span.inside for user in node.users)
        while is_view(node) and node.target not in TRAITS and read:
            found.add(node)
            node = read_first(node)
            read = found.issuperset(node.users)
    return sorted(found)


def _first_difference(one: Span, other: Span) -> int:
    """The place of the first node that is not the same in both."""
    pairs = zip(one.form[0], other.form[0], strict=False)
    fewest = min(len(one.nodes), len(other.nodes))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), fewest)
