"""`summarize`: the record is kept for `agree`; the graph stays."""

from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.summarize import summarize
from kit.passes_harness import PLAN, GraphTest, Hand, unit

from compiled_fsdp.ir.meta import set_context, take_record
from compiled_fsdp.passes import summarize as module

(W,) = unit("u", {"w": (4, 2)})


class TestSummarize(GraphTest):
    def test_docstring(self):
        hand = Hand()
        gm = lower(hand.returns(hand.unshard(hand.input("flat", 4), W)), PLAN)
        set_context(gm, Context(record=lambda gm: f"{len(gm.graph.nodes)} nodes"))
        self.assertDocumented(module, "Before", gm)
        self.assertUnchanged(summarize, gm)
        self.assertEqual(take_record(gm), "5 nodes")

    def test_near_miss_nobody_asks(self):
        """A pass that is called by hand has no context."""
        hand = Hand()
        gm = hand.returns(hand.compute(hand.input("x", 4)))
        self.assertUnchanged(summarize, gm)
        self.assertEqual(take_record(gm), "")
