"""The two halves of a training graph: what a forward hands to its backward, and the storages of a
backward that follows one.

A forward's memory must be known while its graph is: what compiles it changes it afterwards. So what
is handed over is kept as plain values, and a backward that is compiled later goes on from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.graph import output, placeholders

from .lifetimes import OUTPUT, Lifetimes, Storage

if TYPE_CHECKING:
    from torch.fx import Graph, Node


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary between a forward and its backward: what forward leaves to it and to the user.

    saved: for each value saved for backward, in order, its name and its shape as text.
    kinds: for each, (kind, owner) of its storage in forward; None where somebody else holds it all
        the time.
    places: for each, the number of its storage among those of forward, and the storage's bytes:
        parameters that were gathered together share one, which the values in a backward graph do
        not show.
    held: (bytes, owner) of the outputs that the user holds until the end.
    """

    saved: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, str] | None, ...]
    places: tuple[tuple[int, int] | None, ...]
    held: tuple[tuple[int, str], ...]


def boundary_of(before: Lifetimes, count: int) -> Boundary:
    """Returns what a forward leaves, if its backward takes `count` values: it returns them last,
    the symbols among them left out.
    """
    returned: Any = output(before.graph).args[0]
    saved = [returned[place] for place in saved_places(before.graph, count)]
    outputs, handed_over = output(before.graph).all_input_nodes, set(saved)
    held = dict.fromkeys(s for n in outputs if n not in handed_over for s in before.of(n))
    origin = [before.of(n)[0] if before.of(n) else None for n in saved]
    kinds = [None if s is None or s in held else (s.kind, s.owner) for s in origin]
    number = {s: i for i, s in enumerate(before.storages)}
    places = [None if s is None else (number[s], s.num_bytes) for s in origin]
    return Boundary(
        tuple((n.name, _shape(n)) for n in saved),
        tuple(kinds),
        tuple(places),
        tuple((s.num_bytes, s.owner) for s in held),
    )


def saved_places(forward: Graph, count: int) -> list[int]:
    """Where among its outputs a forward returns what its backward takes, if that are `count`
    values.
    """
    returned: Any = output(forward).args[0]
    return (
        [i for i, n in enumerate(returned) if n is not None and not _is_symbol(n)][-count:]
        if count
        else []
    )


def num_saved(forward: Graph) -> int:
    """How many values the backward of a graph that torch made will take from it, symbols left
    out.
    """
    return sum(not _is_symbol(node) for node in saved_for_backward(output(forward)))


def saved_inputs(backward: Graph) -> list[Node]:
    """The placeholders of a backward graph for what its forward saved."""
    return [
        p for p in placeholders(backward) if not _is_symbol(p) and not p.name.startswith("tangents")
    ]


def follows(backward: Graph, boundary: Boundary) -> bool:
    """Whether a backward takes values of the shapes that a forward saved, in the same order."""
    return [shape for _, shape in boundary.saved] == [_shape(p) for p in saved_inputs(backward)]


def lifetimes_after(backward: Graph, boundary: Boundary, is_fused: bool = False) -> Lifetimes:
    """The storages of a backward that follows a forward; the user holds the outputs of forward
    until the end.

    Raises:
        ValueError: the two are not the halves of one graph.
    """
    inputs = saved_inputs(backward)
    if not follows(backward, boundary):
        raise ValueError(
            f"profile_step: backward takes {[f'%{p.name}' for p in inputs]}, and forward returns "
            f"last {[f'%{name}' for name, _ in boundary.saved]}; they should be the two halves of "
            "one graph"
        )
    kinds = dict(zip(inputs, boundary.kinds, strict=True))
    places = {
        p: place for p, place in zip(inputs, boundary.places, strict=True) if place is not None
    }
    after = Lifetimes(backward, is_fused, [p for p, kind in kinds.items() if kind is None], places)
    for storage in after.storages:
        known = kinds.get(storage.node)
        if known is not None:
            storage.kind, storage.owner = known
    first = next(iter(backward.nodes))
    after.storages += [
        Storage(first, size, OUTPUT, owner, is_kept=True) for size, owner in boundary.held
    ]
    return after


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _shape(node: Node) -> str:
    """As text: to compare symbols would make guards of them."""
    val = node.meta.get("val")
    return str(list(val.shape)) if isinstance(val, torch.Tensor) else "[]"
