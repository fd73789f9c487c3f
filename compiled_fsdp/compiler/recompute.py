"""Halves in which backward computes saved activations again.

Torch's partitioner has drawn its line between saving and computing again; here values are taken
from the saved ones, and backward gets the ops that make them, each directly before what needs it
first. What is left out of the saved values, and what is computed again for them, is exactly what
`planning/recompute.py` has priced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Graph

from compiled_fsdp.ir import meta
from compiled_fsdp.ir.again import why_not_again
from compiled_fsdp.ir.descriptors import returned, set_returned
from compiled_fsdp.ir.graph import output
from compiled_fsdp.planning.recompute import Saved

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import GraphModule, Node

    from compiled_fsdp.planning.recompute import Cone

    from .partition import Halves


def compute_again(halves: Halves, names: Collection[str]) -> list[str]:
    """Let backward compute these saved storages again, by the names of the forward nodes that
    allocate them; in place.

    Returns those that cannot be computed again, since other values are saved than where it was
    decided: they stay saved.
    """
    forward, backward = halves
    saved = Saved.of(forward.graph, backward.graph)
    cones = _cones(saved, {node for node in saved.origins if node.name in names})
    left = sorted(set(names) - {root.name for root in cones})
    if not cones:
        return left
    bases = {start for cone in cones.values() for start in cone.bases} - set(cones)
    _rewrite(backward, saved, set(cones), bases)
    return left


def save_whole(halves: Halves, names: Collection[str]) -> None:
    """Let forward save these storages, of which it saves views, as a whole, and backward make the
    views; in place.
    """
    forward, backward = halves
    saved = Saved.of(forward.graph, backward.graph)
    _rewrite(backward, saved, set(), {node for node in saved.origins if node.name in names})


def _rewrite(backward: GraphModule, saved: Saved, again: set[Node], whole: set[Node]) -> None:
    """Make halves in which some storages are not saved, and others as a whole."""
    dropped: set[str] = set()
    instead: dict[str, Node] = {}  # by the input of backward in whose place it comes
    for start, values in saved.origins.items():
        if start in again or start in whole:
            dropped.update(value.name for value in values)
        if start in whole:
            instead[values[0].name] = start
    backward.graph = _Rewriter(saved, dropped, instead).run()
    _save(saved, dropped, instead)


def _cones(saved: Saved, roots: set[Node]) -> dict[Node, Cone]:
    """Those that can be computed again while none of them is saved."""
    roots = {root for root in roots if saved.are_views(root) and not saved.is_held(root)}
    while True:
        cones = {root: saved.cone(root, roots) for root in roots}
        found = {root: cone for root, cone in cones.items() if cone is not None}
        if len(found) == len(roots):
            return found
        roots = set(found)


class _Rewriter:
    """Makes the new backward graph: the old one in its order, and before each node what it needs of
    forward's that is not there yet.

    dropped: inputs that are gone.
    instead: inputs that come in the place of others: forward's nodes.
    """

    def __init__(self, saved: Saved, dropped: set[str], instead: dict[str, Node]) -> None:
        self.saved, self.dropped, self.instead = saved, dropped, instead
        self.graph = Graph()
        self.made: dict[str, Node] = {}  # by name
        self.of_forward = {node.name: node for node in saved.forward.nodes}

    def run(self) -> Graph:
        """The new graph."""
        old = self.saved.backward
        for node in old.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.name not in self.saved.again:
                self._need(node)
                self._copy(node)
            # what is computed again comes where it is needed first
        meta.take_over(output(self.graph), output(old))
        return self.graph

    def _input(self, node: Node) -> None:
        name = self.saved.name_of(node)
        start = self.instead.get(name)
        if start is not None:
            self.made[start.name] = self.graph.placeholder(start.name)
            meta.take_over(self.made[start.name], start)
        elif name not in self.dropped:
            self._copy(node)

    def _need(self, node: Node) -> None:
        """Make what a node of backward reads of forward's values."""
        wanted: set[str] = set()
        stack = [self.saved.name_of(source) for source in node.all_input_nodes]
        while stack:
            name = stack.pop()
            if name not in self.made and name not in wanted:
                wanted.add(name)
                stack += [source.name for source in self.of_forward[name].all_input_nodes]
        place = self.saved.place
        for source in sorted((self.of_forward[name] for name in wanted), key=place.__getitem__):
            twin = self.saved.again.get(source.name)
            self._copy(source if twin is None else twin)
            if twin is None:
                meta.note_again(self.made[source.name])

    def _copy(self, node: Node) -> None:
        made, name_of = self.made, self.saved.name_of
        made[name_of(node)] = self.graph.node_copy(node, lambda source: made[name_of(source)])


def _save(saved: Saved, dropped: set[str], instead: dict[str, Node]) -> None:
    """Let forward return what backward takes now."""
    end, places = output(saved.forward), set(saved.places)
    pairs: list[tuple[Node | None, object]] = []
    for place, (node, kind) in enumerate(returned(end)):
        name = node.name if node is not None and place in places else ""
        if name in instead:
            pairs.append((instead[name], kind))
        elif name not in dropped:
            pairs.append((node, kind))
    set_returned(end, pairs)
    for values in saved.origins.values():
        if values[0].name in dropped:
            for value in reversed(values):
                _erase(value)


def _erase(node: Node) -> None:
    """Erase a node that nobody reads, and then likewise what it read."""
    stack = {node: None}
    while stack:
        node, _ = stack.popitem()
        if not node.users and not why_not_again(node):
            stack.update(dict.fromkeys(node.all_input_nodes))
            node.graph.erase_node(node)
