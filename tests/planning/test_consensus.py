"""What ranks have decided together is kept as long as the process groups that they decided over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from kit.passes_harness import PLAN, Hand, numel, unit

from compiled_fsdp.planning.consensus import agreed
from compiled_fsdp.torch_private.groups import rename

if TYPE_CHECKING:
    from kit.pool import Pool
    from torch.fx import Graph

SHARD, REPLICATE = "consensus_shard", "consensus_replicate"


def graph_of_a_unit() -> Graph:
    specs = unit("a", {"w": (4, 2)}, group=SHARD)
    specs = [replace(s, replicate_size=2, replicate_group=REPLICATE) for s in specs]
    hand = Hand()
    flat = hand.input("flat", numel(specs))
    hand.unshard(flat, specs[0])
    return hand.graph


def largest(told: list[list[int]]) -> list[int]:
    return max(told)


def decide(graph: Graph, by_rank: list[int]) -> list[int]:
    return agreed(graph, PLAN, "a test", [by_rank[dist.get_rank()]], largest)


def decided() -> None:
    graph = graph_of_a_unit()
    for name in (SHARD, REPLICATE):
        rename(dist.new_group(), name)
    assert decide(graph, [1, 2]) == [2]
    assert decide(graph, [8, 9]) == [2]  # another batch keeps to it, and asks nobody
    for name, first in ((SHARD, 3), (REPLICATE, 5)):
        rename(dist.new_group(), name)  # as after it was destroyed and made again
        assert decide(graph, [first, first + 1]) == [first + 1]
        assert decide(graph, [8, 9]) == [first + 1]


def test_once_for_each_group(two: Pool) -> None:
    two.run(decided)


def test_a_graph_of_no_parameters_is_a_matter_of_its_rank(two: Pool) -> None:
    two.run(alone)


def alone() -> None:
    graph = Hand().graph
    assert [decide(graph, [1, 2]), decide(graph, [3, 4])] == [
        [by_rank[dist.get_rank()]] for by_rank in ([1, 2], [3, 4])
    ]
