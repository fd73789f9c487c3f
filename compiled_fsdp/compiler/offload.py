"""Halves between which saved activations are in host memory.

What `planning/offload.py` allows is taken from the saved values: forward returns a copy of it on
the host, and backward begins with one and copies it back. Both copies are still awaited at once
here; `passes/hide_copies.py` starts them early and awaits them late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.collectives import HOST
from compiled_fsdp.ir.descriptors import returned, set_returned
from compiled_fsdp.ir.graph import Builder, output, value
from compiled_fsdp.ir.schema import COPY_TO
from compiled_fsdp.planning.offload import source_of_copy, why_not_moved
from compiled_fsdp.planning.recompute import Saved

from .recompute import save_whole

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Node

    from .partition import Halves


def offload(halves: Halves, names: Collection[str]) -> list[str]:
    """Let these saved storages, by the names of the forward nodes that allocate them, be on the
    host from forward to backward; in place.

    Returns those that have to stay on the device, since other values are saved than where it was
    decided.
    """
    forward, backward = halves
    saved = Saved.of(forward.graph, backward.graph)
    roots = [n for n in saved.origins if n.name in names and not why_not_moved(saved, n)]
    left = sorted(set(names) - {root.name for root in roots})
    if not roots:
        return left
    sources = [source for root in roots if (source := source_of_copy(saved, root)) is not None]
    in_parts = [root.name for root in roots if root in sources and saved.origins[root] != [root]]
    if in_parts:
        save_whole(halves, in_parts)
        saved = Saved.of(forward.graph, backward.graph)
    inputs = dict(saved.pairs)
    instead: dict[Node | None, Node] = {}
    for source in sources:
        instead[source] = Builder(source.next, source)(COPY_TO, source, HOST, _pins(source))
        _come_back(inputs[source], instead[source])
    places, end = set(saved.places), output(forward.graph)
    pairs = enumerate(returned(end))
    set_returned(end, [(instead.get(n, n) if i in places else n, kind) for i, (n, kind) in pairs])
    return left


def _pins(source: Node) -> bool:
    """Whether a copy is in pinned memory, without which the host would wait for it."""
    return value(source).device.type != "cpu"


def _come_back(given: Node, copied: Node) -> None:
    """Let an input of backward be on the host, and be copied back where it is read first."""
    graph, device, first = given.graph, value(given).device.type, min(given.users)
    with graph.inserting_before(given):
        moved = graph.placeholder(f"{given.name}_on_host")
    meta.take_over(moved, given)
    moved.meta["val"] = copied.meta["val"]
    given.replace_all_uses_with(Builder(first, first)(COPY_TO, moved, device, False))
    graph.erase_node(given)
