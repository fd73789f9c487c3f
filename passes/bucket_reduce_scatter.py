"""Reduce the gradients of a unit with one collective, whose result is the flat gradient itself.

Small units whose gradients follow each other share one.

Before:

    %g0 = constant_pad_nd(div(wait(reduce_scatter(reshape(%d0, [N * n0]))), world))
    %g1 = constant_pad_nd(div(wait(reduce_scatter(reshape(%d1, [N * n1]))), world))
    %g = add(%g1, %g0)
    mark_grads_(%g, %flat, offsets)

After:

    %rows = cat([reshape(%d0, [N, n0]), reshape(%d1, [N, n1])], 1)
    %g = div(wait(reduce_scatter(reshape(%rows, [N * (n0 + n1)]))), world)
    mark_grads_(%g, %flat, offsets)

Requires: a lowered graph.
Ensures: one reduction for each flat gradient and way of reducing, where its last gradient is ready.
    Where parameters have no gradient, zeros fill their place and nothing is communicated for them.
    What is kept after the shard axis (`sync="scatter"`) is reduced once for each flat buffer too.
    Units share a reduction, and copy their flat gradients out of its result, while together they
    are no larger than `plan.bucket_limit`; one larger than `plan.split_bytes` is reduced in parts
    of about that, each where its last gradient is ready.
Leaves alone: a sum with a term that is not a reduction, or that is read by something else too. Each
    unit for itself, whatever its size: where gradients are kept for a later backward, or the user
    gave a reduction, a hook, a bound on reductions under way or `overlap_optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import (
    ADD,
    CAT,
    Builder,
    downstream,
    erase_all,
    erase_unused,
    is_step,
    sum_leaves,
    sum_root,
    value,
)
from compiled_fsdp.ir.meta import CommTag
from compiled_fsdp.ir.regions import Region, find_regions, together
from compiled_fsdp.ir.schema import MARK_GRADS

from .base import consume

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node

    from compiled_fsdp.ir.spec import ParamSpec
    from compiled_fsdp.planning.plan import Plan


def bucket_reduce_scatter(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = {region.result: region for region in find_regions(gm.graph, "reduce")}
    for alike in _units(regions).values():
        consume(gm)
        limit = plan.bucket_limit(alike[0].bucket[0].spec.group)
        for neighbours in together(alike, lambda unit: unit.nbytes, limit):
            if len(neighbours) > 1:
                _share(neighbours)
            elif len(parts := neighbours[0].parts(plan.split_bytes or 0)) > 1:
                _split(neighbours[0].root, parts)
            elif len(neighbours[0].bucket) > 1:
                _merge(neighbours[0].root, neighbours[0].bucket)
    _merge_scattered(list(regions.values()))
    return gm


def _merge_scattered(regions: list[Region]) -> None:
    """One reduction over the shard axis for each flat buffer whose gradients are kept after it."""
    scattered: dict[Node, list[Region]] = {}
    for region in regions:
        if region.spec.sync == "scatter":
            scattered.setdefault(region.sources[-1], []).append(region)
    for bucket in scattered.values():
        for members in _by_way(bucket):
            _reduce(members, bucket[0].sources[-1])
            for region in members:
                erase_all(region.nodes)


@dataclass(frozen=True, slots=True)
class Unit:
    """A flat gradient, and the reductions that it is the sum of."""

    root: Node
    bucket: list[Region]

    @property
    def nbytes(self) -> float:
        """The bytes of the full gradients, as they are reduced."""
        return sum(map(_nbytes, self.bucket))

    def parts(self, limit: int) -> list[list[Region]]:
        """Cut along the flat buffer into parts of about this size; whole if it is to stay alone."""
        if not limit or self.is_alone or self.nbytes <= limit:
            return [self.bucket]
        return together(sorted(self.bucket, key=lambda r: r.spec.offset), _nbytes, limit)

    @property
    def is_alone(self) -> bool:
        """Whether something of the user's or of the unit's own depends on this reduction as it
        is.
        """
        spec, how = self.bucket[0].spec, self.bucket[0].spec.reduction
        ways = {(r.spec.unit, r.spec.group, r.spec.reduction) for r in self.bucket}
        is_plain = how.sync == "reduce" and not (
            how.is_accumulating or how.hook or how.algorithm.startswith(comm.CUSTOM)
        )
        readers = {user.target for user in self.root.users}
        is_bound = bool(spec.overlap or spec.reduces_in_flight) or spec.group_size == 1
        is_read = not readers <= {MARK_GRADS, "output"} and not is_step(self.root.graph)
        return len(ways) > 1 or not is_plain or is_bound or is_read

    @property
    def way(self) -> tuple[object, ...]:
        """The same for units that may share a reduction; of its own for others."""
        spec = self.bucket[0].spec
        if self.is_alone:
            return (self.root,)
        how = (spec.reduction, value(self.root).dtype, spec.batch)
        return (spec.group, spec.reduce_group, spec.dtype, *how)


def _nbytes(region: Region) -> int:
    return region.spec.full_bytes(region.spec.reduce_dtype)


def _units(regions: dict[Node, Region]) -> dict[tuple[object, ...], list[Unit]]:
    """The flat gradients that are sums of reductions alone, by what lets them share one."""
    found: dict[tuple[object, ...], list[Unit]] = {}
    for root in {sum_root(result): None for result in regions}:
        leaves = sum_leaves(root)
        if all(leaf in regions and (leaf is root or len(leaf.users) == 1) for leaf in leaves):
            unit = Unit(root, [regions[leaf] for leaf in leaves])
            found.setdefault(unit.way, []).append(unit)
    return found


def _share(units: list[Unit]) -> None:
    """One reduction for several flat gradients, where the last gradient is ready."""
    ordered = [sorted(unit.bucket, key=lambda r: r.spec.offset) for unit in units]
    members = [region for bucket in ordered for region in bucket]
    marks = [next(user for user in unit.root.users if user.target is MARK_GRADS) for unit in units]
    run, grads = _grads(members)
    flat: Node = marks[0].args[1]  # type: ignore[assignment]
    summed = transfers.sum_bucket(run, grads, flat)
    start = 0
    for unit, bucket, mark in zip(units, ordered, marks, strict=True):
        stop = start + sum(r.spec.shard_numel for r in bucket)
        part = transfers.part_of_bucket(run, summed, start, stop, bucket[0].spec, value(flat).dtype)
        placed = transfers.place_bucket(
            run, part, tuple(r.spec for r in bucket), value(unit.root).numel()
        )
        unit.root.replace_all_uses_with(placed)
        placed.append(mark)
        late = [node for node in downstream(placed) if node < mark]  # sums with other micro-batches
        for node in sorted(late, reverse=True):
            mark.append(node)
        start = stop
    for unit, bucket in zip(units, ordered, strict=True):
        erase_unused(unit.root, ADD)
        for region in bucket:
            erase_all(region.nodes)


def _split(root: Node, parts: list[list[Region]]) -> None:
    """Several reductions for one flat gradient, each where the last of its gradients is ready."""
    mark = next(user for user in root.users if user.target is MARK_GRADS)
    reduced = [_reduce(part, mark.args[1]) for part in parts]  # type: ignore[arg-type]
    run = Builder(mark, mark)
    specs = tuple(r.spec for part in parts for r in part)
    whole = run(CAT, [result for _, result in reduced])
    root.replace_all_uses_with(transfers.place_bucket(run, whole, specs, value(root).numel()))
    erase_unused(root, ADD)
    for part in parts:
        for region in part:
            erase_all(region.nodes)


def _merge(root: Node, bucket: list[Region]) -> None:
    marks = next(user for user in root.users if user.target is MARK_GRADS)
    total = None
    for members in _by_way(bucket):
        run, reduced = _reduce(members, marks.args[1])  # type: ignore[arg-type]
        placed = transfers.place_bucket(
            run, reduced, tuple(r.spec for r in members), value(root).numel()
        )
        total = placed if total is None else Builder(root, root)(ADD, total, placed)
    assert total is not None
    root.replace_all_uses_with(total)
    erase_unused(root, ADD)
    for region in bucket:
        erase_all(region.nodes)


def _by_way(bucket: list[Region]) -> list[list[Region]]:
    """Those that are reduced in the same way together, in the order of the flat buffer."""
    found: dict[tuple[object, ...], list[Region]] = {}
    for region in sorted(bucket, key=lambda r: r.spec.offset):
        spec = region.spec
        found.setdefault((spec.unit, spec.group, spec.reduction), []).append(region)
    return list(found.values())


def _reduce(members: list[Region], flat: Node) -> tuple[Builder, Node | None]:
    """One reduction for all, where the last gradient is ready."""
    run, grads = _grads(members)
    return run, transfers.reduce_bucket(run, grads, flat, value(flat).dtype)


def _grads(members: list[Region]) -> tuple[Builder, list[tuple[Node, torch.dtype, ParamSpec]]]:
    """The gradients, and what builds one reduction for all where the last is ready."""
    last = max(r.nodes[0] for r in members)
    run = Builder(
        last, last, CommTag("reduce", members[0].tag.region, tuple(r.spec for r in members))
    )
    return run, [(r.source, value(r.source).dtype, r.spec) for r in members]
