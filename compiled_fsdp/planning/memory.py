"""The memory model: how many bytes are alive at each node of a final graph, the peak, and what is
alive there.

    profile(forward)                 what the caller holds (parameters, batch) counts nothing
    profile(backward)                what forward saved is alive from the start, to its last use
    profile_step(forward, backward)  both, and the outputs that the user holds

How long each storage lives: `lifetimes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_fsdp.errors import shortened
from compiled_fsdp.ir.graph import phase_of

from .halves import boundary_of, lifetimes_after, saved_inputs
from .lifetimes import Curve, Lifetimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node


@dataclass(frozen=True, slots=True)
class Alive:
    """A storage that is alive at the peak."""

    kind: str
    owner: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of one graph: `curve[i]` is at `nodes[i]`, and `alive` is what is alive at the peak,
    largest first.
    """

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
        lines = [
            f"{self.title}: peak {peak} above rest at %{self.node.name}, node {where} of "
            f"{len(self.nodes)}"
        ]
        for kind in dict.fromkeys(a.kind for a in self.alive):
            members = [a for a in self.alive if a.kind == kind]
            names = shortened([f"{a.owner} {_megabytes(a.num_bytes)}" for a in members], 4)
            lines.append(f"  {_megabytes(sum(a.num_bytes for a in members)):>10}  {kind}: {names}")
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
    where, position = curve.where, {node: i for i, node in enumerate(nodes)}
    alive = []
    for storage in lifetimes.storages:
        first, last = storage.span(position)
        if storage.num_bytes and first <= where <= last:
            alive.append(Alive(storage.kind_at(where, position), storage.owner, storage.num_bytes))
    alive.sort(key=lambda a: -a.num_bytes)
    title = phase_of(lifetimes.graph)
    return MemoryProfile(title, nodes, curve, lifetimes.at_rest, tuple(alive))


def profile_step(forward: Graph, backward: Graph, is_fused: bool = False) -> StepProfile:
    """The memory of a forward and of its backward; the user holds the outputs of forward until the
    end.
    """
    before, after = lifetimes_of((forward, backward), is_fused)
    return StepProfile(profile_of(before), profile_of(after))


def lifetimes_of(graphs: Sequence[Graph], is_fused: bool = False) -> tuple[Lifetimes, ...]:
    """The storages of a forward and of its backward, or of the graph of a whole step."""
    first, *rest = graphs
    before = Lifetimes(first, is_fused)
    return (
        before,
        *(
            lifetimes_after(after, boundary_of(before, len(saved_inputs(after))), is_fused)
            for after in rest
        ),
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
