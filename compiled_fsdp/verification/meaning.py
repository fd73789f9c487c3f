"""The meaning of a half graph: what it computes and communicates, whatever its order, captured
before the passes and compared after them.

Every value gets an expression: the op and the expressions of what it reads; equal expressions are
one object. A captured `unshard` stands for itself. A lowered gather must have the expression that
`collectives.py` makes of the same parameters: then it stands for the same `unshard`. Likewise a sum
of `reduce_grad`s is the set of its terms, and a lowered reduction stands for the terms that it
carries. One that is left in flight has the place of the gradient and of its mark, if what the unit
does with it later completes the same expression. So both graphs return the same expressions and
have the same effects (collectives of the user's, marks, retained gradients, writes to buffers), or
a pass changed the program: a wrong buffer, group, dtype, column or divisor.

What this does not see is order, the business of the other invariants in `passes/verify.py`.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby, islice, product
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import CAT, find, is_sum, op_name, output, placeholders, sum_root, value
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.quantized import (
    codes_of_gather,
    codes_of_reduction,
    gathered_payloads,
    numels_of_gather,
)
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import (
    GATHER_AHEAD,
    MARK_GRADS,
    REDUCE_GRAD,
    REDUCE_LATER,
    STEP,
    UNSHARD_SLICE,
    param_spec,
    traits_of,
)
from compiled_fsdp.ir.subgraphs import called_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.fx import Graph, Node

    from compiled_fsdp.ir.spec import ParamSpec

MAX_READINGS = 16  # of a bucket in which one parameter has several gradients


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
    """Makes each expression once; called like `launch.call`, it is the fourth executor of that
    file.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Expr] = {}
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


class Ahead:
    """Makes the expressions of a gather of these, neighbours in a flat buffer, that may have
    started ahead.
    """

    def __init__(self, run: Expressions, flat: Expr, specs: Sequence[ParamSpec]) -> None:
        self.run, self.flat, self.specs = run, flat, specs

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Expr:
        """The expression `op(*args, **kwargs)`, of the start as the pass `gather_ahead` writes
        it.
        """
        if op not in comm.GATHERS:
            return self.run(op, *args, **kwargs)
        shard, *sizes, group_size, group = args
        specs = self.specs
        numels = numels_of_gather(specs)
        numel = sum(gathered_payloads(specs) if numels else [s.shard_numel for s in specs])
        return self.run(
            GATHER_AHEAD,
            shard,
            self.flat,
            specs[0].offset,
            *(sizes or [[numel]]),
            specs[0].dtype,
            group_size,
            group,
            numels,
            codes_of_gather(specs),
        )


class Lowered:
    """The form of a lowered graph that means what was captured.

    stands_for: what results of communications stand for.
    effects: that the communications have.
    left: sums that the unit completes, so that the graph neither returns nor marks them.
    parts: for each flat buffer, its reductions: parameters, what was captured of them, and the
        result before it is placed.
    """

    def __init__(self) -> None:
        self.stands_for: dict[Expr, list[tuple[tuple[ParamSpec, ...], Expr]]] = {}
        self.effects: list[Expr] = []
        self.left: set[Expr] = set()
        self.parts: dict[Expr, list[Part]] = {}

    def add(self, expr: Expr, specs: tuple[ParamSpec, ...], result: Expr) -> None:
        """In a communication of these parameters, `expr` stands for `result`."""
        self.stands_for.setdefault(expr, []).append((specs, result))

    def of(self, expr: Expr, node: Node) -> Expr:
        """Returns what the expression of a node stands for.

        Two units whose gradients are equal, as the biases of parallel branches, are reduced by the
        same expression: each communication is its own unit's then.
        """
        found = self.stands_for.get(expr, [])
        tag = get_tag(node) if len(found) > 1 else None
        own = [result for specs, result in found if tag is not None and specs == tag.specs]
        return (own or [result for _, result in found] or [expr])[-1]


class Gather(NamedTuple):
    """A captured `unshard`: its source and what it stands for."""

    source: transfers.Source
    result: Expr


class Reduce(NamedTuple):
    """A captured `reduce_grad`."""

    grad: Expr
    grad_dtype: torch.dtype
    flat: Expr
    numel: int
    dtype: torch.dtype
    result: Expr


class Part(NamedTuple):
    """One of several reductions for a flat gradient."""

    specs: tuple[ParamSpec, ...]
    members: tuple[Reduce, ...]
    reduced: Expr


class Captured:
    """A half graph before the passes: its expressions, and the fsdp ops that they have to turn into
    communication.
    """

    def __init__(self, graph: Graph) -> None:
        self.run = Expressions()
        self.gathers: dict[ParamSpec, list[Gather]] = {}
        self.reduces: dict[ParamSpec, list[Reduce]] = {}
        self.inputs = interface(placeholders(graph))
        exprs, effects = _walk(graph, self.run, lambda expr, _: expr, self._note)
        self.outputs = [None if _is_kept(e) else e for e in _returned(graph, exprs)]
        self.effects = [e for e in effects if e is not None]
        self.num_reduced = sum(len(found) for found in self.reduces.values())
        self.marks = self._expected_marks(graph, exprs)

    def _note(self, node: Node, exprs: dict[Node, Expr]) -> Expr | None:
        """Returns what an fsdp op stands for; None for other nodes."""
        run = self.run
        if traits_of(node.target).lowers_to == "gather":
            spec = param_spec(node)
            spec = spec.over_post_group() if node.target is UNSHARD_SLICE else spec
            source: Node = node.args[0]  # type: ignore[assignment]
            flat = transfers.Source(exprs[source], value(source).numel(), value(source).dtype)
            result = run.make("unshard", flat.flat, spec)
            known = self.gathers.setdefault(spec, [])
            if all(entry.result is not result for entry in known):
                known.append(Gather(flat, result))
            return result
        if node.target is REDUCE_GRAD:
            spec = param_spec(node)
            grad, flat_node = cast("tuple[Node, Node]", node.args[:2])
            place = value(flat_node)
            grad_expr, flat_expr = exprs[grad], exprs[flat_node]
            result = run.sum_of([("reduce_grad", grad_expr, flat_expr, spec)])
            entry = Reduce(
                grad_expr, value(grad).dtype, flat_expr, place.numel(), place.dtype, result
            )
            self.reduces.setdefault(spec, []).append(entry)
            return result
        return None

    def _expected_marks(
        self, graph: Graph, exprs: dict[Node, Expr]
    ) -> dict[Expr, tuple[Expr, list[int]]]:
        """Returns for each flat gradient that is fully reduced its flat buffer, and the offsets of
        its parameters.
        """
        found: dict[Node, tuple[Expr, list[int]]] = {}
        for node in graph.nodes:
            if node.target is REDUCE_GRAD:
                spec = param_spec(node)
                if spec.sync == "reduce":
                    found.setdefault(sum_root(node), (exprs[node.args[1]], []))[1].append(
                        spec.offset
                    )
        return {exprs[r]: (flat, sorted(offsets)) for r, (flat, offsets) in found.items()}

    # -- comparing

    def differences(self, graph: Graph) -> Iterator[tuple[Node, str]]:
        """Where the graph after `lower`, or after any later pass, is another program than the
        captured one.
        """
        lowered = self._lowered(graph)
        carried = Counter(self._is_reduced(region) for region in find_regions(graph, "reduce"))
        if carried[False]:
            yield output(graph), "a reduction carries gradients that were not captured"
        exprs, effects = _walk(graph, self.run, lowered.of)
        end = output(graph)
        stepped = {exprs[node.args[0]] for node in find(graph, STEP)}  # type: ignore[index]
        wanted = [None if expr in lowered.left | stepped else expr for expr in self.outputs]
        for i, (before, now) in enumerate(zip(wanted, _returned(graph, exprs), strict=False)):
            if before is not now:
                node = end.args[0][i]  # type: ignore[index]
                yield (node or end), f"output {i} is not what was captured"  # type: ignore[misc]
        marks = [
            self.run(STEP if result in stepped else MARK_GRADS, result, flat, offsets)
            for result, (flat, offsets) in self.marks.items()
            if result not in lowered.left
        ]
        expected = Counter([*self.effects, *lowered.effects, *marks])
        missing, surplus = expected - Counter(effects), Counter(effects) - expected
        for expr in surplus:
            node = next(n for n in reversed(graph.nodes) if exprs.get(n) is expr)
            yield (
                node,
                f"%{node.name} communicates or writes what was not captured, or once too often",
            )
        if missing:
            yield (
                end,
                "what was captured does not happen: "
                f"{sorted({e.text.split(' (')[0] for e in missing})}",
            )

    def _is_reduced(self, region: Region) -> bool:
        return all(spec in self.reduces for spec in region.tag.specs)

    def _lowered(self, graph: Graph) -> Lowered:
        lowered = Lowered()
        for kind in ("gather", "reduce"):
            for region in find_regions(graph, kind):
                known: dict[ParamSpec, list[Any]] = (
                    self.gathers if kind == "gather" else self.reduces
                )
                readings = product(*(known.get(spec, ()) for spec in region.tag.specs))
                for i, reading in enumerate(islice(readings, MAX_READINGS)):
                    self.run.effects = []
                    if kind == "gather":
                        self._gather(region, reading, lowered)
                    else:
                        self._reduce(region, reading, lowered)
                    if i == 0:
                        lowered.effects += self.run.effects
        for parts in lowered.parts.values():
            if len(parts) > 1:
                self._joined(parts, lowered)
        return lowered

    def _joined(self, parts: list[Part], lowered: Lowered) -> None:
        """A flat gradient of several reductions, side by side."""
        parts = sorted(parts, key=lambda part: part.specs[0].offset)
        specs = tuple(spec for part in parts for spec in part.specs)
        members = [member for part in parts for member in part.members]
        placed = transfers.place_bucket(
            self.run, self.run(CAT, [part.reduced for part in parts]), specs, members[0].numel
        )
        lowered.add(
            placed, (), self.run.sum_of(term for member in members for term in member.result.terms)
        )

    def _gather(self, region: Region, members: tuple[Gather, ...], lowered: Lowered) -> None:
        specs, first = region.tag.specs, members[0].source
        run: Callable[..., Expr] = self.run
        if any(node.target is GATHER_AHEAD for node in region.nodes):
            run = Ahead(self.run, first.flat, specs)
        if len(specs) == 1:
            full = transfers.unshard(run, first.flat, first.numel, first.dtype, specs[0])
            lowered.add(full, specs, members[0].result)
            return
        gathered = transfers.gather_bucket(
            run, [(m.source, s) for m, s in zip(members, specs, strict=True)]
        )
        bucket = transfers.GatheredBucket(specs)
        for place, member in enumerate(members):
            for is_copied in (True, False):
                copied = bucket.copy_out(run, gathered, place, is_copied=is_copied)
                lowered.add(copied, specs, member.result)

    def _reduce(self, region: Region, members: tuple[Reduce, ...], lowered: Lowered) -> None:
        run, specs, first = self.run, region.tag.specs, members[0]
        grads = [(m.grad, m.grad_dtype, s) for m, s in zip(members, specs, strict=True)]
        summed = transfers.sum_bucket(run, grads, first.flat)
        if summed is None:
            return
        if len({m.flat for m in members}) > 1:
            self._parts(region, members, summed, lowered)
            return
        reduced = transfers.finished(run, summed, specs[0], first.dtype)
        lowered.parts.setdefault(first.flat, []).append(Part(specs, members, reduced))
        result = run.sum_of(term for member in members for term in member.result.terms)
        if any(node.target is REDUCE_LATER for node in region.nodes):
            started = run.effects[
                -1
            ]  # the last collective; a hook, which could follow it, is never left to the unit
            offsets, codes = sorted(s.offset for s in specs), codes_of_reduction(specs)
            run(REDUCE_LATER, started, first.flat, offsets, codes, *specs[0].args())
            numels = [s.shard_numel for s in specs]
            if (
                transfers.finish_bucket(run, started, specs[0], first.dtype, numels, codes)
                is reduced
            ):
                lowered.left.add(result)
            return
        if len(specs) == 1:
            placed = transfers.place(run, reduced, first.numel, specs[0])
        else:
            placed = transfers.place_bucket(run, reduced, specs, first.numel)
        for expr in (placed, run(torch.ops.aten.clone.default, result)):
            lowered.add(expr, specs, result)

    def _parts(
        self, region: Region, members: tuple[Reduce, ...], summed: Expr, lowered: Lowered
    ) -> None:
        """Flat gradients of several units, out of one reduction."""
        start = 0
        pairs = list(zip(members, region.tag.specs, strict=True))
        for _, group in groupby(pairs, key=lambda pair: pair[0].flat):
            unit = list(group)
            specs = [spec for _, spec in unit]
            stop = start + sum(spec.shard_numel for spec in specs)
            part = transfers.part_of_bucket(
                self.run, summed, start, stop, specs[0], unit[0][0].dtype
            )
            placed = transfers.place_bucket(self.run, part, specs, unit[0][0].numel)
            result = self.run.sum_of(term for member, _ in unit for term in member.result.terms)
            lowered.add(placed, region.tag.specs, result)
            start = stop


def interface(nodes: Iterable[Node]) -> list[str]:
    """Names, dtypes and shapes of the inputs."""
    return [f"{n.name}: {_type(n.meta.get('val'))}" for n in nodes]


def _type(val: Any) -> str:
    return f"{val.dtype}{list(val.shape)}" if isinstance(val, torch.Tensor) else type(val).__name__


def has_effect(op: Any) -> bool:
    """Whether a call counts even if nobody reads the result."""
    traits = traits_of(op)
    is_mutable = isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
    return traits.effect == "program" or traits.is_collective or is_mutable


def _walk(
    graph: Graph,
    run: Expressions,
    stands_for: Callable[[Expr, Node], Expr],
    note: Callable[[Node, dict[Node, Expr]], Expr | None] | None = None,
) -> tuple[dict[Node, Expr], list[Expr]]:
    """The expression of every node, and those with effects."""
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
    op, args, kwargs = cast("tuple[Any, Any, Any]", comm.as_in_torch(node))
    if op is comm.WAIT or is_sum(node):
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
    def read(argument: Any) -> Any:
        return exprs[argument] if isinstance(argument, torch.fx.Node) else argument

    op, *arguments = cast("tuple[Any, ...]", comm.as_in_torch(node))
    if op is comm.WAIT and traits_of(node.all_input_nodes[0].target).starts == "copy":
        return exprs[node.all_input_nodes[0]]
    args, kwargs = (torch.fx.node.map_aggregate(a, read) for a in arguments)
    if is_sum(node) and all(a.terms for a in args):
        return run.sum_of(term for a in args for term in a.terms)
    return run(op, *args, **kwargs)


def _returned(graph: Graph, exprs: dict[Node, Expr]) -> list[Any]:
    return [exprs[n] if isinstance(n, torch.fx.Node) else n for n in output(graph).args[0]]  # type: ignore[union-attr]


def _is_kept(expr: Any) -> bool:
    """A flat gradient whose terms the unit keeps for a later backward: the graph returns None for
    it.
    """
    return isinstance(expr, Expr) and bool(expr.terms) and expr.terms[0][3].sync != "reduce"


def _plain(value: Any) -> Any:
    """Arguments as part of a key."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _plain(v)) for k, v in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _plain(value.start), _plain(value.stop), _plain(value.step)
    return (type(value).__name__, value) if isinstance(value, bool | int | float) else value
