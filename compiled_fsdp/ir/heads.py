"""Outputs that the loss does not use: parameters that only they lead to get no gradient, not zeros.

A graph has one backward for all of its outputs, and takes zeros for the gradients of those that
nobody used; an optimizer with weight decay or momentum would move what they lead to. So the joint
graph says which outputs lead to which parameters, and the forward graph brings that along for
`left_out.py`. Graphs whose outputs all lead to the same parameters know nothing of this.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from .graph import Builder, is_backward, placeholders
from .meta import get_heads, set_heads
from .schema import REDUCE_GRAD, WATCH_HEADS

if TYPE_CHECKING:
    from torch.fx import Graph, Node


def note_heads(joint: Graph) -> None:
    """Leave on each flat buffer of a joint graph which outputs lead to its parameters, where not
    all do.
    """
    tangents = [node for node in placeholders(joint) if node.name.startswith("tangents")]
    if len(tangents) < 2:
        return
    for flat, of_flat in _heads(joint, tangents).items():
        some = {
            offset: sorted(outputs)
            for offset, outputs in of_flat.items()
            if 0 < len(outputs) < len(tangents)
        }
        if some:
            set_heads(flat, (len(tangents), some))


def _heads(joint: Graph, tangents: list[Node]) -> dict[Node, dict[int, frozenset[int]]]:
    """By flat buffer and offset: the outputs whose gradients a parameter's gradient is made of, by
    number.
    """
    made_of: dict[Node, frozenset[int]] = {
        tangent: frozenset([i]) for i, tangent in enumerate(tangents)
    }
    heads: dict[Node, dict[int, frozenset[int]]] = {}
    for node in joint.nodes:
        if node.op == "placeholder":
            continue
        made_of[node] = frozenset[int]().union(
            *(made_of.get(source, ()) for source in node.all_input_nodes)
        )
        if node.target is REDUCE_GRAD:
            grad, flat, offset = node.args[:3]
            of_flat = heads.setdefault(flat, {})
            of_flat[offset] = of_flat.get(offset, frozenset()) | made_of[grad]
    return heads


def add_heads(graph: Graph) -> None:
    """Let a forward graph bring along what `note_heads` found, in an op that travels with the
    compiled code.
    """
    flats = [node for node in placeholders(graph) if get_heads(node) is not None]
    if not flats or is_backward(graph):
        return
    heads = [get_heads(flat) for flat in flats]
    num_outputs = next(num for num, _ in filter(None, heads))
    text = json.dumps([list(some.items()) for _, some in filter(None, heads)])
    first = next(n for n in graph.nodes if n.op != "placeholder")
    run = Builder(first, first)
    token = run(torch.ops.aten.new_empty.default, flats[0], [1], dtype=torch.uint8)
    run(WATCH_HEADS, token, flats, num_outputs, text)
