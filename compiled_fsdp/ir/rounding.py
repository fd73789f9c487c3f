"""Casts that autograd makes by itself, in the trace of a backward.

Where an op's backward returns a gradient in another dtype than that of the op's input, autograd
casts it, unless the input is a leaf with another `grad_dtype`. A parameter is one, eagerly; in a
graph its read is an op, so that the gradient of a read has been rounded before `reduce_grad` takes
it. That cast looks like others: that of the program's own `weight.float()`, which its backward
reverses; or of `x * (1 + w)`, where autograd rounds the gradient of `1 + w`, eagerly, too, and the
addition hands it on as it is.

They differ in what torch notes on a node: a number that an op has in common with what
differentiates it, the op that a node is a part of, and the program's functions. So the op that is
differentiated is found, and its inputs, to which its casts belong in order. Tried on torch 2.11,
2.13, 2.14 and 2.15.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from . import meta
from .collectives import CONVERT
from .graph import placeholders, value
from .subgraphs import unit_called_by, with_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.fx import Graph, Node

aten = torch.ops.aten
TO_COPY, COPY = aten._to_copy.default, aten.copy.default
CASTS = (CONVERT, TO_COPY)
# Whose backward is a cast, or begins with one and may do nothing else.
_CAST = (*CASTS, COPY, aten.cumsum.default, aten.cumprod.default)
_OF_FUNCTION = "autograd.function"  # what Dynamo notes of `torch.autograd.Function`
_OF_READS = "as_dtensor"  # ours, behind a read
_TORCHS = ("aten", "prims", "_c10d_functional")


class Rounding:
    """What autograd has rounded in a joint graph, and in the subgraphs of its units.

    forward, casts: the ops of forward, and autograd's casts to a narrower dtype, by number.
    calls: of subgraphs.
    """

    def __init__(self, graph: Graph) -> None:
        self.forward: dict[object, list[Node]] = defaultdict(list)
        self.casts: dict[object, list[Node]] = defaultdict(list)
        self.calls: dict[Graph, list[Node]] = defaultdict(list)
        for node in dict.fromkeys(with_inside(graph)):
            if node.op != "call_function":
                continue
            number, part_of, functions, _ = meta.of_autograd(node)
            if (body := unit_called_by(node)) is not None:
                self.calls[body].append(node)
            if not functions:
                self.forward[number].append(node)
            elif _narrows(node) and str(part_of) in ("None", str(TO_COPY)):  # copied with its graph
                self.casts[number].append(node)

    def is_rounded(self, grad: Node, at: Node) -> bool:
        """Whether this is autograd's cast of the gradient of a read.

        Not said of a cast that cannot be told from one of the program's own, in the backward of an
        operator that is not torch's, or of an in-place copy into a view.

        at: the node that takes the gradient: `reduce_grad`, or the first `cast_grad`.
        """
        number, _, functions, _ = meta.of_autograd(grad)
        if grad not in self.casts.get(number, ()):
            return False
        reads = self.forward.get(meta.of_autograd(at)[0], [])[:1]
        nodes = self.forward.get(number, [])
        if not reads:
            return False
        if any(name.startswith(_OF_FUNCTION) for name, _ in functions):
            # What a user's backward casts itself is not autograd's.
            return reads[0] in self._origins(n for node in nodes for n in node.all_input_nodes)
        low = value(grad).dtype
        # Before it may stand what brings its inputs to it, and behind it what has no gradient.
        op, given = next(((n, own) for n in nodes if (own := _given(n, low))), (None, []))
        if op is None or op.target in _CAST or getattr(op.target, "namespace", "") not in _TORCHS:
            return False
        made = [cast for cast in self.casts[number] if value(cast).dtype == low]
        if len(given) == len(made):  # one for each, in order
            given = given[made.index(grad) :][:1]
        return reads[0] in self._origins(given)

    def _origins(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Yields the reads that these are: outside of a subgraph, and behind what ours makes of
        them.
        """
        for node in nodes:
            yield node
            if node.op == "placeholder" and node.graph in self.calls:
                place = list(placeholders(node.graph)).index(node)
                yield from self._origins(call.args[2 + place] for call in self.calls[node.graph])  # type: ignore[misc]
            own = meta.of_autograd(node)[3]
            if own and own[-1][0].startswith(_OF_READS):
                yield from node.all_input_nodes


def _narrows(node: Node) -> bool:
    if node.target not in CASTS:
        return False
    wide, low = value(node.args[0]).dtype, value(node).dtype  # type: ignore[arg-type]
    return low.is_floating_point and low.itemsize < wide.itemsize


def _given(node: Node, dtype: torch.dtype) -> list[Node]:
    """The tensors of this dtype that a node is given, each as often as it is."""
    found: list[Any] = []
    for each in node.args:
        found += each if isinstance(each, list | tuple) else [each]
    nodes = (each for each in found if isinstance(each, torch.fx.Node))
    return [each for each in nodes if getattr(value(each), "dtype", None) == dtype]
