"""Casts that autograd makes by itself, in the trace of a backward.

Where an op's backward returns a gradient in another dtype than that of the op's input, autograd
casts it, unless the input is a leaf with another `grad_dtype`. In a graph that is a cast like that
of `weight.float()`, which the program made and whose backward casts, too. They differ in what torch
notes on a node: which node of autograd it was traced for, of which op it is a part, and which
function of the program that differentiates. Tried on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import meta
from .collectives import CONVERT
from .graph import value
from .subgraphs import with_inside

if TYPE_CHECKING:
    from torch.fx import Graph, Node

aten = torch.ops.aten
TO_COPY, COPY = aten._to_copy.default, aten.copy.default
CASTS = (CONVERT, TO_COPY)
_OF_FUNCTION = "autograd.function"  # what Dynamo notes of `torch.autograd.Function`


def rounded_by_autograd(graph: Graph) -> set[Node]:
    """The casts of gradients to a narrower dtype that autograd has made, in a joint graph and in
    the subgraphs of its units.

    Left out is what cannot be told from a cast of the program's own: one inside of the backward of
    an in-place copy into a view, or of an operator that torch decomposes.
    """
    nodes = list(dict.fromkeys(with_inside(graph)))
    narrowing = (node for node in nodes if node.target in CASTS and _narrows(node))
    by_autograd = [node for node in narrowing if _is_of_backward(node)]
    first: dict[object, Node] = {}  # of forward; others of its number are not differentiated
    for node in nodes if by_autograd else ():
        number, _, functions = meta.of_autograd(node)
        if node.op == "call_function" and not functions:
            first.setdefault(number, node)
    return {node for node in by_autograd if not _is_of_program(node, first)}


def _narrows(node: Node) -> bool:
    wide, low = value(node.args[0]).dtype, value(node).dtype  # type: ignore[arg-type]
    return low.is_floating_point and low.itemsize < wide.itemsize


def _is_of_backward(node: Node) -> bool:
    """Whether autograd made it: not a user's own backward, and not a part of another op."""
    _, part_of, functions = meta.of_autograd(node)
    is_whole = part_of is None or str(part_of) == str(TO_COPY)  # an op is copied with its graph
    return bool(functions) and is_whole


def _is_of_program(node: Node, first: dict[object, Node]) -> bool:
    """Whether it differentiates a cast."""
    number, _, functions = meta.of_autograd(node)
    if any(name.startswith(_OF_FUNCTION) for name, _ in functions):
        return False  # autograd casts what a user's backward returned; that casts by itself
    differentiated = first.get(number)
    return differentiated is None or differentiated.target in (*CASTS, COPY)
