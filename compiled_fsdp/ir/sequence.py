"""A graph's collectives as text, to be compared between ranks (`passes/agree.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .collectives import as_in_torch, group_of
from .graph import phase_of, starts, value
from .meta import get_tag
from .printer import printable

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
        op = as_in_torch(node)[0]._opname
        lines.append(f"{op} of {_sizes(node)} x {dtype} over {label}: {owner(node)}")
    return "\n".join([f"a {phase_of(graph)} graph of {len(lines)} collectives", *lines]), list(
        groups
    )


def sequence_over(graph: Graph, group: str) -> list[str]:
    """The lines of the collectives over one group."""
    lines = sequence(graph)[0].splitlines()[1:]
    return [
        line for node, line in zip(starts(graph), lines, strict=True) if group_of(node) == group
    ]


def _sizes(node: Node) -> str:
    """Elements of each message."""
    op: Any = node.target
    names = [argument.name for argument in op._schema.arguments]
    if "sizes" in names:
        sizes: Any = node.args[names.index("sizes")]
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
