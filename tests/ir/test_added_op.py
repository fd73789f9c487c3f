"""An op is its row of traits, its kernel, its pass and its test. Here is one that counts the bytes
that units gather each time a graph runs: this file adds all four, and no other file knows of it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from torch import nn

from compiled_fsdp import fully_shard, pipeline
from compiled_fsdp.ir.graph import Builder, find
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import TRAITS, Traits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.fx import GraphModule

    from compiled_fsdp.planning.plan import Plan

# -- the row, and the schema

library = torch.library.Library("fsdp_test", "DEF")
library.define(
    "count_gather(Tensor(a!) token, str unit, SymInt num_bytes) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
COUNT = torch.ops.fsdp_test.count_gather.default
ROW = Traits(
    spec_at=0,
    lowers_to="",
    starts="",
    price="none",
    awaits="",
    is_buffer=False,
    is_alias=False,
    effect="notes",
    marks=False,
    is_on_host=True,
)

# -- the kernel

gathered: Counter[str] = Counter()


def kernel(token: Tensor, unit: str, num_bytes: int) -> None:
    gathered[unit] += num_bytes


def fake(token: Tensor, unit: str, num_bytes: int) -> None:
    pass


library.impl("count_gather", kernel, "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_test::count_gather", fake, lib=library)

# -- the pass


def count_gathers(gm: GraphModule, plan: Plan) -> None:
    for region in find_regions(gm.graph, "gather"):
        start = region.starts[0]
        run = Builder(start, start)
        token = run(torch.ops.aten.new_empty.default, region.source, [1], dtype=torch.uint8)
        run(COUNT, token, region.tag.unit.split("#")[0], region.sent_bytes)


# -- the test


@pytest.fixture
def row() -> Iterator[None]:
    torch.fx.node.has_side_effect(COUNT)
    with mock.patch.dict(TRAITS, {COUNT: ROW}):
        yield
    torch.fx.node._side_effectful_functions.discard(COUNT)


@pytest.mark.usefixtures("fake_world", "row")
@pytest.mark.parametrize("backend", ["compiled_fsdp_eager", "compiled_fsdp"])
def test_an_op_is_added_in_one_file(backend: str) -> None:
    """Both executors run it, each time, and the invariants are checked after every pass. Each rank
    sends half of a linear layer's 20 elements of 4 bytes, and of its weight's 16 again in backward,
    save for the first layer, on whose weight no gradient depends.
    """
    gathered.clear()
    seen: list[GraphModule] = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    run = torch.compile(fully_shard(model), backend=backend, fullgraph=True)

    def read(gm: GraphModule, plan: Plan) -> None:
        seen.append(gm)

    with pipeline(count_gathers, after="gather_ahead"), pipeline(read, before="verify"):
        for _ in range(2):
            run(torch.ones(2, 4)).sum().backward()
    assert gathered == {"0": 2 * 40, "1": 2 * (40 + 32), "2": 2 * (40 + 32)}
    assert [len(find(gm.graph, COUNT)) for gm in seen] == [3, 2]
