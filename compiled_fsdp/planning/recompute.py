"""Which saved activations backward could compute again instead, from what, and what that costs.

A candidate is a storage that forward saves for backward. It can be computed again if what it is
made of (its cone) leads back, through ops that may run twice (`ir/again.py`), to values that
backward has anyway: saved for it, gathered for it, or computed again already. A bias, which
backward does not read, may be gathered along with its unit. Storages count, not values: a value
that is saved as a view keeps all of its storage alive, so that whatever else can be computed from
that storage costs no memory.

A candidate may be made of other candidates. Such chains are short (`MOST_DEEP`): along a long one,
as residual additions from the first layer to the last, everything would be alive again where
backward begins. So the values at which chains end stay saved, whatever the budget.

Which storages are candidates follows from ops and their order alone, not from sizes, so that ranks
with other batches have the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir.again import why_not_again
from compiled_fsdp.ir.descriptors import returned
from compiled_fsdp.ir.graph import find, is_matmul, order, output, placeholders
from compiled_fsdp.ir.meta import module_of
from compiled_fsdp.ir.origins import num_bytes_of, source_of
from compiled_fsdp.ir.schema import UNSHARD, param_spec
from compiled_fsdp.torch_private.sizes import symbols_of

from .costs import flops
from .halves import saved_inputs, saved_places

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Graph, Node

    from .costs import Costs

# Candidates that are made of each other, one after the other; what is made of one other alone,
# without a matmul (a copy, a rotation), does not count.
MOST_DEEP = 2
MOST_NODES = 500  # of a cone
ALONG = 8  # times smaller than what backward has of its unit is a parameter that is gathered along
LEAST_SHARE = 32  # what is smaller than the largest by more than this is not worth it: saved means


@dataclass(frozen=True, slots=True)
class Recompute:
    """A saved storage that backward could compute again.

    name: of the forward node that allocates it.
    module: in whose forward; "" if torch does not say.
    num_bytes: of the storage.
    seconds: of what is computed again for it, once what it `needs` is there.
    scratch: bytes of the largest value in between, which nobody else reads.
    needs: other candidates that it is made of, by name.
    reads: all saved storages that it is made of, by name.
    values: the saved values that lie in it, by name.
    sooner: what backward computes again anyway, and has to sooner for it, by name.
    """

    name: str
    module: str
    num_bytes: int
    seconds: float
    scratch: int
    needs: tuple[str, ...]
    reads: tuple[str, ...]
    values: tuple[str, ...]
    sooner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cone:
    """What a storage is computed again from.

    nodes: of forward, in order, the storage's own included; those that backward has are left out.
    origins: saved storages that it reads, by the node that allocates them.
    bases: those of them that have to be saved as a whole for it: only views of them are.
    passed: what backward computes again anyway, and has to sooner for it.
    """

    nodes: tuple[Node, ...]
    passed: tuple[Node, ...]
    origins: tuple[Node, ...]
    bases: tuple[Node, ...]


@dataclass(slots=True)
class Saved:
    """What a forward saves for its backward, and what else that backward has of forward's values.

    pairs: each saved value: forward's node, and the input of backward.
    places: where forward returns them.
    origins: for each storage that is saved, by the node that allocates it, the values in it.
    again: nodes of forward that backward computes again already, by name.
    inputs: of backward, gradients left out, by forward's name of the value.
    called: inputs of backward by what forward calls them.
    place: of each node of forward, in order.
    units: bytes of full parameters that backward gathers, or gets from forward, by unit.
    """

    forward: Graph
    backward: Graph
    pairs: list[tuple[Node, Node]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    origins: dict[Node, list[Node]] = field(default_factory=dict)
    again: dict[str, Node] = field(default_factory=dict)
    inputs: dict[str, Node] = field(default_factory=dict)
    called: dict[Node, str] = field(default_factory=dict)
    place: dict[Node, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)  # names of other values of backward
    _written: set[Node] = field(default_factory=set)
    _symbols: set[Any] = field(default_factory=set)

    @staticmethod
    def of(forward: Graph, backward: Graph) -> Saved:
        """From the two halves of a graph that was split."""
        found = Saved(forward, backward)
        inputs, outputs = saved_inputs(backward), returned(output(forward))
        found.places = saved_places(forward, len(inputs))
        values = [outputs[place][0] for place in found.places]
        found.pairs = list(zip(values, inputs, strict=True))  # type: ignore[arg-type]  # what is saved is a node
        for value, _ in found.pairs:
            found.origins.setdefault(origin(value), []).append(value)
        found.called = {p: value.name for value, p in found.pairs}
        found.inputs = {
            found.name_of(p): p for p in placeholders(backward) if not p.name.startswith("tangents")
        }
        found._symbols = symbols_of(p for p in found.inputs.values() if not _is_tensor(p))
        found.place = order(forward)
        found._written = {
            n.all_input_nodes[0]
            for n in forward.nodes
            if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
        }
        found._find_again()
        for node in find(forward, UNSHARD):
            spec = param_spec(node)
            if found.has(node):
                found.units[spec.unit] = found.units.get(spec.unit, 0) + spec.full_bytes()
        return found

    def _find_again(self) -> None:
        """Nodes of both halves with the same name that compute the same: random ops that torch has
        put around a state of the generator do not.
        """
        mine = {n.name: n for n in self.backward.nodes if n.op == "call_function"}
        for node in self.forward.nodes:
            twin = mine.get(node.name)
            if twin is None or twin.target is not node.target:
                continue
            read = [self.name_of(n) for n in twin.all_input_nodes]
            alike = read == [n.name for n in node.all_input_nodes]
            if alike and all(self.has(n) for n in node.all_input_nodes):
                self.again[node.name] = twin
        self._taken = mine.keys() - self.again.keys()

    def name_of(self, node: Node) -> str:
        """What forward calls a value of backward that it has too."""
        return self.called.get(node, node.name)

    def has(self, node: Node) -> bool:
        """Whether backward has this value of forward's: as an input, or computed again already."""
        return node.name in self.inputs or node.name in self.again

    def is_held(self, origin_node: Node) -> bool:
        """Whether somebody else holds a storage as well: the user, to whom forward returns it."""
        return any(
            node is not None and place not in self.places and origin(node) is origin_node
            for place, (node, _) in enumerate(returned(output(self.forward)))
        )

    def is_written(self, origin_node: Node) -> bool:
        """Whether forward writes to a storage."""
        return any(origin(node) is origin_node for node in self._written)

    def are_views(self, start: Node) -> bool:
        """Whether backward could make all values that are saved of a storage from the whole."""
        views = (view for value in self.origins[start] for view in _views(value, start))
        return not any(view.name not in self.again and why_not_again(view) for view in views)

    def cone(self, root: Node, unsaved: Collection[Node]) -> Cone | None:
        """What a storage can be computed again from; None if it cannot.

        root: the node that allocates it.
        unsaved: storages that are not saved either, by the nodes that allocate them.
        """
        found: dict[Node, None] = {}  # to be computed again for this storage
        passed: dict[Node, None] = {}  # those that backward computes again in any case
        origins: dict[Node, None] = {}
        bases: dict[Node, None] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            if node in found or node in passed:
                continue
            is_new = node.name not in self.again
            if is_new and (len(found) == MOST_NODES or not self._may_run_again(node)):
                return None
            (found if is_new else passed)[node] = None
            for source in node.all_input_nodes:
                start = origin(source)
                if start in self.origins:
                    origins[start] = None
                if start in self.origins and not self.has(source) and start not in unsaved:
                    bases[start] = None
                stack += self._missing(source, start, unsaved)
        if not all(self.is_base(start) for start in bases):
            return None
        nodes, starts = (sorted(each, key=self.place.__getitem__) for each in (found, origins))
        whole = tuple(start for start in bases if start.name not in self.inputs)
        return Cone(tuple(nodes), tuple(passed), tuple(starts), whole)

    def _may_run_again(self, node: Node) -> bool:
        """Whether backward may compute a node that it does not compute yet: with sizes that it
        knows, and from nothing that forward writes to.
        """
        if node.name in self._taken:
            return False
        if node.target is UNSHARD:
            spec = param_spec(node)
            is_small = ALONG * spec.full_bytes() <= self.units.get(spec.unit, 0)
            return is_small and spec.reshard == "gather"
        is_read_before = not any(origin(n) in self._written for n in node.all_input_nodes)
        return is_read_before and self._is_sized(node) and not why_not_again(node)

    def _missing(self, source: Node, start: Node, unsaved: Collection[Node]) -> list[Node]:
        """What of a value's making has to be looked at further; start: its storage.

        What backward computes again anyway is passed through: it may be made of what is not saved.
        """
        if start in unsaved:
            return _views(source, start)
        if start in self.origins:
            return [] if self.has(source) else _views(source, start)
        return [] if source.name in self.inputs else [source]

    def is_base(self, start: Node) -> bool:
        """Whether a storage is saved as a whole, or could be in the place of views of it."""
        return start.name in self.inputs or (
            start.op == "call_function"
            and start.name not in self._taken
            and self._is_sized(start)
            and self.are_views(start)
        )

    def _is_sized(self, node: Node) -> bool:
        """Whether backward knows all symbols in the sizes of a value."""
        return symbols_of([node]) <= self._symbols

    def candidates(self, costs: Costs) -> tuple[Recompute, ...]:
        """All that could be computed again, in the order of forward."""
        cones: dict[Node, Cone] = {}
        for root in self._by_work():
            cone = self.cone(root, {*cones, root})
            if cone is not None and _depth({**cones, root: cone}) <= MOST_DEEP:
                cones[root] = cone
        return tuple(
            Recompute(
                root.name,
                module_of(root),
                num_bytes_of(root.meta["val"]),
                sum(costs.compute(node) for node in cones[root].nodes),
                max(
                    (_own_bytes(node) for node in cones[root].nodes if node is not root), default=0
                ),
                tuple(n.name for n in cones[root].origins if n in cones),
                tuple(n.name for n in cones[root].origins),
                tuple(value.name for value in self.origins[root]),
                tuple(node.name for node in cones[root].passed if _own_bytes(node)),
            )
            for root in sorted(cones, key=self.place.__getitem__)
        )

    def _by_work(self) -> list[Node]:
        """The storages that could be computed again if all others were saved: those first that take
        the least arithmetic for each byte, which does not depend on the size of a batch; then in
        the order of forward.
        """
        found: list[tuple[float, int, Node]] = []
        ops = [root for root in self.origins if root.op == "call_function" and _is_tensor(root)]
        sizes = {root: num_bytes_of(root.meta["val"]) for root in ops}
        large = max(sizes.values(), default=0) / LEAST_SHARE
        for root in (root for root, num_bytes in sizes.items() if num_bytes >= large):
            if why_not_again(root) or self.is_held(root) or not self.are_views(root):
                continue
            cone = self.cone(root, {root})
            if cone is not None:
                work = sum(flops(node) for node in cone.nodes if is_matmul(node))
                found.append((work / max(1, sizes[root]), self.place[root], root))
        return [root for _, _, root in sorted(found, key=lambda entry: entry[:2])]


def origin(node: Node) -> Node:
    """The node whose value is all of the storage that a value lies in; of an op with several
    results, the one that was taken out.
    """
    found, i = node, 0
    source: tuple[Node, int] | None = (node, 0)
    while source is not None:
        node, i = source
        found = node if _is_tensor(node) else found
        source = source_of(node, i) if _is_tensor(node) or node is not found else None
    return found


def _views(node: Node, start: Node) -> list[Node]:
    """The views that lead from a storage to a value in it, the storage left out."""
    found = []
    while node is not start:
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def _own_bytes(node: Node) -> int:
    """Of a storage that a node allocates; 0 if its value lies in another's."""
    is_own = _is_tensor(node) and node.target is not UNSHARD and origin(node) is node
    return num_bytes_of(node.meta["val"]) if is_own else 0


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _depth(cones: dict[Node, Cone]) -> int:
    """How many candidates are made of each other, at most."""
    deep: dict[Node, int] = {}

    def depth(root: Node) -> int:
        if root not in deep:
            cone = cones[root]
            made_of = [n for n in cone.origins if n.op == "call_function"]
            counts = len(made_of) > 1 or any(map(is_matmul, cone.nodes))
            deep[root] = counts + max((depth(n) for n in made_of if n in cones), default=0)
        return deep[root]

    return max(map(depth, cones), default=0)
