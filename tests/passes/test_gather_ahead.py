"""`gather_ahead`: the gathers of forward go through their unit; nothing else changes."""

from typing import Any

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.gather_ahead import gather_ahead
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import starts
from compiled_fsdp.passes import gather_ahead as module
from compiled_fsdp.planning.costs import assumed, traffic


def gathers(names: str, backward: bool = False, **changes: Any) -> GraphModule:
    """Gather parameters of one unit of `a`, `b` and `c`, in one bucket."""
    hand = Hand()
    flat = hand.input("flat", 6)
    if backward:
        hand.input("tangents_1", 4)
    specs = {
        s.fqn: s
        for s in unit("u", {"a": (4,), "b": (4,), "c": (4,)}, **{"overlap": "step", **changes})
    }
    read = [hand.compute(hand.unshard(flat, specs[name])) for name in names]
    return bucket_all_gather(lower(hand.returns(*read), PLAN), PLAN)


def pieces(gm: GraphModule) -> list[Any]:
    return [node.args[2:] for node in gm.graph.nodes if node.target is module.GATHER_AHEAD]


class TestGatherAhead(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat = hand.input("flat0", 2)
        (spec,) = unit("u", {"w": (4,)}, overlap="step")
        gm = lower(hand.returns(hand.unshard(flat, spec)), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", gather_ahead(gm, PLAN))

    def test_pieces(self):
        """Where in the flat buffer the piece begins; the shard says how long it is."""
        self.assertEqual(
            pieces(gather_ahead(gathers("abc"), PLAN)),
            [(0, [6], torch.float32, 2, "shard", [], [])],
        )
        self.assertEqual(
            pieces(gather_ahead(gathers("bc"), PLAN)), [(2, [4], torch.float32, 2, "shard", [], [])]
        )

    def test_costs_what_it_did(self):
        """Bytes sent and time on the wire, whether the shard is the flat buffer or a part of it."""
        costs = assumed("cpu")
        for names in ("abc", "bc"):
            gm = gathers(names)
            (before,) = starts(gm.graph)
            sent, seconds = traffic(before), costs.wire(before)
            (after,) = starts(gather_ahead(gm, PLAN).graph)
            self.assertEqual((traffic(after), costs.wire(after)), (sent, seconds))
            self.assertEqual(sent, (len(names) * 8.0, "shard"))

    def test_leaves_alone(self):
        """Gaps, several buffers, backward, custom gathers, units that did not ask for it."""
        for gm in (
            gathers("ac"),
            gathers("abc", backward=True),
            gathers("abc", gather_algorithm="custom:f#0"),
            gathers("abc", overlap=""),
        ):
            self.assertUnchanged(gather_ahead, gm)

    def test_two_buffers(self):
        hand = Hand()
        flats = [hand.input(f"flat{i}", 2) for i in range(2)]
        (a,), (b,) = unit("u", {"a": (4,)}, overlap="step"), unit("u", {"b": (4,)}, overlap="step")
        read = [hand.compute(hand.unshard(f, s)) for f, s in zip(flats, (a, b), strict=True)]
        gm = bucket_all_gather(lower(hand.returns(*read), PLAN), PLAN)
        self.assertEqual(len([n for n in gm.graph.nodes if n.target is aten.cat.default]), 1)
        self.assertUnchanged(gather_ahead, gm)
