"""Reduce the gradients of a unit with one collective, whose result is the flat gradient itself.

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
Ensures: one reduction for each flat gradient and way of reducing, where its last gradient is ready. Where parameters have no
    gradient, zeros fill their place and nothing is communicated for them.
    What is kept after the shard axis (`sync="scatter"`) is reduced once for each flat buffer too.
Leaves alone: a sum with a term that is not a reduction, or that is read by something else too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp import collectives as comm
from compiled_fsdp.graph import ADD, Builder, erase_all, erase_unused, sum_leaves, sum_root, value
from compiled_fsdp.meta import CommTag
from compiled_fsdp.regions import Region, find_regions
from compiled_fsdp.schema import MARK_GRADS

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def bucket_reduce_scatter(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = {region.result: region for region in find_regions(gm.graph, "reduce")}
    roots = {sum_root(result): None for result in regions}
    for root in roots:
        leaves = sum_leaves(root)
        if len(leaves) > 1 and all(leaf in regions and len(leaf.users) == 1 for leaf in leaves):
            _merge(root, [regions[leaf] for leaf in leaves])
    scattered: dict[Node, list[Region]] = {}
    for region in regions.values():
        if region.spec.sync == "scatter":
            scattered.setdefault(region.sources[-1], []).append(region)
    for bucket in scattered.values():
        for members in _by_way(bucket):
            _reduce(members, bucket[0].sources[-1])
            for region in members:
                erase_all(region.nodes)
    return gm


def _merge(root: Node, bucket: list[Region]) -> None:
    marks = next(user for user in root.users if user.target is MARK_GRADS)
    total = None
    for members in _by_way(bucket):
        run, reduced = _reduce(members, marks.args[1])  # type: ignore[arg-type]
        placed = comm.place_bucket(run, reduced, tuple(r.spec for r in members), value(root).numel())
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
    last = max(r.nodes[0] for r in members)
    run = Builder(last, last, CommTag("reduce", members[0].tag.region, tuple(r.spec for r in members)))
    grads = [(r.source, value(r.source).dtype, r.spec) for r in members]
    return run, comm.reduce_bucket(run, grads, flat, value(flat).dtype)
