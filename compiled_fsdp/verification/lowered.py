"""What a lowered graph has instead of the fsdp ops that were captured: which of its results stand
for theirs, and the effects of its communications. The arithmetic is that of `transfers.py`, run on
expressions.
"""

from __future__ import annotations

from itertools import groupby, islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import CAT
from compiled_fsdp.ir.meta import get_tag
from compiled_fsdp.ir.quantized import (
    codes_of_gather,
    codes_of_reduction,
    gathered_payloads,
    numels_of_gather,
)
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import GATHER_AHEAD, REDUCE_LATER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.fx import Graph, Node

    from compiled_fsdp.ir.meta import CommTag
    from compiled_fsdp.ir.spec import ParamSpec

    from .expressions import Expr, Expressions

MAX_READINGS = 16  # of a bucket in which one parameter has several gradients


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


class Lowered:
    """The form of a lowered graph that means what was captured.

    stands_for: what results of communications stand for.
    effects: that the communications have.
    left: sums that the unit completes, so that the graph neither returns nor marks them.
    parts: for each flat buffer and micro-batch, its reductions: parameters, what was captured of
        them, and the result before it is placed.
    """

    def __init__(self) -> None:
        self.stands_for: dict[Expr, list[tuple[tuple[ParamSpec, ...], Expr]]] = {}
        self.effects: list[Expr] = []
        self.left: set[Expr] = set()
        self.parts: dict[tuple[Expr, int], list[Part]] = {}

    def add(self, expr: Expr, specs: tuple[ParamSpec, ...], result: Expr) -> None:
        """In a communication of these parameters, `expr` stands for `result`."""
        self.stands_for.setdefault(expr, []).append((specs, result))

    def of(self, expr: Expr, node: Node) -> Expr:
        """Returns what the expression of a node stands for.

        Two units whose gradients are equal, as the biases of parallel branches, are reduced by the
        same expression, and so are those of two micro-batches of the same tensors: each
        communication is its own unit's and batch's then.
        """
        found = self.stands_for.get(expr, [])
        tag = _tag_of(node) if len(found) > 1 else None
        own = [
            result for specs, result in found if tag is not None and set(tag.specs) <= set(specs)
        ]
        return (own or [result for _, result in found] or [expr])[-1]


def _tag_of(node: Node) -> CommTag | None:
    """Of which communication a node is, or what it reads first: what puts parts together is of
    none.
    """
    while (tag := get_tag(node)) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return tag


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


def lowered_form(
    graph: Graph,
    run: Expressions,
    gathers: Mapping[ParamSpec, Sequence[Gather]],
    reduces: Mapping[ParamSpec, Sequence[Reduce]],
) -> Lowered:
    """Returns the form of a lowered graph that means what was captured of each parameter.

    run: made the expressions of what was captured.
    """
    lowered = Lowered()
    for kind in ("gather", "reduce"):
        for region in find_regions(graph, kind):
            known: Mapping[ParamSpec, Sequence[Any]] = gathers if kind == "gather" else reduces
            readings = product(*(known.get(spec, ()) for spec in region.tag.specs))
            for i, reading in enumerate(islice(readings, MAX_READINGS)):
                run.effects = []
                if kind == "gather":
                    _gather(run, region, reading, lowered)
                else:
                    _reduce(run, region, reading, lowered)
                if i == 0:
                    lowered.effects += run.effects
    for parts in lowered.parts.values():
        if len(parts) > 1:
            _join(run, parts, lowered)
    return lowered


def _gather(
    expressions: Expressions, region: Region, members: tuple[Gather, ...], lowered: Lowered
) -> None:
    """Add what an all-gather of these stands for."""
    specs, first = region.tag.specs, members[0].source
    run: Callable[..., Expr] = expressions
    if any(node.target is GATHER_AHEAD for node in region.nodes):
        run = Ahead(expressions, first.flat, specs)
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


def _reduce(
    run: Expressions, region: Region, members: tuple[Reduce, ...], lowered: Lowered
) -> None:
    """Add what a reduction of these stands for."""
    specs, first = region.tag.specs, members[0]
    grads = [(m.grad, m.grad_dtype, s) for m, s in zip(members, specs, strict=True)]
    summed = transfers.sum_bucket(run, grads, first.flat)
    if summed is None:
        return
    if len({m.flat for m in members}) > 1:
        _split(run, region, members, summed, lowered)
        return
    reduced = transfers.finished(run, summed, specs[0], first.dtype)
    lowered.parts.setdefault((first.flat, specs[0].batch), []).append(Part(specs, members, reduced))
    result = _sum(run, members)
    if any(node.target is REDUCE_LATER for node in region.nodes):
        # the last collective; a hook, which could follow it, is never left to the unit
        started = run.effects[-1]
        offsets, codes = sorted(s.offset for s in specs), codes_of_reduction(specs)
        run(REDUCE_LATER, started, first.flat, offsets, codes, *specs[0].args())
        numels = [s.shard_numel for s in specs]
        finished = transfers.finish_bucket(run, started, specs[0], first.dtype, numels, codes)
        if finished is reduced:
            lowered.left.add(result)
        return
    if len(specs) == 1:
        placed = transfers.place(run, reduced, first.numel, specs[0])
    else:
        placed = transfers.place_bucket(run, reduced, specs, first.numel)
    for expr in (placed, run(torch.ops.aten.clone.default, result)):
        lowered.add(expr, specs, result)


def _split(
    run: Expressions,
    region: Region,
    members: tuple[Reduce, ...],
    summed: Expr,
    lowered: Lowered,
) -> None:
    """Add what the flat gradients of several units, out of one reduction, stand for."""
    start = 0
    pairs = list(zip(members, region.tag.specs, strict=True))
    for _, group in groupby(pairs, key=lambda pair: pair[0].flat):
        unit = list(group)
        specs = [spec for _, spec in unit]
        stop = start + sum(spec.shard_numel for spec in specs)
        part = transfers.part_of_bucket(run, summed, start, stop, specs[0], unit[0][0].dtype)
        placed = transfers.place_bucket(run, part, specs, unit[0][0].numel)
        lowered.add(placed, region.tag.specs, _sum(run, (member for member, _ in unit)))
        start = stop


def _join(run: Expressions, parts: list[Part], lowered: Lowered) -> None:
    """Add what a flat gradient of several reductions, side by side, stands for."""
    parts = sorted(parts, key=lambda part: part.specs[0].offset)
    specs = tuple(spec for part in parts for spec in part.specs)
    members = [member for part in parts for member in part.members]
    joined = run(CAT, [part.reduced for part in parts])
    placed = transfers.place_bucket(run, joined, specs, members[0].numel)
    lowered.add(placed, specs, _sum(run, members))


def _sum(run: Expressions, members: Iterable[Reduce]) -> Expr:
    """The sum of what was captured of these."""
    return run.sum_of(term for member in members for term in member.result.terms)
