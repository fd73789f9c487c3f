"""The memory of a finished graph: `memory.json.gz` of a dump, from which the report is made."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from compiled_fsdp.ir.graph import is_backward
from compiled_fsdp.ir.meta import module_of
from compiled_fsdp.planning.halves import Boundary, boundary_of, follows, lifetimes_after, num_saved
from compiled_fsdp.planning.lifetimes import IN_FLIGHT, Lifetimes

from .layout import EXECUTORS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.fx import Graph, Node

    from compiled_fsdp.planning.lifetimes import Storage

    from .layout import Head, Memory, Profile


@dataclass(frozen=True, slots=True)
class DumpedForward:
    """A forward whose backward may still be compiled.

    path: the folder of its dump.
    boundary: what it saves for backward and returns, by executor.
    modules: where its nodes come from.
    """

    path: Path
    boundary: dict[str, Boundary]
    modules: dict[str, str]


# Of this process; the graphs themselves change after they were dumped.
_forwards: list[DumpedForward] = []
MOST_FORWARDS = 64


def memory(graph: Graph, path: Path, head: Head) -> Memory:
    """The storages of a graph and the bytes of each kind at each node; a backward goes on from the
    forward that it belongs to.
    """
    before = _forward_of(graph, path) if is_backward(graph) else None
    if before is None:
        alive = {name: Lifetimes(graph, fused) for name, fused in EXECUTORS.items()}
    else:
        alive = {
            name: lifetimes_after(graph, before.boundary[name], fused)
            for name, fused in EXECUTORS.items()
        }
    modules = {node.name: module_of(node) for node in graph.nodes}
    saved = before.modules if before else {}
    if not is_backward(graph):
        boundary = {name: boundary_of(a, num_saved(graph)) for name, a in alive.items()}
        _forwards.append(DumpedForward(path, boundary, modules))
        del _forwards[:-MOST_FORWARDS]
    return {
        **head,
        "after": before.path.name if before else None,
        "nodes": [n.name for n in graph.nodes],
        "plain": _profile(alive["plain"], modules, saved),
        "fused": _profile(alive["fused"], modules, saved),
    }


def _forward_of(backward: Graph, path: Path) -> DumpedForward | None:
    return next((known for known in reversed(_forwards) if _is_half(backward, path, known)), None)


def _is_half(backward: Graph, path: Path, forward: DumpedForward) -> bool:
    return forward.path.parent == path.parent and all(
        follows(backward, boundary) for boundary in forward.boundary.values()
    )


def _profile(lifetimes: Lifetimes, own: dict[str, str], saved: dict[str, str]) -> Profile:
    """Returns the bytes alive at each node, and the storages that they are.

    own, saved: the modules of nodes of this graph, and of those of the forward that it goes on
    from.
    """
    nodes = list(lifetimes.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    curve = lifetimes.curve(nodes)
    stored = [s for s in lifetimes.storages if s.num_bytes]
    return {
        "peak": curve.peak,
        "where": curve.where,
        "at_rest": lifetimes.at_rest,
        "during": list(curve.during),
        "kinds": stack(stored, position),
        "storages": [
            (s.kind, _owner(s, own, saved), s.num_bytes, *s.span(position), _under_way(s, position))
            for s in stored
        ],
    }


def _owner(storage: Storage, own: dict[str, str], saved: dict[str, str]) -> str:
    """A parameter, a unit, or a node with the module that it comes from."""
    known = saved if storage.node.op == "placeholder" else own
    module = known.get(storage.owner, "")
    return f"{storage.owner} in {module}" if module else storage.owner


def _under_way(storage: Storage, position: dict[Node, int]) -> list[tuple[int, int]]:
    return [(position[start], position[wait]) for start, wait in storage.under_way]


def stack(storages: list[Storage], position: dict[Node, int]) -> dict[str, list[int]]:
    """Bytes of each kind while each node runs; what is written over its input counts once, as the
    new value.
    """
    changes: dict[str, list[int]] = {}

    def add(kind: str, first: int, last: int, num_bytes: int) -> None:
        change = changes.setdefault(kind, [0] * (len(position) + 1))
        change[first] += num_bytes
        change[last + 1] -= num_bytes

    over: dict[int, tuple[int, str]] = {}
    ends = {storage: storage.span(position)[1] for storage in storages}
    for storage in storages:
        for kind, first, last in _intervals(storage, position):
            add(kind, first, last, storage.num_bytes)
        born = storage.first(position)
        for old in (s for s in storage.over if ends.get(s) == born and not s.is_kept):
            over[born] = max(
                over.get(born, (0, "")), (storage.num_bytes, old.kind_at(born, position))
            )
    for at, (num_bytes, kind) in over.items():
        add(kind, at, at, -num_bytes)
    return {kind: list(accumulate(change))[:-1] for kind, change in changes.items()}


def _intervals(storage: Storage, position: dict[Node, int]) -> Iterator[tuple[str, int, int]]:
    """The life of a storage, cut where a collective on it starts or ends: kind, first and last
    position.
    """
    first, last = storage.span(position)
    for start, end in sorted(_under_way(storage, position)):
        if start > first:
            yield storage.kind, first, start - 1
        if end >= first:
            yield IN_FLIGHT, max(start, first), end
        first = max(first, end + 1)
    if first <= last:
        yield storage.kind, first, last
