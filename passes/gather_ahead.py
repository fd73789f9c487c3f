"""Let the first all-gathers of forward be under way already, since the optimizer stepped.

Before:

    %a0 = all_gather(%flat0)
    %w0 = view(wait(%a0), shape0)

After:

    %a0 = gather_ahead(%flat0, %flat0)
    %w0 = view(wait(%a0), shape0)

Requires: a finished graph: nothing but the op that starts the gather changes.
Ensures: in forward, each all-gather of a piece of one flat buffer goes through its unit, which
    hands over what is under way for the very values that the buffer has now, or starts the gather.
    Where codes travel, it is told which.
Leaves alone: backward; units that did not ask for it (`overlap`); custom all-gathers; buckets from
several flat buffers.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from compiled_fsdp.ir.collectives import ALL_GATHER, GATHERS
from compiled_fsdp.ir.graph import Builder, is_backward, value
from compiled_fsdp.ir.quantized import codes_of_gather, numels_of_gather
from compiled_fsdp.ir.regions import Region, find_regions
from compiled_fsdp.ir.schema import GATHER_AHEAD
from compiled_fsdp.ir.spec import NEXT

from .base import consume

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan


def gather_ahead(gm: GraphModule, plan: Plan) -> GraphModule:
    """See the module docstring."""
    if is_backward(gm.graph):
        return gm
    for region in find_regions(gm.graph, "gather"):
        if (
            region.spec.overlap
            and [n.target in GATHERS for n in region.starts] == [True]
            and _is_piece(region)
        ):
            _replace(region)
            if region.spec.overlap != NEXT:
                consume(gm, unit=region.spec.unit)
    return gm


def _is_piece(region: Region) -> bool:
    specs = region.tag.specs
    is_contiguous = all(a.offset + a.shard_numel == b.offset for a, b in pairwise(specs))
    return is_contiguous and len(region.sources) == 1


def _replace(region: Region) -> None:
    (start,) = region.starts
    if start.target is ALL_GATHER:
        shard, group_size, group = start.args
        sizes: Any = [value(shard).numel()]  # type: ignore[arg-type]
    else:
        shard, sizes, group_size, group = start.args
    run = Builder(start, start, region.tag)
    specs = region.tag.specs
    ahead = run(
        GATHER_AHEAD,
        shard,
        region.source,
        region.spec.offset,
        sizes,
        region.spec.dtype,
        group_size,
        group,
        numels_of_gather(specs),
        codes_of_gather(specs),
    )
    start.replace_all_uses_with(ahead)
    start.graph.erase_node(start)
