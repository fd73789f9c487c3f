"""Graphs that a graph calls by `invoke_subgraph`: those of units that compute the same, and regions
that are compiled once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Graph, Node

INVOKE = torch.ops.higher_order.invoke_subgraph
# How the names of our subgraphs begin; users may have others. AOTAutograd and the partitioner put
# words before that of a unit.
REGION, UNIT = "fsdp_region_", "fsdp_unit_"


def called_by(call: Node) -> Graph | None:
    """The subgraph of ours that a node calls; None if it calls none."""
    if call.target is not INVOKE:
        return None
    name = str(call.args[1])
    return _graph(call) if name.startswith(REGION) or UNIT in name else None


def unit_called_by(call: Node) -> Graph | None:
    """Likewise, of units alone (`frontend/equal_units.py`)."""
    return _graph(call) if call.target is INVOKE and UNIT in str(call.args[1]) else None


def _graph(call: Node) -> Graph:
    graph: Graph = getattr(call.graph.owning_module, str(call.args[0].target)).graph  # type: ignore[union-attr]
    return graph


def with_inside(graph: Graph) -> Iterator[Node]:
    """Yields the nodes of a graph, and behind each call of a unit those that it calls."""
    for node in graph.nodes:
        yield node
        if (body := unit_called_by(node)) is not None:
            yield from body.nodes
