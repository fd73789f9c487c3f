"""The memory model: how many bytes are alive at each node of a final graph, the peak, and what is alive there.

    profile(forward)                  what the caller holds (parameters, batch) is at rest and counts nothing
    profile(backward)                 what forward saved is alive from the start, each until its last use
    profile_step(forward, backward)   both, and the outputs that the user holds

Storages are counted, not tensors. A storage is born with the node that allocates it, and dies after the last node that reads
it or a view of it. Views are known by the ops' schemas, and by the storages of fake values where a schema leaves it open
(`reshape`). A collective needs its input and its output until it is awaited. Sizes are hints where they are symbolic; one
that only the data decides counts nothing.

For a scheduler: `Lifetimes` is built once, and `Lifetimes.curve(order)` is what any order of the same nodes would need, in time
linear in nodes and uses. Moving one node changes only the spans of the storages in `Lifetimes.touched[node]`.

Private torch used here (tried on 2.13): `torch.utils._pytree.tree_leaves`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .collectives import CONVERT, STARTS, WAIT
from .graph import aliases, hint, is_backward, is_view, output, placeholders
from .meta import get_tag, saved_for_backward
from .schema import COPY_COLUMNS, FREE, MARK_GRADS, UNSHARD, UNSHARD_SLICE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

    from .meta import CommTag

    Reads = tuple["Storage", ...]

GATHERED, BUCKET, IN_FLIGHT = "gathered parameter", "bucket buffer", "in-flight collective"
GRADIENT, ACTIVATION = "gradient", "activation saved for backward"
OUTPUT, TEMPORARY = "output", "temporary"

RETURNS_INPUT = (WAIT, torch.ops.aten._unsafe_view.default)  # aliases that the schema does not declare
CAT, SLICE = torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor
MAY_COPY = (
    torch.ops.aten.reshape.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.flatten.using_ints,
)

aten = torch.ops.aten
CONSTANT = (aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default)
POINTWISE = (  # by Inductor's lowering, without torch's tag
    *CONSTANT,
    CONVERT,
    CAT,
    aten.clone.default,
    aten.copy.default,
    aten.constant_pad_nd.default,
    aten.embedding.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.where.self,
)
GENERATED = (  # kernels that Inductor generates, other than pointwise ones
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.argmax.default,
    aten.mean.dim,
    aten.prod.dim_int,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var.correction,
    aten.var_mean.correction,
)
ORDERED_ONLY = (*STARTS, WAIT, COPY_COLUMNS, FREE, MARK_GRADS, operator.getitem)  # no reason to split a chain
MOST_READS = 8  # Inductor's limit on what a value may be computed from before it gets a buffer


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation.

    node: what allocates it; a placeholder for what is alive when the graph starts.
    kind, owner: what it is for, and whose (unit, parameter or node); see `kind_at`.
    users: every node that needs it: readers of it and of its views, and the waits of collectives on it.
    under_way: (start, wait) of every collective that reads or writes it.
    is_kept: the graph returns it, or a view of it.
    over: storages of the same size that it is written over, if their life ends there.
    """

    node: Node
    num_bytes: int
    kind: str
    owner: str
    users: dict[Node, None] = field(default_factory=dict)
    under_way: list[tuple[Node, Node]] = field(default_factory=list)
    is_kept: bool = False
    over: list[Storage] = field(default_factory=list)

    def span(self, position: Mapping[Node, int]) -> tuple[int, int]:
        """First and last position at which it is alive, in an order of the nodes."""
        last = len(position) - 1 if self.is_kept else max(position[user] for user in self.users)
        return self.first(position), last

    def first(self, position: Mapping[Node, int]) -> int:
        """First position at which it is alive."""
        return 0 if self.node.op == "placeholder" else position[self.node]

    def kind_at(self, here: int, position: Mapping[Node, int]) -> str:
        """Its kind, or that a collective on it is under way."""
        is_under_way = any(position[start] <= here <= position[wait] for start, wait in self.under_way)
        return IN_FLIGHT if is_under_way else self.kind


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes alive in some order: `during[i]` while the i-th node runs, `after[i]` once what it was the last to need is freed."""

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
    """The storages of a graph and which nodes need each: what does not depend on the order of the nodes.

    storages: all that are not at rest.
    touched: for each node, the storages that it allocates or needs.
    at_rest: bytes of placeholders that somebody else holds all the time.
    """

    def __init__(self, graph: Graph, is_fused: bool = False, resting: Collection[Node] | None = None) -> None:
        """`is_fused`: pointwise values that only kernels nearby read are not allocated, as under Inductor. `resting`: the
        placeholders that somebody else holds; by default all, but of a backward graph only the primals.
        """
        self.graph = graph
        self.storages: list[Storage] = []
        self.at_rest = 0
        self._resting = _primals(graph) if resting is None else resting
        self._inputs: dict[int, Reads] = {}
        self._leaves: dict[Node, list[Reads]] = {}  # for each tensor in a node's value
        inlined = _inlined(graph) if is_fused else ()
        for node in graph.nodes:
            if node in inlined:
                self._inline(node)
            else:
                self._visit(node)
                if is_fused and _is_pointwise(node):
                    self._write_over(node)
        self._name()
        self.touched: dict[Node, list[Storage]] = {node: [] for node in graph.nodes}
        for storage in self.storages:
            for node in dict.fromkeys((storage.node, *storage.users)):
                self.touched[node].append(storage)

    def of(self, node: Node) -> list[Storage]:
        """The storages that a node's value lies in, or is computed from where it is read; those at rest left out."""
        return list(dict.fromkeys(s for reads in self._leaves.get(node, ()) for s in reads))

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
            self._leaves[node] = [self._input(node, tensor) for tensor in _tensors(node)]
        elif node.op == "call_function":
            self._leaves[node] = self._results(node)
        needed = [s for n in (*node.all_input_nodes, node) for s in self.of(n)]
        if node.target is WAIT:
            start = node.all_input_nodes[0]
            needed += [s for n in start.all_input_nodes for s in self.of(n)]
            for storage in needed:
                storage.under_way.append((start, node))
        for storage in needed:
            storage.users[node] = None
            storage.is_kept |= node.op == "output"

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
        if tensor is None:
            return ()
        key = _key(tensor)
        if key not in self._inputs:
            num_bytes = _num_bytes(tensor)
            is_resting = node in self._resting
            self.at_rest += num_bytes if is_resting else 0
            self._inputs[key] = () if is_resting else (self._new(node, num_bytes),)
        return self._inputs[key]

    def _results(self, node: Node) -> list[Reads]:
        """For each tensor in the node's value: the storage of an input, or a new one."""
        found: list[Reads] = []
        for i, tensor in enumerate(_tensors(node)):
            source = None if tensor is None else _source(node, i)
            if source is not None:
                found.append(self._leaves[source[0]][source[1]])
            else:
                found.append(() if tensor is None else (self._new(_unpacked(node), _num_bytes(tensor)),))
        return found

    def _new(self, node: Node, num_bytes: int) -> Storage:
        self.storages.append(Storage(node, num_bytes, TEMPORARY, node.name))
        return self.storages[-1]

    # -- what is what

    def _name(self) -> None:
        """Say what each storage is for."""
        started: set[CommTag] = set()
        for node in self.graph.nodes:
            tag = get_tag(node)
            if tag is not None:
                self._name_communicated(node, tag, tag in started)
            elif node.target in (UNSHARD, UNSHARD_SLICE):
                self._call(node, GATHERED, node.args[-1])
            if tag is not None and node.target in STARTS:
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
        is_start = node.target in STARTS
        if tag.kind == "gather" and is_started:
            self._call(node, GATHERED, _copied(node, tag))
        elif tag.kind == "gather":
            is_parameter = is_start and len(tag.specs) == 1
            self._call(node, *((GATHERED, tag.specs[0].fqn) if is_parameter else (BUCKET, unit)))
        else:
            self._call(node, GRADIENT if is_started and not is_start else BUCKET, unit)
            if is_start and not is_started:
                self._name_gradients(node, tag)

    def _name_gradients(self, start: Node, tag: CommTag) -> None:
        """What goes into a reduction, before it is cast and put into the bucket."""
        joined = _first_outside(start.all_input_nodes[0], CAT)
        pieces = joined.args[0] if joined.target is CAT and get_tag(joined) is not None else [joined]
        for piece, spec in zip(pieces, tag.specs, strict=False):  # type: ignore[arg-type]
            source = _first_outside(piece)
            for storage in (s for s in self.of(source) if s.kind is TEMPORARY):
                storage.kind, storage.owner = GRADIENT, spec.fqn

    def _call(self, node: Node, kind: str, owner: Any) -> None:
        for storage in self.of(node):
            if storage.node is node:
                storage.kind, storage.owner = kind, owner


# -- profiles


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


# -- fusion


def _inlined(graph: Graph) -> set[Node]:
    """Values that Inductor computes inside the kernels that read them: pointwise, and read only by generated kernels before the
    next call of a library's.
    """
    stretch: dict[Node, int] = {}
    calls = 0
    for node in graph.nodes:
        stretch[node] = calls
        calls += node.op == "call_function" and not _is_generated(node) and node.target not in ORDERED_ONLY
    found: set[Node] = set()
    for node in graph.nodes:
        if _is_pointwise(node):
            readers = _readers(node)
            is_near = node.target in CONSTANT or all(stretch[r] == stretch[node] for r in readers)
            if is_near and all(_is_generated(r) for r in readers):
                found.add(node)
    return found


def _readers(node: Node) -> list[Node]:
    """What reads a value or a view of it."""
    return [u for alias in aliases(node) for u in alias.users if not is_view(u)]


def _is_generated(node: Node) -> bool:
    return _is_pointwise(node) or node.target in GENERATED or is_view(node)


def _is_pointwise(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    tag = get_tag(node)
    if node.target is aten.clone.default and tag is not None and tag.kind == "gather":
        return False  # a call of `copy_columns`, so that the bucket need not live until the copy is read
    return torch.Tag.pointwise in node.target.tags or node.target in POINTWISE


# -- tensors, views and origins


def _primals(graph: Graph) -> list[Node]:
    """Placeholders for what the caller of forward holds."""
    found = list(placeholders(graph))
    return [n for n in found if n.name.startswith("primals")] if is_backward(graph) else found


def _tensors(node: Node) -> list[Tensor | None]:
    """Every leaf of a node's value; None for what is no tensor."""
    return [leaf if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(node.meta.get("val"))]


def _is_symbol(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _shape(node: Node) -> str:
    """As text: to compare symbols would make guards of them."""
    val = node.meta.get("val")
    return str(list(val.shape)) if isinstance(val, torch.Tensor) else "[]"


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _num_bytes(tensor: Tensor) -> int:
    size: Any = tensor.untyped_storage().nbytes()
    return hint(size)


def _source(node: Node, i: int) -> tuple[Node, int] | None:
    """Which tensor (the j-th of which node) the i-th of this node is a view of; None if it has a storage of its own."""
    if node.target is operator.getitem:
        parent: Any = node.args[0]
        if "val" not in parent.meta:
            return None
        values = list(parent.meta["val"])
        return parent, i + len(tree_leaves(values[: range(len(values))[node.args[1]]]))  # type: ignore[index]
    if node.target in RETURNS_INPUT:
        return node.all_input_nodes[0], 0
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    alias = returns[i if len(returns) > 1 else 0].alias_info
    source = None if alias is None else _aliased(node, alias.before_set)
    if source is None or (node.target in MAY_COPY and _key(node.meta["val"]) != _key(source.meta["val"])):
        return None
    return source, 0


def _unpacked(node: Node) -> Node:
    """What allocates a value: the partitioner's ops around random state have none of their own, only what is taken out of them."""
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _aliased(node: Node, names: set[str]) -> Node | None:
    """The argument that a result with these alias names may be a view of; the views in a list (`split`) have no names."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        info = argument.alias_info
        if info is not None and (not names or info.before_set & names):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, torch.fx.Node) else None
    return None


def _first_outside(node: Node, *stops: object) -> Node:
    """Up the first inputs of a communication's nodes, to the first node outside or with a target to stop at."""
    while get_tag(node) is not None and node.target not in stops:
        node = node.all_input_nodes[0]
    return node


def _copied(node: Node, tag: CommTag) -> str:
    """The parameter that a copy out of a bucket is, by the columns it reads; else the unit."""
    columns = node.all_input_nodes[0]
    start = 0
    for spec in tag.specs:
        if columns.target is SLICE and columns.args[1:3] == (1, start):
            return spec.fqn
        start += spec.shard_numel
    return tag.unit.split("#")[0]
