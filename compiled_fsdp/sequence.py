"""A graph's collectives as text, and the node that compares them between ranks when the graph first runs (`agreement.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .graph import Builder, is_backward, placeholders, starts, value
from .meta import get_tag
from .schema import AGREE

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def sequence(graph: Graph) -> tuple[str, list[str]]:
    """One line a collective, in order, and the groups.

    Structure only: ranks must not differ for the names of symbols, groups or units in their process.
    """
    groups: dict[str, str] = {}
    lines = []
    for node in starts(graph):
        name = str(node.args[-2] if isinstance(node.args[-1], str) and ":" in node.args[-1] else node.args[-1])
        label = groups.setdefault(name, f"group {len(groups)}")
        sent = value(node.all_input_nodes[0])
        size = sent.numel() if isinstance(sent.numel(), int) else "?"
        lines.append(f"{node.target._opname} of {size} x {sent.dtype} over {label}{_owner(node)}")  # type: ignore[union-attr]
    kind = "backward" if is_backward(graph) else "forward"
    return "\n".join([f"a {kind} graph of {len(lines)} collectives", *lines]), list(groups)


def _owner(node: Node) -> str:
    tag = get_tag(node)
    if tag is None:
        return ""
    return f": {tag.unit.split('#')[0]} ({', '.join(s.fqn for s in tag.specs)})"


def add_agreement(graph: Graph) -> None:
    """Begin a graph that communicates for us with the comparison; its argument travels with the compiled code."""
    tensors = [n for n in placeholders(graph) if isinstance(n.meta.get("val"), torch.Tensor)]
    if not tensors or not any(get_tag(node) is not None for node in starts(graph)):
        return
    text, groups = sequence(graph)
    first = next(n for n in graph.nodes if n.op != "placeholder")
    run = Builder(first, first)
    token = run(torch.ops.aten.new_empty.default, tensors[0], [1], dtype=torch.uint8)
    run(AGREE, token, text, groups)
