"""The storages of a graph and how long each lives, for any order of its nodes.

Storages are counted, not tensors. A storage is born with the node that allocates it, and dies after
the last node that reads it or a view of it. Views are known by the ops' schemas, and by the
storages of fake values where a schema leaves it open (`reshape`). A collective needs its input and
its output until it is awaited. Sizes are hints where they are symbolic; of one that only the data
decides, what is expected (`ir/expected.py`).

For a scheduler: `Lifetimes` is built once, and `Lifetimes.curve(order)` is what any order of the
same nodes would need, in time linear in nodes and uses. Moving one node changes only the spans of
the storages in `Lifetimes.touched[node]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import quantized
from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.fusion import inlined, is_pointwise
from compiled_fsdp.ir.graph import is_backward, is_moved, output, placeholders
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.origins import key_of, num_bytes_of, source_of, tensors_of, unpacked
from compiled_fsdp.ir.schema import (
    ENCODE,
    FETCH_STATE,
    GATHER_AHEAD,
    GATHER_NEXT,
    ORTHOGONALIZE,
    UPDATE,
    param_spec,
    traits_of,
)
from compiled_fsdp.ir.states import rests_on_device, state_bytes
from compiled_fsdp.ir.subgraphs import unit_called_by

from .planner import MAX_AHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch import Tensor
    from torch.fx import Graph, Node

    from compiled_fsdp.ir.meta import CommTag

    Reads = tuple["Storage", ...]

GATHERED, BUCKET, IN_FLIGHT = "gathered parameter", "bucket buffer", "in-flight collective"
GRADIENT, ACTIVATION = "gradient", "activation saved for backward"
OUTPUT, TEMPORARY, STATE = "output", "temporary", "optimizer state"

CAT, SLICE = torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor
MOST_READS = 8  # Inductor's limit on what a value may be computed from before it gets a buffer


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation.

    node: what allocates it; a placeholder for what is alive when the graph starts.
    kind, owner: what it is for, and whose (unit, parameter or node); see `kind_at`.
    users: every node that needs it: readers of it and of its views, and the waits of collectives on
        it.
    under_way: (start, wait) of every collective that reads or writes it.
    is_kept: the graph returns it, or a view of it, or leaves it in flight.
    is_ahead: it was allocated before the graph: by the optimizer's step, or by an earlier one that
        it is the state of.
    over: storages of the same size that it is written over, if their life ends there.
    """

    node: Node
    num_bytes: int
    kind: str
    owner: str
    users: dict[Node, None] = field(default_factory=dict)
    under_way: list[tuple[Node, Node]] = field(default_factory=list)
    is_kept: bool = False
    is_ahead: bool = False
    over: list[Storage] = field(default_factory=list)

    def span(self, position: Mapping[Node, int]) -> tuple[int, int]:
        """First and last position at which it is alive, in an order of the nodes."""
        last = len(position) - 1 if self.is_kept else max(position[user] for user in self.users)
        return self.first(position), last

    def first(self, position: Mapping[Node, int]) -> int:
        """First position at which it is alive."""
        return 0 if self.is_ahead or self.node.op == "placeholder" else position[self.node]

    def kind_at(self, here: int, position: Mapping[Node, int]) -> str:
        """Its kind, or that a collective on it is under way."""
        is_under_way = any(
            position[start] <= here <= position[wait] for start, wait in self.under_way
        )
        return IN_FLIGHT if is_under_way else self.kind


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes alive in some order: `during[i]` while the i-th node runs, `after[i]` once what it was
    the last to need is freed.
    """

    during: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.during)

    @property
    def where(self) -> int:
        """Position of the peak; the first, if there are several."""
        return self.during.index(self.peak)


class Lifetimes:
    """The storages of a graph and which nodes need each: what does not depend on the order of the
    nodes.

    storages: all that are not at rest.
    touched: for each node, the storages that it allocates or needs.
    at_rest: bytes of placeholders that somebody else holds all the time.
    """

    def __init__(
        self,
        graph: Graph,
        is_fused: bool = False,
        resting: Collection[Node] | None = None,
        places: Mapping[Node, tuple[int, int]] | None = None,
    ) -> None:
        """`is_fused`: pointwise values that only kernels nearby read are not allocated, as under
        Inductor. `resting`: the placeholders that somebody else holds; by default all, but of a
        backward graph only the primals. `places`: for placeholders, the number and the bytes of the
        storage in which they lie, where their values do not show it.
        """
        self.graph = graph
        self.storages: list[Storage] = []
        self.at_rest = 0
        self._has_device = any(
            tensor is not None and tensor.device.type != "cpu"
            for node in graph.nodes
            for tensor in tensors_of(node)
        )
        self._is_fused = is_fused
        self._resting = _primals(graph) if resting is None else resting
        self._places = places or {}
        self._inputs: dict[tuple[str, int], Reads] = {}
        self._between: dict[Graph, int] = {}  # bytes that a unit's graph takes while it runs
        self._leaves: dict[Node, list[Reads]] = {}  # for each tensor in a node's value
        without_buffer = inlined(graph) if is_fused else ()
        for node in graph.nodes:
            if node in without_buffer:
                self._inline(node)
            else:
                self._visit(node)
                if is_fused and is_pointwise(node):
                    self._write_over(node)
        self._name()
        self._begin_ahead()
        self.touched: dict[Node, list[Storage]] = {node: [] for node in graph.nodes}
        for storage in self.storages:
            for node in dict.fromkeys((storage.node, *storage.users)):
                self.touched[node].append(storage)

    def of(self, node: Node) -> list[Storage]:
        """The storages that a node's value lies in, or is computed from where it is read; those at
        rest left out.
        """
        leaves = self._leaves.get(node, ())
        if len(leaves) == 1:
            return list(leaves[0])
        return list(dict.fromkeys(s for reads in leaves for s in reads))

    def curve(self, order: Iterable[Node] | None = None) -> Curve:
        """Bytes alive at each node of the graph, or of another order of its nodes."""
        position = {node: i for i, node in enumerate(self.graph.nodes if order is None else order)}
        ends = {storage: storage.span(position)[1] for storage in self.storages}
        born, dies, saved = ([0] * len(position) for _ in range(3))
        for storage in self.storages:
            first = storage.first(position)
            born[first] += storage.num_bytes
            dies[ends[storage]] += 0 if storage.is_kept else storage.num_bytes
            if any(ends[old] == first and not old.is_kept for old in storage.over):
                saved[first] = max(saved[first], storage.num_bytes)
        during, after, alive = [], [], 0
        for more, less, twice in zip(born, dies, saved, strict=True):
            during.append(alive + more - twice)
            alive += more - less
            after.append(alive)
        return Curve(tuple(during), tuple(after))

    # -- building

    def _visit(self, node: Node) -> None:
        if node.op == "placeholder":
            self._leaves[node] = [self._input(node, tensor) for tensor in tensors_of(node)]
        elif node.op == "call_function":
            self._leaves[node] = self._results(node)
        if node.target is GATHER_NEXT:
            self._keep_for_next(node)
        if node.target is UPDATE or node.target is ORTHOGONALIZE:
            self._compute_with(node)
        if node.target is UPDATE and (num_bytes := state_bytes(node)) and rests_on_device(node):
            kept = Storage(node, num_bytes, STATE, node.name, is_kept=True, is_ahead=True)
            self.storages.append(kept)
        if (body := unit_called_by(node)) is not None:
            self._compute_inside(node, body)
        needed = [s for n in (*node.all_input_nodes, node) for s in self.of(n)]
        awaits = traits_of(node.target).awaits
        if awaits:
            start = node.all_input_nodes[0]
            needed += [s for n in start.all_input_nodes for s in self.of(n)]
            for storage in needed:
                storage.under_way.append((start, node))
        for storage in needed:
            storage.users[node] = None
            storage.is_kept |= node.op == "output" or awaits == "unit"

    def _keep_for_next(self, node: Node) -> None:
        """What is gathered for the next step is alive until the end."""
        tag = get_tag(node)
        assert tag is not None
        num_bytes = quantized.gathered_bytes(tag.specs)
        kept = Storage(node, num_bytes, GATHERED, tag.unit.split("#")[0], is_kept=True)
        self.storages.append(kept)

    def _compute_with(self, node: Node) -> None:
        """An optimizer allocates values of its own while it runs; of those of torch that have a
        state, as many bytes as the gradient (the square root that Adam divides by), or as the
        matrix (which Newton-Schulz iterates).
        """
        grad: Any = node.args[0]
        inside = Storage(node, num_bytes_of(grad.meta["val"]), TEMPORARY, node.name)
        inside.users[node] = None
        self.storages.append(inside)

    def _compute_inside(self, node: Node, body: Graph) -> None:
        """The call of a unit's graph allocates what lies between its arguments and its results."""
        if body not in self._between:  # the same for all calls
            inside = Lifetimes(body, self._is_fused, list(placeholders(body)))
            results = sum(s.num_bytes for s in inside.storages if s.is_kept)
            self._between[body] = max(inside.curve().peak - results, 0)
        between = Storage(node, self._between[body], TEMPORARY, node.name)
        between.users[node] = None
        self.storages.append(between)

    def _inline(self, node: Node) -> None:
        """Who reads this reads what it is computed from."""
        reads = tuple(dict.fromkeys(s for n in node.all_input_nodes for s in self.of(n)))
        if len(reads) > MOST_READS:
            self._visit(node)
        else:
            self._leaves[node] = [reads]

    def _write_over(self, node: Node) -> None:
        """A generated kernel may write its result over an input that nobody needs any more."""
        for new in (s for s in self.of(node) if s.node is node):
            inputs = (s for n in node.all_input_nodes for s in self.of(n))
            new.over = [s for s in inputs if s.num_bytes == new.num_bytes]

    def _input(self, node: Node, tensor: Tensor | None) -> Reads:
        """The storage of a placeholder; several may be views of one."""
        if tensor is None or self._is_elsewhere(node, tensor):
            return ()
        place = self._places.get(node)
        key = ("value", key_of(tensor)) if place is None else ("place", place[0])
        if key not in self._inputs:
            num_bytes = num_bytes_of(tensor) if place is None else place[1]
            is_resting = node in self._resting
            self.at_rest += num_bytes if is_resting else 0
            self._inputs[key] = () if is_resting else (self._new(node, num_bytes),)
        return self._inputs[key]

    def _results(self, node: Node) -> list[Reads]:
        """For each tensor in the node's value: the storage of an input, or a new one."""
        found: list[Reads] = []
        for i, tensor in enumerate(tensors_of(node)):
            source = None if tensor is None else source_of(node, i)
            if source is not None:
                found.append(self._leaves[source[0]][source[1]])
            elif tensor is None or self._is_elsewhere(node, tensor):
                found.append(())
            else:
                found.append((self._new(unpacked(node), num_bytes_of(tensor)),))
        return found

    def _is_elsewhere(self, node: Node, tensor: Tensor) -> bool:
        """Whether it is in host memory beside a device that computes."""
        return is_moved(node) or (self._has_device and tensor.device.type == "cpu")

    def _begin_ahead(self) -> None:
        """The first gathers that the optimizer's step may start are under way when the graph
        begins.
        """
        room = MAX_AHEAD_BYTES
        for storage in self.storages:
            if storage.node.target is GATHER_AHEAD:
                room -= storage.num_bytes
                storage.is_ahead = room >= 0

    def _new(self, node: Node, num_bytes: int) -> Storage:
        self.storages.append(Storage(node, num_bytes, TEMPORARY, node.name))
        return self.storages[-1]

    # -- what is what

    def _name(self) -> None:
        """Say what each storage is for."""
        started: set[CommTag] = set()
        for node in self.graph.nodes:
            tag = get_tag(node)
            if node.target is FETCH_STATE:
                self._call(node, STATE, node.name)
            elif tag is not None:
                self._name_communicated(node, tag, tag in started)
            elif traits_of(node.target).lowers_to == "gather":
                self._call(node, GATHERED, param_spec(node).fqn)
            if tag is not None and traits_of(node.target).starts:
                started.add(tag)
        backward = is_backward(self.graph)
        saved = {s for n in saved_for_backward(output(self.graph)) for s in self.of(n)}
        for storage in self.storages:
            if storage.node.op == "placeholder":
                storage.kind = GRADIENT if storage.node.name.startswith("tangents") else ACTIVATION
            elif storage.is_kept and backward:
                storage.kind = GRADIENT
            elif storage.is_kept and storage.kind is TEMPORARY:
                storage.kind = ACTIVATION if storage in saved else OUTPUT

    def _name_communicated(self, node: Node, tag: CommTag, is_started: bool) -> None:
        unit = tag.unit.split("#")[0]
        is_start = bool(traits_of(node.target).starts)
        if tag.kind == "gather" and is_started:
            self._call(node, GATHERED, _copied(node, tag))
        elif tag.kind == "gather":
            is_coded = quantized.gathers_bytes(tag.specs)
            is_parameter = is_start and len(tag.specs) == 1 and not is_coded
            self._call(node, *((GATHERED, tag.specs[0].fqn) if is_parameter else (BUCKET, unit)))
        else:
            self._call(node, GRADIENT if is_started and not is_start else BUCKET, unit)
            if is_start and not is_started:
                self._name_gradients(node, tag)

    def _name_gradients(self, start: Node, tag: CommTag) -> None:
        """Name what goes into a reduction, before it is cast and put into the bucket."""
        joined = _first_outside(start.all_input_nodes[0], CAT, ENCODE)
        is_joined = joined.target in (CAT, ENCODE) and get_tag(joined) is not None
        pieces = joined.args[0] if is_joined else [joined]
        for piece, spec in zip(pieces, tag.specs, strict=False):  # type: ignore[arg-type]
            source = _first_outside(piece)
            for storage in (s for s in self.of(source) if s.kind is TEMPORARY):
                storage.kind, storage.owner = GRADIENT, spec.fqn

    def _call(self, node: Node, kind: str, owner: Any) -> None:
        for storage in self.of(node):
            if storage.node is node:
                storage.kind, storage.owner = kind, owner


def _primals(graph: Graph) -> list[Node]:
    """Placeholders for what the caller of forward holds."""
    found = list(placeholders(graph))
    return [n for n in found if n.name.startswith("primals")] if is_backward(graph) else found


def _first_outside(node: Node, *stops: object) -> Node:
    """Up the first inputs of a communication's nodes, to the first node outside or with a target to
    stop at.
    """
    while get_tag(node) is not None and node.target not in stops:
        node = node.all_input_nodes[0]
    return node


def _copied(node: Node, tag: CommTag) -> str:
    """The parameter that a copy out of a bucket is, by the columns it reads; else the unit."""
    columns = node.all_input_nodes[0]
    start = 0
    is_bytes = quantized.gathers_bytes(tag.specs)
    sizes = (
        quantized.gathered_payloads(tag.specs) if is_bytes else [s.shard_numel for s in tag.specs]
    )
    for spec, size in zip(tag.specs, sizes, strict=True):
        if columns.target is SLICE and columns.args[1:3] == (1, start):
            return spec.fqn
        start += size
    return tag.unit.split("#")[0]
