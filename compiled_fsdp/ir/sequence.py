"""A graph's collectives as text, and the node that compares them between ranks when the graph first
runs (`agreement.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .collectives import group_of
from .graph import Builder, is_backward, placeholders, starts, value
from .meta import get_tag, take_record
from .printer import printable
from .schema import AGREE, ALL_GATHER, GATHER_AHEAD

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def sequence(graph: Graph) -> tuple[str, list[str]]:
    """One line a collective, in order, and the groups.

    Structure only: ranks must not differ for the names of symbols, groups or units in their
    process.
    """
    groups: dict[str, str] = {}
    lines = []
    for node in starts(graph):
        label = groups.setdefault(group_of(node), f"group {len(groups)}")
        dtype = value(node.all_input_nodes[0]).dtype
        op = node.target._opname  # type: ignore[union-attr]
        lines.append(f"{op} of {_sizes(node)} x {dtype} over {label}: {owner(node)}")
    kind = "backward" if is_backward(graph) else "forward"
    return "\n".join([f"a {kind} graph of {len(lines)} collectives", *lines]), list(groups)


def sequence_over(graph: Graph, group: str) -> list[str]:
    """The lines of the collectives over one group."""
    lines = sequence(graph)[0].splitlines()[1:]
    return [
        line for node, line in zip(starts(graph), lines, strict=True) if group_of(node) == group
    ]


def _sizes(node: Node) -> str:
    """Elements of each message."""
    if node.target in (ALL_GATHER, GATHER_AHEAD):
        sizes: Any = node.args[1 if node.target is ALL_GATHER else 3]
    else:
        sent: Any = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        sizes = [value(n).numel() for n in sent]
    return " + ".join(str(n) if isinstance(n, int) else "?" for n in sizes)


def owner(node: Node) -> str:
    """The unit and the parameters that a node of a communication carries."""
    tag = get_tag(node)
    if tag is None:
        return "the model's own"
    return printable(f"{tag.unit.split('#')[0]} ({', '.join(s.fqn for s in tag.specs)})")


def add_agreement(graph: Graph) -> None:
    """Begin a graph of ours with the comparison, if it communicates, and its record; both travel
    with the compiled code.
    """
    tensors = [n for n in placeholders(graph) if isinstance(n.meta.get("val"), torch.Tensor)]
    record = take_record(graph.owning_module)  # type: ignore[arg-type]
    communicates = any(get_tag(node) is not None for node in starts(graph))
    if not tensors or not (communicates or record):
        return
    text, groups = sequence(graph) if communicates else ("", [])
    first = next(n for n in graph.nodes if n.op != "placeholder")
    run = Builder(first, first)
    token = run(torch.ops.aten.new_empty.default, tensors[0], [1], dtype=torch.uint8)
    run(AGREE, token, text, groups, record)
