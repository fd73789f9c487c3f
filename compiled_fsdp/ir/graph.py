"""FX basics that every pass uses: insert a node with its fake value, find views, roots of
additions, and phases.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from . import fakes, meta
from .collectives import HOST, STARTS
from .flops import formula_of
from .schema import (
    COPY_TO,
    FETCH_STATE,
    GATHER_NEXT,
    MOMENTUM,
    OFFLOAD,
    RELOAD,
    STORE_STATE,
    UPDATE,
    traits_of,
)
from .subgraphs import unit_called_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

ADD = torch.ops.aten.add.Tensor
CAT = torch.ops.aten.cat.default


def value(node: Node) -> Tensor:
    """The fake tensor that a node stands for.

    Raises:
        KeyError: the node has none; a pass inserted it without `Builder`.
    """
    if "val" not in node.meta:
        raise KeyError(
            f"node %{node.name} ({node.target}) has no meta['val']; insert nodes with graph.Builder"
        )
    tensor: Tensor = node.meta["val"]
    return tensor


class Builder:
    """Appends nodes: the graph executor for the functions in `collectives.py`.

    Each node gets its value by running the op on fake inputs, the stack trace of `like`, and `tag`.
    """

    def __init__(self, before: Node, like: Node, tag: meta.CommTag | None = None) -> None:
        self.graph: Graph = before.graph
        self.before = before
        self.like = like
        self.tag = tag
        self.nodes: list[Node] = []

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert `op(*args, **kwargs)` before the chosen node."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = fakes.run(op, torch.fx.node.map_arg(args, value), kwargs)
        for key in ("stack_trace", "nn_module_stack", "partitioner_tag"):
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        if self.tag is not None:
            meta.set_tag(node, self.tag)
        self.nodes.append(node)
        return node


def op_name(target: object) -> str:
    """Returns an op's name without namespace and overload, or that of another callable."""
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def find(graph: Graph, *targets: object) -> list[Node]:
    """The call nodes with one of these targets, in graph order; without a walk over the graph."""
    found = [n for t in dict.fromkeys(targets) for n in _called(graph, t)]
    return sorted(found)


def _called(graph: Graph, target: object) -> list[Node]:
    return graph.find_nodes(op="call_function", target=target, sort=False)  # type: ignore[arg-type]


def output(graph: Graph) -> Node:
    """The output node."""
    node: Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return node


def order(graph: Graph) -> dict[Node, int]:
    """Position of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def is_view(node: Node) -> bool:
    """Whether the result may share storage with the first argument, by the op's schema."""
    if node.target is operator.getitem:  # one of several views, as of `split`
        return is_view(node.args[0])  # type: ignore[arg-type]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _yields_views(node.target)


def is_undeclared_alias(node: Node) -> bool:
    """Whether the result is the first argument, though the op's schema does not say so."""
    return _is_undeclared_alias(node.target)


def _is_undeclared_alias(op: object) -> bool:
    return op is torch.ops.aten._unsafe_view.default or traits_of(op).is_alias


@cache
def _yields_views(op: torch._ops.OpOverload) -> bool:
    if _is_undeclared_alias(op):
        return True
    returns = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def aliases(node: Node) -> list[Node]:
    """`node` and everything that may be a view of it, in discovery order."""
    found = [node]
    for current in found:
        found.extend(
            u for u in current.users if is_view(u) and u.args[0] is current and u not in found
        )
    return found


def last_read(buffer: Node, position: dict[Node, int]) -> int:
    """The position from which nothing reads a buffer or a view of it any more, -1 if nothing does;
    a collective reads until it is awaited. Marks and steps of a flat buffer, and all that finds a
    whole step's optimizer by it, need its owner alone;
    what is gathered for the next step is another value of it.
    """
    readers = [u for alias in aliases(buffer) for u in alias.users if not _is_mark(u)]
    readers += [wait for u in readers if traits_of(u.target).starts for wait in u.users]
    return max((position[reader] for reader in readers), default=-1)


def _is_mark(node: Node) -> bool:
    """Whether this says which gradients are complete, of a reduction that is over, gathers for the
    next step, or is an optimizer's in a whole step.
    """
    traits = traits_of(node.target)
    is_of_step = bool(argument(node, "step"))
    return node.target is GATHER_NEXT or is_of_step or (traits.marks and not traits.awaits)


def argument(node: Node, name: str) -> Any:
    """An op's argument by its name; None if it has none of that name, or was not given it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    names = [each.name for each in node.target._schema.arguments]
    if name not in names:
        return None
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def is_sum(node: Node) -> bool:
    """Whether this is the plain addition of two values of the graph."""
    return (
        node.target is ADD
        and not node.kwargs
        and all(isinstance(a, torch.fx.Node) for a in node.args)
    )


def sum_root(node: Node) -> Node:
    """Follow additions that consume only this value up to where the sum is used."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_sum(user):
            break
        node = user
    return node


def sum_leaves(root: Node) -> list[Node]:
    """The terms of a tree of additions whose inner sums nobody else uses, left to right: order of
    arrival.
    """
    leaves: list[Node] = []
    stack = [root]
    # Not recursive: a unit of a thousand parameters is a sum a thousand additions deep.
    while stack:
        node = stack.pop()
        if is_sum(node) and (node is root or len(node.users) == 1):
            stack.extend(reversed(node.args))  # type: ignore[arg-type]
        else:
            leaves.append(node)
    return leaves


def join_batches(run: Builder, grad: Node, other: Node) -> Node:
    """The sum of flat gradients of two micro-batches: with its factor spelled out, so that `is_sum`
    takes each for a flat gradient of its own.
    """
    result: Node = run(ADD, grad, other, alpha=1)
    return result


def batch_leaves(root: Node) -> list[Node]:
    """The flat gradients of the micro-batches that `join_batches` has added up, first to last; of
    one alone, itself.
    """
    if root.target is ADD and root.kwargs == {"alpha": 1}:
        return [leaf for term in root.args for leaf in batch_leaves(term)]  # type: ignore[arg-type]
    return [root]


def batches_of(graph: Graph, losses: Sequence[Node], ones: Sequence[Node]) -> dict[Node, int]:
    """The micro-batch that each node of a training graph is for, counted from 0.

    losses: of the micro-batches, in order; what stands before one of them, and behind the one
        before, is its forward.
    ones: what their backwards begin with; what depends on several is for the last of them. What
        stands behind all losses and depends on none is for the first that reads it.
    """
    last = {one: i for i, one in enumerate(ones)}
    for node in graph.nodes:
        behind = [last[n] for n in node.all_input_nodes if n in last]
        if behind and node not in last:
            last[node] = max(behind)
    remaining, found = list(losses), dict(last)
    for node in graph.nodes:
        if node not in last and remaining:
            found[node] = len(losses) - len(remaining)
        if node in remaining:
            remaining.remove(node)
    for node in reversed(graph.nodes):
        if node not in found:
            found[node] = min((found[u] for u in node.users), default=len(losses) - 1)
    return found


def is_moved(node: Node) -> bool:
    """Whether this is an activation on the host: copied there, or what a backward gets of it."""
    if node.op == "placeholder":
        return bool(node.users) and all(map(is_way_back, node.users))
    is_host = node.target is OFFLOAD or (node.target is COPY_TO and node.args[1] == HOST)
    return bool(is_host) and meta.get_tag(node) is None


def way_of(node: Node) -> str:
    """Where a copy that has been started goes,
    to the host or to a type of device; "" for all else.
    """
    if traits_of(node.target).starts != "copy":
        return ""
    if node.target is OFFLOAD or node.target is STORE_STATE:
        return HOST
    return value(node).device.type if node.target is FETCH_STATE else str(node.args[1])


def copied(node: Node) -> Node:
    """Of a copy that has been started, the value that has the bytes that are copied."""
    return node.all_input_nodes[0] if node.target is STORE_STATE else node


def is_way_back(node: Node) -> bool:
    """Whether this copies an activation from the host to the device."""
    is_copy = node.target is RELOAD or (node.target is COPY_TO and node.args[1] != HOST)
    return bool(is_copy) and meta.get_tag(node) is None


def erase_unused(root: Node, *targets: object) -> None:
    """Erase `root` if nobody uses it and it has one of these targets; then likewise what it
    read.
    """
    erased: set[Node] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if not node.users and node.target in targets and node not in erased:
            stack.extend(node.all_input_nodes)
            node.graph.erase_node(node)
            erased.add(node)


def starts(graph: Graph) -> list[Node]:
    """Every node that starts a collective, in order."""
    return find(graph, *STARTS)


def backward_nodes(graph: Graph) -> set[Node]:
    """In a joint graph: what depends on a tangent."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if is_tangent or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def downstream(node: Node) -> set[Node]:
    """Everything that depends on `node`, the node itself left out."""
    found: set[Node] = set()
    stack: list[Node] = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def preparation(values: Iterable[Node]) -> list[Node] | None:
    """What these values are computed by from nothing but the graph's inputs, in order, themselves
    included; none of inputs. None if something among it communicates, or counts for more than its
    result.
    """
    found: set[Node] = set()
    stack = list(values)
    while stack:
        node = stack.pop()
        if node in found or node.op in ("placeholder", "get_attr"):
            continue
        traits = traits_of(node.target)
        if traits.starts or traits.awaits or traits.lowers_to or node.is_impure():
            return None
        found.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(found)


def is_backward(graph: Graph) -> bool:
    """Whether this is the backward half of a training graph, by its inputs."""
    inputs = graph.find_nodes(op="placeholder", sort=False)
    return any(n.name.startswith("tangents") for n in inputs)


def is_step(graph: Graph) -> bool:
    """Whether this is the graph of a whole training step: it updates parameters, and is the
    backward half of nothing.
    """
    return bool(find(graph, UPDATE, MOMENTUM)) and not is_backward(graph)


def phase_of(graph: Graph) -> str:
    """Backward, by the inputs; a whole step, by its updates; or forward."""
    if is_backward(graph):
        return "backward"
    return "step" if is_step(graph) else "forward"


def is_effect_token(node: Node) -> bool:
    """Whether this is what AOTAutograd puts ops with effects in an order by (`linalg.solve` checks
    for errors): None where the graph runs, whatever it is in the trace.
    """
    return any(
        user.target is torch.ops.higher_order.with_effects and user.args[0] is node
        for user in node.users
    )


def begin(graph: Graph, like: Node, op: Callable[..., Any], *args: Any) -> None:
    """Let a graph begin with an op that writes to a token, made like one of its inputs.

    Behind all inputs: Inductor has makers of tokens before them.
    """
    first = [*placeholders(graph)][-1].next
    run = Builder(first, first)
    run(op, run(torch.ops.aten.new_empty.default, like, [1], dtype=torch.uint8), *args)


def is_matmul(node: Node) -> bool:
    """Whether the node is heavy computation: there is a formula for its operations (`flops.py`)."""
    packet = getattr(node.target, "overloadpacket", None)
    return node.op == "call_function" and formula_of(packet) is not None


def is_heavy(node: Node) -> bool:
    """Whether the node is a matmul, or calls a unit's graph, which has some."""
    return is_matmul(node) or unit_called_by(node) is not None


def point(marks: Sequence[Node], position: float, end: Node) -> Node:
    """The node at a fractional position: 1.5 lies halfway, counted in matmuls, from marks[1] to
    marks[2] (or `end`).
    """
    index = int(position)
    if index >= len(marks):
        return end
    if index == position:
        return marks[index]
    upper = marks[index + 1] if index + 1 < len(marks) else end
    heavy = []
    node = marks[index].next
    while node is not upper and node.op != "root":
        if is_heavy(node):
            heavy.append(node)
        node = node.next
    return heavy[int((position - index) * len(heavy))] if heavy else upper


def unpack_at_once(graph: Graph) -> None:
    """Put each `getitem` right behind the node that yields several values."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.all_input_nodes[0]
        last = source
        while last.next.target is operator.getitem and last.next.all_input_nodes[0] is source:
            last = last.next
        if last < node:
            last.append(node)


def move_before(nodes: Iterable[Node], anchor: Node) -> None:
    """Put `nodes`, in the order given, directly before `anchor`."""
    for node in nodes:
        anchor.prepend(node)


def move_behind(nodes: Iterable[Node], anchor: Node) -> None:
    """Put `nodes`, in the order given, directly behind `anchor`."""
    for node in nodes:
        anchor.append(node)
        anchor = node


def erase_all(nodes: Iterable[Node]) -> None:
    """Erase nodes that nobody outside uses, last first."""
    for node in reversed(list(nodes)):
        node.graph.erase_node(node)


def placeholders(graph: Graph) -> Iterator[Node]:
    """The graph's inputs, in order; without a walk over the graph."""
    return iter(graph.find_nodes(op="placeholder"))
