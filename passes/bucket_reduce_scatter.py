"""Reduce the gradients of a unit with one collective, whose result is the flat gradient itself.

Before:

    %p0 = div(wait(reduce_scatter(reshape(%d0, [N * n0]))), world)
    %p1 = div(wait(reduce_scatter(reshape(%d1, [N * n1]))), world)
    %g = add(constant_pad_nd(%p1), constant_pad_nd(%p0))

After:

    %rows = cat([reshape(%d0, [N, n0]), reshape(%d1, [N, n1])], 1)
    %g = div(wait(reduce_scatter(reshape(%rows, [N * (n0 + n1)]))), world)

Requires: a lowered graph.
Ensures: one reduction for each flat gradient and way of reducing, where its last gradient is ready. Where parameters have no
    gradient, zeros fill their place and nothing is communicated for them.
Leaves alone: a sum with a term that is not a reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp import collectives as comm
from compiled_fsdp.graph import ADD, Builder, erase_all, order, sum_leaves, sum_root, value
from compiled_fsdp.meta import CommTag, get_tag
from compiled_fsdp.regions import Region, find_regions

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.plan import Plan


def bucket_reduce_scatter(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    regions = {region.result: region for region in find_regions(gm.graph, "reduce")}
    roots = {sum_root(result): None for result in regions}
    for root in roots:
        leaves = sum_leaves(root)
        if len(leaves) > 1 and all(leaf in regions for leaf in leaves):
            _merge(root, [regions[leaf] for leaf in leaves])
    return gm


def _merge(root: Node, bucket: list[Region]) -> None:
    numel, dtype = value(root).numel(), value(root).dtype
    total = None
    position = order(root.graph)
    by_way: dict[tuple[object, ...], list[Region]] = {}
    for region in bucket:
        spec = region.spec
        by_way.setdefault((spec.unit, spec.group, spec.reduction), []).append(region)
    for members in by_way.values():
        members.sort(key=lambda r: r.spec.offset)
        last = max((r.nodes[0] for r in members), key=lambda n: position[n])
        specs = tuple(r.spec for r in members)
        run = Builder(last, last, CommTag("reduce", members[0].tag.region, specs))
        grads = [(r.source, value(r.source).dtype, r.spec) for r in members]
        placed = comm.place_bucket(run, comm.reduce_bucket(run, grads, dtype), specs, numel)
        total = placed if total is None else Builder(root, root)(ADD, total, placed)
    assert total is not None
    sums = _sums(root)
    root.replace_all_uses_with(total)
    erase_all(sums)
    for region in bucket:
        erase_all(region.nodes)


def _sums(root: Node) -> list[Node]:
    """The additions of a tree, terms before sums."""
    if root.target is not ADD or get_tag(root) is not None:
        return []
    inner = [t for t in root.args[:2] if not isinstance(t, int | float) and len(t.users) == 1]  # type: ignore[union-attr]
    return [node for term in inner for node in _sums(term)] + [root]  # type: ignore[arg-type]
