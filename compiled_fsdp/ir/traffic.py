"""Memory traffic of generated kernels: what computation reads and writes if all of it that reads
the same value is one kernel.

That is the best that Inductor may do: a measure by which to compare two places for a node. It does
not know that products stand in between.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from .fusion import is_generated, readers
from .storage import may_alias, num_bytes, read_first, storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from torch.fx import Node


def is_cheap(node: Node) -> bool:
    """Whether Inductor generates the kernel that computes a value, or it needs none."""
    if node.target is operator.getitem:
        return is_cheap(read_first(node))
    return is_generated(node)


def kernel_traffic(nodes: Set[Node]) -> int:
    """Returns the bytes that generated kernels read and write when they compute nodes: each reads
    once what others have made, and writes what others read.
    """
    read: dict[Node, int] = {}
    written = 0
    for node in nodes:
        if may_alias(node) or not is_cheap(node):
            continue
        for each in node.all_input_nodes:
            root = storage_of(each)
            if root not in nodes or not is_cheap(root):
                read[root] = max(read.get(root, 0), min(num_bytes(each), num_bytes(root)))
        if any(reader not in nodes or not is_cheap(reader) for reader in readers(node)):
            written += num_bytes(node)
    return sum(read.values()) + written


def saved_by_moving(moved: Set[Node], here: Set[Node], there: Set[Node]) -> int:
    """Returns the bytes of traffic that are saved if some nodes of one set are computed with those
    of another; negative if it is more.
    """
    before = kernel_traffic(here) + kernel_traffic(there)
    return before - kernel_traffic(here - moved) - kernel_traffic(there | moved)


def left_behind(nodes: Set[Node]) -> int:
    """Bytes of the values that nodes compute and others read."""
    roots = {storage_of(node) for node in nodes if any(u not in nodes for u in node.users)}
    return sum(num_bytes(root) for root in roots if root in nodes)


def connected(nodes: Iterable[Node]) -> list[set[Node]]:
    """Those that read each other, directly or through others of them, together."""
    found: list[set[Node]] = []
    for node in nodes:
        near = {node, *node.all_input_nodes, *node.users}
        joined = {node}.union(*(group for group in found if group & near))
        found = [group for group in found if not group & near] + [joined]
    return found
