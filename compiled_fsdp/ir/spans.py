"""Computation between collectives.

A span is what a graph computes between two nodes that have to stay where they are: collectives and
their waits, what writes, what marks gradients, random numbers of torch's generator. Views belong to
it where it makes what they view. Two spans are equal if their nodes, one by one, have the same op,
options, shapes, strides, dtypes, and read the same places of each other.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from .fusion import BECOME_WRITES
from .graph import find, is_matmul, is_view, output
from .meta import get_tag, makes_sizes
from .schema import COPIES_OUT, FREE, MARK_GRADS, MOMENTUM, TRAITS, UPDATE
from .storage import CASTS, may_alias, read_first, storage_of, written_by
from .subgraphs import unit_called_by
from .traffic import connected, saved_by_moving
from .unknown_sizes import Names

if TYPE_CHECKING:
    from torch.fx import Graph

aten, prims = torch.ops.aten, torch.ops.prims

ALIGNMENT = 64  # bytes: what vectors and kernels may assume of an address
_KNOWN = frozenset((int,))  # the type of a size that is no symbol
SIZES_OF = {
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
}
_REDUCTIONS = {
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.var_mean.correction,
}


@dataclass(eq=False)
class Span:
    """Nodes that compute, in the order in which they do, with nothing between them that has to
    stay. What it reads and yields is that of the graph when it was first asked for.

    num_moved: how many of the first stand before the collective that the others follow.
    left_out: nodes that stand among the others, and are part of a write behind all of them.
    """

    nodes: list[Node]
    num_moved: int = 0
    left_out: list[Node] = field(default_factory=list)

    @cached_property
    def inside(self) -> set[Node]:
        """The nodes as a set."""
        return set(self.nodes)

    @property
    def unit(self) -> str:
        """The first unit whose parameters it reads; "" for none."""
        for node in (*self.nodes, *self.inputs):
            if (tag := get_tag(node)) is not None:
                return tag.unit.split("#")[0]
        return ""

    @cached_property
    def inputs(self) -> list[Node]:
        """The nodes outside that it reads, in order of first reading."""
        found: dict[Node, None] = {}
        for node in self.nodes:
            found.update((n, None) for n in _read_by(node) if n not in self.inside)
        return list(found)

    @cached_property
    def outputs(self) -> list[Node]:
        """The nodes with storage of their own that others read, or view, in order."""
        found = {self.base(n): None for n in self.nodes if self.is_read_outside(n)}
        return [node for node in self.nodes if node in found]

    def is_read_outside(self, node: Node) -> bool:
        """Whether others read this node of it."""
        return any(user not in self.inside for user in node.users)

    def base(self, node: Node) -> Node:
        """Returns the node in it that a view is a view of."""
        while may_alias(node) and read_first(node) in self.inside:
            node = read_first(node)
        return node

    @cached_property
    def names(self) -> Names:
        """What stands for sizes that only data decides."""
        return Names(n.meta.get("val") for n in self.inputs)

    @property
    def is_callable(self) -> bool:
        """Whether it can be called as a function: of tensors, and sizes of theirs, on one device,
        at least one tensor in and one out, none of which is a tuple or lies in another. Their
        strides are numbers: a subgraph of Inductor's yields others than it says where data decides
        these.
        """
        inputs, outputs = self.inputs, self.outputs
        given = [n.meta.get("val") for n in inputs]
        values = [v for v in given if not isinstance(v, torch.SymInt)]
        values += [n.meta.get("val") for n in outputs]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        return (
            any(isinstance(value, torch.Tensor) for value in given)
            and bool(outputs)
            and len(tensors) == len(values)
            and len({tensor.device for tensor in tensors}) == 1
            and not any(may_alias(n) for n in outputs)
            and all(map(_keeps_dims, (*inputs, *outputs)))
            and all(_KNOWN.issuperset(map(type, tensor.stride())) for tensor in tensors)
            and None not in self._values.values()
        )

    @cached_property
    def _values(self) -> dict[Node, tuple[Any, ...] | None]:
        """What inputs and nodes yield, with names for sizes; None for what has none."""
        inputs = {node: _values(node, self.names, is_input=True) for node in self.inputs}
        return inputs | {node: _values(node, self.names) for node in self.nodes}

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Its computation without names: equal for equal spans."""
        number = {node: i for i, node in enumerate(self.nodes)}
        inputs = {node: -1 - i for i, node in enumerate(self.inputs)}
        lines = tuple(
            (
                n.target,
                _form(n.args, number, inputs),
                _form(n.kwargs, number, inputs),
                self._values[n],
            )
            for n in self.nodes
        )
        outputs = tuple(number[n] for n in self.outputs)
        return (lines, tuple(self._values[n] for n in inputs), outputs, self.names.bounds)


def spans(graph: Graph) -> list[Span]:
    """Returns all spans, in graph order.

    A cheap value that only the next span reads is part of that one, so that both are one kernel:
    the last addition of a layer and the norm of the next. But not where kernels would read and
    write more: a sum of what is in hand stays.
    """
    found, writes = _between(graph)
    stands = {node: i for i, span in enumerate(found) for node in span.nodes}
    belongs = dict(stands)
    end = output(graph)
    for i in range(len(found) - 1):
        moved = []
        for node in reversed(found[i].nodes):
            users = [user for user in node.users if user is not end]
            is_read_there = users and all(belongs.get(user) == i + 1 for user in users)
            if is_read_there and _is_movable(node) and not _touches(node, writes[i]):
                belongs[node] = i + 1
                moved.append(node)
        moved = _worth_moving(moved, found[i], found[i + 1])
        for node in found[i].nodes:
            belongs[node] = i + (node in moved)
        if moved:
            found[i] = Span([n for n in found[i].nodes if belongs[n] == i])
            found[i + 1] = Span([*reversed(moved), *found[i + 1].nodes])
    for i, span in enumerate(found):
        span.num_moved = sum(stands[n] < i for n in span.nodes)
    return [span for span in found if span.nodes]


def _worth_moving(moved: list[Node], here: Span, there: Span) -> list[Node]:
    """Those of some nodes with which kernels do not read and write more in the next span."""
    worth: set[Node] = set()
    for together in connected(moved):
        if saved_by_moving(together, here.inside - worth, there.inside | worth) >= 0:
            worth |= together
    return [node for node in moved if node in worth]


def _between(graph: Graph) -> tuple[list[Span], list[set[Node]]]:
    """Returns the spans as they stand, and for each the values that are written to behind it, up to
    the next.
    """
    found: list[Span] = []
    writes: list[set[Node]] = []
    inside: set[Node] = set()  # the last span, until something ends it
    of_updates = _of_updates(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target in (FREE, _seed()):
            continue
        if _is_about_sizes(node, inside):
            continue
        if _has_to_stay(node) or node in of_updates:
            if is_view(node) and node.target not in TRAITS:
                continue
            inside = set()
            if writes:
                writes[-1].update(map(storage_of, written_by(node)))
        elif not is_view(node) or read_first(node) in inside:
            if not inside:
                found.append(Span([]))
                writes.append(set())
            found[-1].nodes.append(node)
            inside.add(node)
    return found, writes


def _of_updates(graph: Graph) -> set[Node]:
    """What a whole step makes of reduced gradients, and of those of parameters that no unit has, up
    to their updates: it stands where `place_updates` has put it, and rules are about it.
    """
    found: set[Node] = set()
    updates = find(graph, UPDATE, MOMENTUM)
    if not updates:
        return found
    stack = [user for mark in find(graph, MARK_GRADS) for user in _grad_of(mark).users]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    for update in updates:
        grad = _grad_of(update)
        while grad.target is aten.mul.Tensor:
            found.update((grad, *(n for n in grad.all_input_nodes[1:] if n.target in CASTS)))
            grad = grad.all_input_nodes[0]
    return found


def _grad_of(node: Node) -> Node:
    """The flat gradient that a mark or an update is about."""
    return node.args[0]  # type: ignore[return-value]


def _seed() -> object:
    """The op that reads one of a graph's seeds: which one is its argument, so equal layers differ
    by it. It stands outside of spans, and ends none.
    """
    return getattr(prims.inductor_lookup_seed, "default", None)


def _is_about_sizes(node: Node, inside: set[Node]) -> bool:
    """Whether a node computes with sizes alone, none of which is that of a value of a span: it
    stands outside of spans, and ends none.
    """
    if node.op != "call_function" or makes_sizes(node):
        return False
    values, read = _given(node), node.all_input_nodes
    return (
        bool(read)
        and not any(isinstance(value, torch.Tensor) for value in values)
        and inside.isdisjoint(read)
        and (node.target in SIZES_OF or not any(_given(n) and _yields_tensors(n) for n in read))
    )


def _has_to_stay(node: Node) -> bool:
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return _has_to_stay(read_first(node))
    if unit_called_by(node) is not None:
        return not _is_static(node)
    op = node.target
    return not isinstance(op, torch._ops.OpOverload) or _stays(op) or not _yields_tensors(node)


@cache
def _stays(op: torch._ops.OpOverload) -> bool:
    """Whether calls of an op have to stay where they are, whatever they yield."""
    is_ours = op in TRAITS and op not in COPIES_OUT
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    # Scatters into a view (`select_scatter`: the gradient of a part) may stand in a span: its
    # subgraph is lowered as it is, and there they are pointwise.
    return op in BECOME_WRITES or is_ours or is_random or bool(op._schema.is_mutable)


def _is_movable(node: Node) -> bool:
    """Whether a node may be computed behind the collective that follows: it is fused with what
    reads it, and reads no parameter, which would live on, and no input of the graph.
    """
    if node.target is operator.getitem:
        return _is_movable(read_first(node))
    op: Any = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    is_cheap = is_view(node) or torch.Tag.pointwise in op.tags or op in _REDUCTIONS | CASTS
    roots = [storage_of(read) for read in node.all_input_nodes]
    return (
        is_cheap
        and get_tag(node) is None
        and not is_matmul(node)
        and all(root.op == "call_function" and get_tag(root) is None for root in roots)
    )


def _touches(node: Node, written: set[Node]) -> bool:
    """Whether a node reads what is written to."""
    return bool(written) and any(storage_of(read) in written for read in node.all_input_nodes)


def _read_by(node: Node) -> list[Node]:
    """The values that a node reads, constants among them: of the call of a unit all but its
    graph.
    """
    read = node.all_input_nodes
    return read[1:] if unit_called_by(node) is not None else read


def without_parts_of_writes(span: Span) -> Span:
    """A span without the cheap values that nothing reads but what becomes a write behind it, with
    which they are one kernel: a scatter of tokens to where they came from, say.
    """
    left: dict[Node, None] = {}
    for node in reversed(span.nodes[span.num_moved :]):
        is_read = all(u in left or u.target in BECOME_WRITES for u in node.users)
        if node.users and is_read and _is_movable(node):
            left[node] = None
    if all(map(may_alias, left)):
        return span
    nodes = [node for node in span.nodes if node not in left]
    return Span(nodes, span.num_moved, [*reversed(left)])


def may_lose_dims(node: Node) -> bool:
    """Whether Inductor may return less dims than it says: on a GPU, sums over rows that it computes
    together with sums over columns ("mix-order reductions", torch 2.11 to 2.13) are one-dimensional
    whatever they are to be. Its kernels do not mind, but a call that checks sizes raises: such
    a sum crosses the border of a region as a view with one dim, or, if it is not contiguous, is no
    region's.
    """
    value = node.meta.get("val")
    if node.target is not aten.sum.dim_IntList or not isinstance(value, torch.Tensor):
        return False
    ndim = read_first(node).meta["val"].ndim
    dims = {dim % ndim for dim in node.args[1] or range(ndim)}  # type: ignore[union-attr]
    return value.device.type != "cpu" and value.ndim > 1 and ndim - 1 not in dims


def _keeps_dims(node: Node) -> bool:
    """Whether a value crosses the border of a region as it is, or can with one dim."""
    return not may_lose_dims(node) or (
        not yields_dynamic(node) and node.meta["val"].is_contiguous()
    )


def _yields_tensors(node: Node) -> bool:
    """Whether a node yields tensors alone, or nothing, and decides no size."""
    is_all = all(isinstance(value, torch.Tensor) for value in _given(node))
    return is_all and not makes_sizes(node)


def _is_static(node: Node) -> bool:
    """Whether a node yields tensors of known sizes alone."""
    return all(isinstance(v, torch.Tensor) for v in _given(node)) and not yields_dynamic(node)


def yields_dynamic(node: Node) -> bool:
    """Whether a node yields a size that is not known, or a tensor of such sizes."""
    sizes: list[Any] = []
    for value in _given(node):
        is_tensor = isinstance(value, torch.Tensor)
        sizes += (*value.shape, *value.stride(), value.storage_offset()) if is_tensor else [value]
    return not _KNOWN.issuperset(map(type, sizes)) and any(
        isinstance(size, torch.SymInt) for size in sizes
    )


def _given(node: Node) -> list[Any]:
    values = node.meta.get("val")
    found = values if isinstance(values, list | tuple) else (values,)
    return [value for value in found if value is not None]


def _form(argument: Any, number: dict[Node, int], inputs: dict[Node, int]) -> Any:
    if isinstance(argument, Node):
        place = number.get(argument, inputs.get(argument))
        return ("graph", argument.target) if place is None else ("%", place)
    if isinstance(argument, list | tuple):
        return tuple(_form(each, number, inputs) for each in argument)
    if isinstance(argument, dict):
        return tuple((k, _form(v, number, inputs)) for k, v in sorted(argument.items()))
    return repr(argument)


def _values(node: Node, names: Names, *, is_input: bool = False) -> tuple[Any, ...] | None:
    """What a node yields, with names for sizes; None if one has none."""
    values = node.meta.get("val")
    each = values if isinstance(values, list | tuple) else (values,)
    found = tuple(_value(value, names, is_input=is_input) for value in each)
    return None if () in found else found


def _value(value: Any, names: Names, *, is_input: bool) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        size = names.of(value) if isinstance(value, int | torch.SymInt) else None
        return () if size is None else ("size", size)
    sizes, offset = (*value.shape, *value.stride()), value.storage_offset()
    if _KNOWN.issuperset(map(type, (*sizes, offset))):
        place = offset * value.element_size() % ALIGNMENT
        return (value.dtype, sizes, place, value.device)
    named, begin = tuple(map(names.of, sizes)), names.of(offset)
    if None in named or (is_input and not _is_aligned(begin, value)):
        return ()
    return (value.dtype, named, value.device)


def _is_aligned(begin: Any, value: torch.Tensor) -> bool:
    """Whether a tensor of unknown sizes, or at an unknown place, begins where vectors may: inside
    of a region, Inductor takes that for granted.
    """
    return begin is not None and begin * value.element_size() % ALIGNMENT == 0
