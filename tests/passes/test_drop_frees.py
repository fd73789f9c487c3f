"""`drop_frees`: no `free` is left, and nothing else changes; what kernels would compute again from
a freed buffer is written.
"""

from __future__ import annotations

import torch
from compiled_fsdp.passes.drop_frees import drop_frees
from compiled_fsdp.passes.free import free
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.printer import show
from compiled_fsdp.passes import drop_frees as module

(W,) = unit("u", {"w": (4, 2)})


def product() -> GraphModule:
    hand = Hand()
    x, flat = hand.input("x", 3, 4), hand.input("flat", 4)
    return lower(hand.returns(hand(aten.mm.default, x, hand.unshard(flat, W))), PLAN)


class TestDropFrees(GraphTest):
    def test_docstring(self):
        gm = product()
        before = show(gm.graph)
        gm = free(gm, PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", drop_frees(gm, PLAN))
        self.assertEqual(show(gm.graph), before)

    def test_graph(self):
        self.assertGraph(
            drop_frees(free(product(), PLAN), PLAN),
            """\
%x: f32[3,4]
%flat: f32[4]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%mm_default: f32[3,2] = mm(%x, %view_default)
return [%mm_default]""",
        )

    def test_near_miss(self):
        self.assertUnchanged(drop_frees, product())


class Lookup:
    """Rows of a table, and products that `rows` may be read beside."""

    def __init__(self) -> None:
        self.hand = hand = Hand()
        flat, ids = hand.input("flat", 4), hand.input("ids", 3, dtype=torch.int64)
        self.square = hand.input("square", 3, 3)
        self.rows = hand(aten.embedding.default, hand.unshard(flat, W), ids)
        self.results: list[Node] = []

    def product(self) -> Node:
        self.results.append(self.hand(aten.mm.default, self.square, self.square))
        return self.results[-1]

    def read(self, value: Node) -> Node:
        read = self.hand.compute(value)
        self.results.append(self.hand(aten.sum.default, read))
        return read

    def written(self) -> list[str]:
        gm = drop_frees(free(lower(self.hand.returns(*self.results), PLAN), PLAN), PLAN)
        return [
            node.name for node in gm.graph.nodes if node.meta.get("inductor_realize_to_strides")
        ]


def test_rows_that_are_read_now_and_later() -> None:
    """The table would live on as long."""
    lookup = Lookup()
    lookup.read(lookup.rows)
    lookup.product()
    lookup.read(lookup.rows)
    assert lookup.written() == [lookup.rows.name]


def test_what_is_computed_of_rows() -> None:
    """Written is what is read later: of a chain that nothing else reads, its end."""
    lookup = Lookup()
    doubled = lookup.hand.add(lookup.rows, lookup.rows)
    lookup.read(doubled)
    lookup.product()
    lookup.read(doubled)
    assert lookup.written() == [doubled.name]


def test_a_chain_that_ends_behind_a_product() -> None:
    """Inductor computes its one reader, and with it the rows, where that stands: nothing is read
    again. What that is read by, again and again, is written.
    """
    for is_read_twice in (False, True):
        lookup = Lookup()
        chain = lookup.hand.compute(lookup.rows)
        if is_read_twice:
            lookup.read(chain)
        lookup.product()
        lookup.read(chain)
        assert lookup.written() == ([chain.name] if is_read_twice else [])


def test_rows_that_are_read_at_once() -> None:
    """By one kernel, or several that follow each other."""
    lookup = Lookup()
    lookup.read(lookup.rows)
    lookup.read(lookup.read(lookup.rows))
    lookup.product()
    assert lookup.written() == []


def test_rows_of_what_is_not_freed() -> None:
    lookup = Lookup()
    lookup.results.append(lookup.rows.args[0])
    lookup.read(lookup.rows)
    lookup.product()
    lookup.read(lookup.rows)
    assert lookup.written() == []
