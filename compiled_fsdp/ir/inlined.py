"""Values that a span may compute again instead of reading what other spans have computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .graph import is_view
from .meta import get_tag
from .storage import CASTS, is_read_from, may_alias, num_bytes, storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from torch.fx import Node

    from .spans import Span

MOST_INLINED = 32  # nodes that a span computes again


def inlined_into(span: Span, home: Mapping[Node, Span], written: Set[Node]) -> list[Node]:
    """Returns the cheap nodes of other spans that a span may compute again instead of reading what
    they yield, in graph order, where what they read takes no more bytes, at no time.

    home: the span of each node of one.
    written: values that something writes to.
    """

    def may_be_copied(node: Node) -> bool:
        return node in home and home[node] is not span and _is_inlinable(node)

    def not_copied(node: Node) -> bool:
        return not may_be_copied(node)

    def is_in_memory(node: Node) -> bool:
        return not_copied(node) or home[node].is_read_outside(node)

    read = {storage_of(n) for n in span.inputs}
    found: set[Node] = set()
    for node in span.inputs:
        root = storage_of(node)
        if not may_be_copied(node) or not may_be_copied(root) or _is_read_beside(root, span, home):
            continue
        # as far back as possible, or else to what is in memory anyway
        for ends in (not_copied, is_in_memory):
            copied, sources = _computed_from(node, read - {root}, ends)
            more = sources - read
            if (
                len(found | copied) <= MOST_INLINED
                and all(get_tag(each) is None for each in sources)
                and not sources & written
                and all(is_read_from(home[root].nodes[0], each) for each in more)
                and sum(map(num_bytes, more)) <= num_bytes(root)
            ):
                found |= copied
                read |= more
                break
    return sorted(found)


def _computed_from(
    node: Node, known: set[Node], ends: Callable[[Node], bool]
) -> tuple[set[Node], set[Node]]:
    """Returns what computes a node, back to where it ends or is known, and the values in whose
    storage that is.
    """
    found: set[Node] = set()
    sources: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        for each in node.all_input_nodes:
            if storage_of(each) in known or ends(each):
                sources.add(storage_of(each))
            else:
                stack.append(each)
    return found, sources


def _is_inlinable(node: Node) -> bool:
    """Whether a node is cheap to compute, and belongs to no communication."""
    op: Any = node.target
    return (
        isinstance(op, torch._ops.OpOverload)
        and (is_view(node) or torch.Tag.pointwise in op.tags or op in CASTS)
        and get_tag(node) is None
    )


def _is_read_beside(root: Node, span: Span, home: Mapping[Node, Span]) -> bool:
    """Whether anything but a span, and the one that computes it, reads a value or a view of it."""
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if may_alias(user) and user not in span.inside:
                stack.append(user)
            elif home.get(user) not in (span, home.get(root)):
                return True
    return False
