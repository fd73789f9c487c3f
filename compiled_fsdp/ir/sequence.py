"""A graph's collectives as text, to be compared between ranks (`passes/agree.py`).

Ranks may differ in what they compute, not in what they communicate. So the text has what must be
equal: kind, group, order, dtype, owner, and sizes as far as they are known. A size that is a symbol
on one rank ("?"), because its inputs have had several, agrees with any number on another
(`same_where_known`). How many rows of an all-to-all a rank sends is its own affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .collectives import as_in_torch, group_of
from .graph import argument, find, phase_of, starts, value
from .meta import get_tag
from .printer import printable
from .schema import EXCHANGE, GATHER_NEXT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

UNKNOWN = "?"  # a size that is a symbol here


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
    head = f"a {phase_of(graph)} graph of {len(lines)} collectives"
    lines += [f"for the next step: {owner(node)}" for node in find(graph, GATHER_NEXT)]
    return "\n".join([head, *lines]), list(groups)


def sequence_over(graph: Graph, group: str) -> list[str]:
    """The lines of the collectives over one group."""
    lines = sequence(graph)[0].splitlines()[1:]
    return [
        line for node, line in zip(starts(graph), lines, strict=False) if group_of(node) == group
    ]


def _sizes(node: Node) -> str:
    """Elements of each message."""
    op: Any = node.target
    if op is EXCHANGE:
        width = value(node.all_input_nodes[0]).shape[1:].numel()
        return f"rows of {width if isinstance(width, int) else UNKNOWN}"
    owners = argument(node, "owners")
    if owners is not None:  # of matrices that travel to their owners, or back
        numels = argument(node, "numels")
        return " + ".join(f"{n} of {owner}" for n, owner in zip(numels, owners, strict=True))
    sizes: Any = argument(node, "sizes")
    if not sizes:
        sent: Any = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        sizes = [value(n).numel() for n in sent]
    return " + ".join(str(n) if isinstance(n, int) else UNKNOWN for n in sizes)


def same_where_known(texts: Sequence[str]) -> bool:
    """Whether texts of `sequence` differ at most where one of them does not know a size."""
    lines = [text.splitlines() for text in texts]
    return not lines or (
        all(len(each) == len(lines[0]) for each in lines)
        and all(_alike([line.split(" ") for line in same]) for same in zip(*lines, strict=True))
    )


def _alike(lines: Sequence[list[str]]) -> bool:
    return all(len(line) == len(lines[0]) for line in lines) and all(
        len({*words} - {UNKNOWN}) <= 1 for words in zip(*lines, strict=True)
    )


def owner(node: Node) -> str:
    """The unit and the parameters that a node of a communication carries."""
    tag = get_tag(node)
    if tag is None:
        return printable(argument(node, "what") or "the model's own")
    return printable(f"{tag.unit.split('#')[0]} ({', '.join(s.fqn for s in tag.specs)})")
