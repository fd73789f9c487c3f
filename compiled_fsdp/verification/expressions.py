"""The expressions of a graph: of each value, the op and the expressions of what it reads, whatever
the order. Equal expressions are one object.
"""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import is_sum, op_name, output, placeholders, value
from compiled_fsdp.ir.schema import traits_of
from compiled_fsdp.ir.subgraphs import called_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.fx import Graph, Node

aten = torch.ops.aten


class Expr:
    """An expression; compared by identity, since `Expressions` makes each once. `terms`: of a sum
    of reductions.
    """

    __slots__ = ("terms", "text")

    def __init__(self, text: str, terms: tuple[Any, ...] = ()) -> None:
        self.text = text
        self.terms = terms

    def __repr__(self) -> str:
        return self.text


class Expressions:
    """Makes each expression once; called like `launch.call`, it is the fourth executor of
    `collectives.py`.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Expr] = {}
        self.flattened: dict[Expr, tuple[Expr, tuple[int, ...]]] = {}  # a view: of what, its shape
        self.effects: list[Expr] = []  # of the calls since it was emptied

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Expr:
        """The expression `op(*args, **kwargs)`."""
        return self.of_plain(op, _plain(args), _plain(kwargs))

    def of_plain(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Expr:
        """The same of arguments as parts of a key."""
        result = self.make(op, args, kwargs)
        if has_effect(op):
            self.effects.append(result)
        return result

    def make(self, *key: Any) -> Expr:
        """The expression with this key."""
        if key not in self._known:
            self._known[key] = Expr(f"{op_name(key[0])} (#{len(self._known)})")
        return self._known[key]

    def sum_of(self, terms: Iterable[Any]) -> Expr:
        """The sum of reductions: their order does not count, since each fills a place of its
        own.
        """
        ordered = tuple(sorted(terms, key=repr))
        made = self.make("sum of reductions", ordered)
        made.terms = ordered
        return made


def has_effect(op: Any) -> bool:
    """Whether a call counts even if nobody reads the result."""
    traits = traits_of(op)
    is_mutable = isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
    return traits.effect == "program" or traits.is_collective or is_mutable


def walk(
    graph: Graph,
    run: Expressions,
    stands_for: Callable[[Expr, Node], Expr],
    note: Callable[[Node, dict[Node, Expr]], Expr | None] | None = None,
) -> tuple[dict[Node, Expr], list[Expr]]:
    """Returns the expression of every node, and those that have effects, in order.

    run: makes them; its effects are forgotten first.
    stands_for: what is taken instead of the expression of a node that is no input.
    note: what a node stands for whatever it reads; None for most.
    """
    exprs: dict[Node, Expr] = {}
    results: dict[Node, list[Expr]] = {}  # of each call of a subgraph
    bodies: dict[Graph, list[Line]] = {}
    run.effects = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            exprs[node] = run.make(node.op, str(node.target))
        elif (region := called_by(node)) is not None:
            arguments = [exprs[each] for each in node.args[2:]]
            if region not in bodies:
                bodies[region] = [_line(n) for n in region.nodes if n.op == "call_function"]
            results[node] = _called(region, bodies[region], arguments, run, stands_for)
        elif node.target is getitem and node.args[0] in results:
            exprs[node] = results[node.args[0]][node.args[1]]
        elif node.op == "call_function" and traits_of(node.target).effect != "notes":
            special = note(node, exprs) if note else None
            exprs[node] = special or _expression(node, run, exprs)
            exprs[node] = stands_for(exprs[node], node)
    return exprs, list(run.effects)


class Line(NamedTuple):
    """A node of a region, read once for all calls: the op and its arguments as parts of a key,
    nodes in the places of expressions; no op if what it means depends on what its arguments mean.
    """

    node: Node
    op: Any = None
    args: Any = ()
    kwargs: Any = ()


def _line(node: Node) -> Line:
    """Read a node of a region."""
    op, args, kwargs = cast("tuple[Any, Any, Any]", comm.as_in_torch(node))
    if op in (comm.WAIT, aten.view.default) or is_sum(node):
        return Line(node)
    return Line(node, op, _plain(args), _plain(kwargs))


def _called(
    region: Graph,
    lines: Sequence[Line],
    arguments: list[Expr],
    run: Expressions,
    stands_for: Callable[[Expr, Node], Expr],
) -> list[Expr]:
    """The expressions of what a region yields for the arguments of a call."""
    inside = dict(zip(placeholders(region), arguments, strict=True))
    for node, op, args, kwargs in lines:
        if op is None:
            found = _expression(node, run, inside)
        else:
            found = run.of_plain(op, _filled(args, inside), _filled(kwargs, inside))
        inside[node] = stands_for(found, node)
    return [inside[node] for node in output(region).args[0]]  # type: ignore[union-attr, index]


def _filled(plain: Any, exprs: dict[Node, Expr]) -> Any:
    """Parts of a key with expressions in the places of nodes."""
    if type(plain) is tuple:
        return tuple([_filled(each, exprs) for each in plain]) if plain else plain
    return exprs[plain] if isinstance(plain, torch.fx.Node) else plain


def _expression(node: Node, run: Expressions, exprs: dict[Node, Expr]) -> Expr:
    """The expression of a node, given those of what it reads."""

    def read(argument: Any) -> Any:
        return exprs[argument] if isinstance(argument, torch.fx.Node) else argument

    op, *arguments = cast("tuple[Any, ...]", comm.as_in_torch(node))
    if op is comm.WAIT and traits_of(node.all_input_nodes[0].target).starts == "copy":
        return exprs[node.all_input_nodes[0]]
    args, kwargs = (torch.fx.node.map_aggregate(a, read) for a in arguments)
    if is_sum(node) and all(a.terms for a in args):
        return run.sum_of(term for a in args for term in a.terms)
    if op is aten.view.default:
        return _view(node, run, *args)
    return run(op, *args, **kwargs)


def _view(node: Node, run: Expressions, viewed: Expr, sizes: Sequence[Any]) -> Expr:
    """The expression of a view; of one that has all dims again that another left out, what that one
    is a view of.
    """
    shape, before = (tuple(value(each).shape) for each in (node, node.all_input_nodes[0]))
    is_known = all(type(size) is int for size in (*shape, *before))  # others are not to be compared
    original, its_shape = run.flattened.get(viewed, (None, None))
    if is_known and original is not None and shape == its_shape:
        return original
    made = run(aten.view.default, viewed, sizes)
    if is_known and len(shape) == 1:
        run.flattened[made] = viewed, before
    return made


def returned(graph: Graph, exprs: dict[Node, Expr]) -> list[Any]:
    """The expressions that a graph returns; what is no node as it is."""
    return [exprs[n] if isinstance(n, torch.fx.Node) else n for n in output(graph).args[0]]  # type: ignore[union-attr]


def _plain(value: Any) -> Any:
    """Arguments as part of a key."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _plain(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _plain(value.start), _plain(value.stop), _plain(value.step)
    return (type(value).__name__, value) if isinstance(value, bool | int | float) else value
