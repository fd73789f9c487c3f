"""Gather the parameters of a unit with one all-gather, without a copy on the way in, nor of large parameters on the way out.

Before:

    %v0 = wait(all_gather(slice(%flat, 0, 0, n0)))
    %w0 = view(%v0, shape0)
    %v1 = wait(all_gather(slice(%flat, 0, n0, n0 + n1)))
    %w1 = view(%v1, shape1)

After, if both are small (they share a message, and their rows lie apart in what it brings):

    %v = wait(all_gather(%flat))
    %w0 = view(clone(slice(view(%v, [N, n0 + n1]), 1, 0, n0)), shape0)
    %w1 = view(clone(slice(view(%v, [N, n0 + n1]), 1, n0, n0 + n1)), shape1)  # where it was read before

Large, if both are large (a message each, whose rows come out side by side; see `collectives.messages_of`):

    %v = wait(all_gather(%flat, [n0, n1]))
    %w0 = view(slice(%v, 0, 0, N * n0), shape0)
    %w1 = view(slice(%v, 0, N * n0, N * (n0 + n1)), shape1)

Requires: a lowered graph.
Ensures: one all-gather for each (unit, dtype, group, kept for backward or not) in the graph, at the place of the first; a small
    parameter is copied out where it was gathered before, so that only those in use exist twice.
Leaves alone: a unit of which the graph gathers one parameter: its result needs no copy at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp import collectives as comm
from compiled_fsdp.graph import Builder, erase_all, value
from compiled_fsdp.meta import CommTag
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.plan import Plan


def bucket_all_gather(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    buckets: dict[tuple[object, ...], list[Region]] = {}
    for region in find_regions(gm.graph, "gather"):
        spec = region.spec
        is_kept = spec.reshard == "keep"  # a view of a bucket that backward keeps would keep all of it
        buckets.setdefault((spec.unit, spec.dtype, spec.group, spec.group_size, is_kept), []).append(region)
    for bucket in buckets.values():
        if len(bucket) > 1:
            _merge(bucket)
    return gm


def _merge(bucket: list[Region]) -> None:
    first = bucket[0]
    flats = list(dict.fromkeys(r.source for r in bucket))
    ordered = sorted(bucket, key=lambda r: (flats.index(r.source), r.spec.offset))
    specs = tuple(r.spec for r in ordered)
    tag = CommTag("gather", first.tag.region, specs)
    members = []
    sources = {f: comm.Source(f, value(f).numel(), value(f).dtype) for f in flats}
    for region in ordered:
        members.append((sources[region.source], region.spec))
    gathered = comm.gather_bucket(Builder(first.nodes[0], first.nodes[0], tag), members)
    for place, region in enumerate(ordered):
        run = Builder(region.nodes[0], region.nodes[0], tag)
        region.result.replace_all_uses_with(comm.copy_out(run, gathered, specs, place))
    for region in ordered:
        erase_all(region.nodes)
