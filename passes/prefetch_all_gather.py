"""Start each all-gather `plan.prefetch` buckets before the one it is needed for.

Before:

    %a0 = all_gather(%flat0)
    %w0 = wait(%a0)
    ... compute with %w0 ...
    %a1 = all_gather(%flat1)
    %w1 = wait(%a1)

After, with prefetch=1:

    %a0 = all_gather(%flat0)
    %a1 = all_gather(%flat1)
    %w0 = wait(%a0)
    ... compute with %w0 ...
    %w1 = wait(%a1)

Requires: a lowered graph.
Ensures: the n-th all-gather, with what prepares its input, stands before the wait of the (n - prefetch)-th; the order of
    all-gathers is unchanged.
Leaves alone: an all-gather whose input is computed from anything but graph inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.graph import move_before, order
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def prefetch_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = [r for r in find_regions(gm.graph, "gather") if r.starts]
    if not plan.prefetch:
        return gm
    for start, anchor in decide(regions, plan.prefetch):
        position = order(gm.graph)
        moved = _preparation(start)
        if all(n.op == "placeholder" or position[n] < position[anchor] for n in _inputs(moved)):
            move_before([n for n in moved if position[n] > position[anchor]], anchor)
    return gm


def decide(regions: list[Region], prefetch: int) -> list[tuple[Node, Node]]:
    """Pairs (start, the wait it goes before), in order."""
    pairs = []
    for i, region in enumerate(regions):
        anchor = regions[max(0, i - prefetch)].waits[0]
        pairs.append((region.starts[0], anchor))
    return pairs


def _preparation(start: Node) -> list[Node]:
    """The start and what computes its input from graph inputs, in order."""
    found: list[Node] = [start]
    for node in found:
        found.extend(n for n in node.all_input_nodes if n.op != "placeholder" and n not in found)
    position = order(start.graph)
    return sorted(found, key=lambda n: position[n])


def _inputs(nodes: list[Node]) -> list[Node]:
    inside = set(nodes)
    return [n for node in nodes for n in node.all_input_nodes if n not in inside]
