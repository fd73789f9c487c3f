"""The memory model: how many bytes are alive at each node of a final graph, the peak, and what is alive there.

    profile(forward)                  what the caller holds (parameters, batch) is at rest and counts nothing
    profile(backward)                 what forward saved is alive from the start, each until its last use
    profile_step(forward, backward)   both, and the outputs that the user holds

How long each storage lives: `lifetimes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .graph import is_backward, output, placeholders
from .lifetimes import ACTIVATION, BUCKET, GATHERED, GRADIENT, IN_FLIGHT, OUTPUT, TEMPORARY, Curve, Lifetimes, Storage
from .meta import saved_for_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node

__all__ = [
    "ACTIVATION",
    "BUCKET",
    "GATHERED",
    "GRADIENT",
    "IN_FLIGHT",
    "OUTPUT",
    "TEMPORARY",
    "Alive",
    "Curve",
    "Lifetimes",
    "MemoryProfile",
    "StepProfile",
    "Storage",
    "profile",
    "profile_of",
    "profile_step",
]


@dataclass(frozen=True, slots=True)
class Alive:
    """A storage that is alive at the peak."""

    kind: str
    owner: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of one graph: `curve[i]` is at `nodes[i]`, and `alive` is what is alive at the peak, largest first."""

    title: str
    nodes: tuple[Node, ...]
    curve: Curve
    at_rest: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int:
        """Bytes above what is at rest."""
        return self.curve.peak

    @property
    def node(self) -> Node:
        """Where the peak is."""
        return self.nodes[self.curve.where]

    def __str__(self) -> str:
        where, peak = self.curve.where, _megabytes(self.peak)
        lines = [f"{self.title}: peak {peak} above rest at %{self.node.name}, node {where} of {len(self.nodes)}"]
        for kind in dict.fromkeys(a.kind for a in self.alive):
            members = [a for a in self.alive if a.kind == kind]
            names = ", ".join(f"{a.owner} {_megabytes(a.num_bytes)}" for a in members[:4])
            more = f", and {len(members) - 4} more" if len(members) > 4 else ""
            lines.append(f"  {_megabytes(sum(a.num_bytes for a in members)):>10}  {kind}: {names}{more}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Memory of a training step up to the optimizer, as the two graphs that compute it."""

    forward: MemoryProfile
    backward: MemoryProfile

    @property
    def peak(self) -> int:
        """Bytes above what is at rest."""
        return max(self.forward.peak, self.backward.peak)

    def __str__(self) -> str:
        return f"{self.forward}\n{self.backward}"


def profile(graph: Graph, is_fused: bool = False) -> MemoryProfile:
    """The memory of one final graph, run as it is, or `is_fused` by Inductor."""
    return profile_of(Lifetimes(graph, is_fused))


def profile_of(lifetimes: Lifetimes, order: Sequence[Node] | None = None) -> MemoryProfile:
    """The memory of a graph's storages, in another order of its nodes if one is given."""
    nodes = tuple(lifetimes.graph.nodes if order is None else order)
    curve = lifetimes.curve(nodes)
    position = {node: i for i, node in enumerate(nodes)}
    alive = []
    for storage in lifetimes.storages:
        first, last = storage.span(position)
        if storage.num_bytes and first <= curve.where <= last:
            alive.append(Alive(storage.kind_at(curve.where, position), storage.owner, storage.num_bytes))
    alive.sort(key=lambda a: -a.num_bytes)
    title = "backward" if is_backward(lifetimes.graph) else "forward"
    return MemoryProfile(title, nodes, curve, lifetimes.at_rest, tuple(alive))


@dataclass(frozen=True, slots=True)
class Handed:
    """What a forward leaves to its backward and to the user.

    saved: for each value saved for backward, in order, its name and its shape as text.
    kinds: for each, (kind, owner) of its storage in forward; None where somebody else holds it all the time.
    held: (bytes, owner) of the outputs that the user holds until the end.
    """

    saved: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, str] | None, ...]
    held: tuple[tuple[int, str], ...]


def handed_over(before: Lifetimes, count: int) -> Handed:
    """What a forward leaves, if its backward takes `count` values: it returns them last, the symbols among them left out."""
    returned: Any = output(before.graph).args[0]
    saved = [n for n in returned if n is not None and not _is_symbol(n)][-count:] if count else []
    held = dict.fromkeys(s for n in output(before.graph).all_input_nodes if n not in saved for s in before.of(n))
    origin = [before.of(n)[0] if before.of(n) else None for n in saved]
    kinds = [None if s is None or s in held else (s.kind, s.owner) for s in origin]
    return Handed(tuple((n.name, _shape(n)) for n in saved), tuple(kinds), tuple((s.num_bytes, s.owner) for s in held))


def num_saved(forward: Graph) -> int:
    """How many values the backward of a graph that torch made will take from it, symbols left out."""
    return sum(not _is_symbol(node) for node in saved_for_backward(output(forward)))


def taken_over(backward: Graph) -> list[Node]:
    """The placeholders of a backward graph for what its forward saved."""
    return [p for p in placeholders(backward) if not _is_symbol(p) and not p.name.startswith("tangents")]


def follows(backward: Graph, handed: Handed) -> bool:
    """Whether a backward takes values of the shapes that a forward saved, in the same order."""
    return [shape for _, shape in handed.saved] == [_shape(p) for p in taken_over(backward)]


def lifetimes_after(backward: Graph, handed: Handed, is_fused: bool = False) -> Lifetimes:
    """The storages of a backward that follows a forward; the user holds the outputs of forward until the end.

    Raises:
        ValueError: the two are not the halves of one graph.
    """
    taken = taken_over(backward)
    if not follows(backward, handed):
        raise ValueError(
            f"profile_step: backward takes {[f'%{p.name}' for p in taken]}, and forward returns last "
            f"{[f'%{name}' for name, _ in handed.saved]}; they should be the two halves of one graph"
        )
    kinds = dict(zip(taken, handed.kinds, strict=True))
    after = Lifetimes(backward, is_fused, [p for p, kind in kinds.items() if kind is None])
    for storage in after.storages:
        known = kinds.get(storage.node)
        if known is not None:
            storage.kind, storage.owner = known
    first = next(iter(backward.nodes))
    after.storages += [Storage(first, size, OUTPUT, owner, is_kept=True) for size, owner in handed.held]
    return after


def profile_step(forward: Graph, backward: Graph, is_fused: bool = False) -> StepProfile:
    """The memory of a forward and of its backward; the user holds the outputs of forward until the end."""
    before = Lifetimes(forward, is_fused)
    after = lifetimes_after(backward, handed_over(before, len(taken_over(backward))), is_fused)
    return StepProfile(profile_of(before), profile_of(after))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _shape(node: Node) -> str:
    """As text: to compare symbols would make guards of them."""
    val = node.meta.get("val")
    return str(list(val.shape)) if isinstance(val, torch.Tensor) else "[]"
