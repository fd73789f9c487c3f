"""Gather the parameters of a unit with one all-gather, without a copy on the way in, nor of large
parameters on the way out.

Small units that follow each other share one: starting a collective costs more than their bytes.

Before:

    %v0 = wait(all_gather(slice(%flat, 0, 0, n0)))
    %w0 = view(%v0, shape0)
    %v1 = wait(all_gather(slice(%flat, 0, n0, n0 + n1)))
    %w1 = view(%v1, shape1)

After, if both are small (they share a message, and their rows lie apart in what it brings):

    %v = wait(all_gather(%flat))
    %w0 = view(clone(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %w1 = view(clone(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1)), shape1)  # where it was read

Large, if both are large (a message each, whose rows come out side by side):

    %v = wait(all_gather(%flat, [n0, n1]))
    %w0 = view(slice(%v, 0, 0, N * n0), shape0)
    %w1 = view(slice(%v, 0, N * n0, N * (n0 + n1)), shape1)

Requires: a lowered graph.
Ensures: one all-gather for each (unit, dtype, group, kept for backward or not) in the graph, at the
    place of the first, and in that of a whole step another for what is gathered again, and for each
    micro-batch; a small parameter is copied out where it was gathered before, so that only those in
    use exist twice. Units share it while together they are no larger than `plan.bucket_limit`; one
    larger than `plan.split_bytes` is gathered in parts of about that.
Leaves alone: a unit of which the graph gathers one parameter: its result needs no copy at all. What
    is computed only after the first gather of its bucket, as slices are under activation
    checkpointing: it begins a bucket of its own. Each unit for itself, whatever its size: where the
    user gave prefetch lists, a gather of their own, or `overlap_optimizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir import transfers
from compiled_fsdp.ir.graph import Builder, erase_all, move_before, preparation, value
from compiled_fsdp.ir.meta import CommTag
from compiled_fsdp.ir.regions import Region, find_regions, together
from compiled_fsdp.ir.spec import AGAIN

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def bucket_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = find_regions(gm.graph, "gather")
    has_lists = any(r.spec.forward_after or r.spec.backward_after for r in regions)
    units: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        spec = region.spec
        # a view of a bucket that backward keeps would keep all of it
        lives = spec.reshard if spec.reshard in ("keep", AGAIN) else ""
        shared = (spec.dtype, spec.group, spec.group_size, lives, spec.batch)
        units.setdefault((*shared, spec.unit), []).append(region)
    alike: dict[tuple[object, ...], list[list[Region]]] = {}
    for (*way, unit), members in units.items():
        is_alone = has_lists or not all(map(_may_share, members))
        alike.setdefault((*way, unit if is_alone else ""), []).append(members)
    if alike:
        consume(gm)
    for neighbours in alike.values():
        for bucket in together(neighbours, _nbytes, plan.bucket_limit(neighbours[0][0].spec.group)):
            merged = [region for members in bucket for region in members]
            for part in _parts(merged, plan.split_bytes or 0):
                for ready in _ready(part):
                    if len(ready) > 1:
                        _merge(ready)
    return gm


def _ready(bucket: list[Region]) -> list[list[Region]]:
    """A bucket cut where what is gathered is computed only after the first gather: slices, under
    activation checkpointing. What is computed from the graph's inputs alone, as all-gather
    extensions do, is computed before it.
    """
    found: list[list[Region]] = []
    for region in bucket:
        first = found[-1][0].nodes[0] if found else region.nodes[0]
        move_before([n for n in preparation(region.sources) or () if first < n], first)
        if found and all(
            n.op == "placeholder" or n < found[-1][0].nodes[0] for n in region.sources
        ):
            found[-1].append(region)
        else:
            found.append([region])
    return found


def _parts(bucket: list[Region], limit: int) -> list[list[Region]]:
    """A bucket cut along its flat buffer into parts of about this size, each in the order of the
    graph.
    """
    if not limit or not all(map(_may_share, bucket)) or _nbytes(bucket) <= limit:
        return [bucket]
    along = sorted(bucket, key=lambda region: region.spec.offset)
    return [
        sorted(part, key=lambda region: region.nodes[0])
        for part in together(along, lambda r: _nbytes([r]), limit)
    ]


def _may_share(region: Region) -> bool:
    """Whether this may travel with other units': nothing of the user's or of the unit's own depends
    on it.
    """
    spec = region.spec
    is_ready = preparation(region.sources) is not None
    return is_ready and spec.group_size > 1 and not (spec.gather_algorithm or spec.overlap)


def _nbytes(members: list[Region]) -> float:
    """Returns the bytes of the full parameters."""
    return sum(r.spec.full_bytes() for r in members)


def _merge(bucket: list[Region]) -> None:
    first = bucket[0]
    flats = list(dict.fromkeys(r.source for r in bucket))
    ordered = sorted(bucket, key=lambda r: (flats.index(r.source), r.spec.offset))
    specs = tuple(r.spec for r in ordered)
    tag = CommTag("gather", first.tag.region, specs)
    members = []
    sources = {f: transfers.Source(f, value(f).numel(), value(f).dtype) for f in flats}
    for region in ordered:
        members.append((sources[region.source], region.spec))
    gathered = transfers.gather_bucket(Builder(first.nodes[0], first.nodes[0], tag), members)
    layout = transfers.GatheredBucket(specs)
    for place, region in enumerate(ordered):
        run = Builder(region.nodes[0], region.nodes[0], tag)
        region.result.replace_all_uses_with(layout.copy_out(run, gathered, place))
    for region in ordered:
        erase_all(region.nodes)
