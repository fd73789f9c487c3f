"""`note_routing`: counts of tokens that ranks tell each other are noted behind their wait."""

from dataclasses import replace

import torch
from compiled_fsdp.passes.note_routing import MOST, note_routing
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import ALL_GATHER, WAIT
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.passes import note_routing as module
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.meaning import Captured

NOTED = replace(PLAN, record_routing=True)


def counted(
    *, dtype: torch.dtype = torch.int64, numel: int = 8, splits: tuple[int, int] = (4, 4)
) -> GraphModule:
    """Counts, and tokens behind them."""
    hand = Hand()
    counts, tokens = hand.input("counts", numel, dtype=dtype), hand.input("tokens", 4, 2)
    theirs = hand(WAIT, hand(EXCHANGE, counts, [*splits], [*splits], "ep"))
    sent = hand(torch.ops.aten.sum.default, counts)
    there = hand(WAIT, hand(EXCHANGE, tokens, [2, 2], [2, 2], "ep"))
    gm = hand.returns(theirs, sent, there)
    set_captured(gm, Captured(gm.graph))
    return gm


class TestNoteRouting(GraphTest):
    def test_graph(self):
        gm = note_routing(counted(), NOTED)
        check(gm, NOTED, "note_routing")  # the same meaning
        self.assertDocumented(module, "After", gm)
        self.assertDocumented(module, "Before", counted())
        self.assertGraph(
            gm,
            """\
%counts: i64[8]
%tokens: f32[4,2]
%all_to_all_single_default: i64[8] = all_to_all_single(%counts, [4, 4], [4, 4], 'ep')
%wait_tensor_default: i64[8] = wait_tensor(%all_to_all_single_default)
%sum_default: i64[] = sum(%counts)
note_counts_(%wait_tensor_default, %counts)
%all_to_all_single_default_1: f32[4,2] = all_to_all_single(%tokens, [2, 2], [2, 2], 'ep')
%wait_tensor_default_1: f32[4,2] = wait_tensor(%all_to_all_single_default_1)
return [%wait_tensor_default, %sum_default, %wait_tensor_default_1]""",
        )

    def test_near_miss(self):
        """Nobody asked; numbers that are not whole, not as many to each rank,
        or more than counts.
        """
        self.assertUnchanged(note_routing, counted())
        self.assertUnchanged(note_routing, counted(dtype=torch.float32), NOTED)
        self.assertUnchanged(note_routing, counted(splits=(3, 5)), NOTED)
        self.assertUnchanged(note_routing, counted(numel=2 * MOST, splits=(MOST, MOST)), NOTED)

    def test_gathered(self):
        """What ranks tell all others, with no tokens behind it in this graph: at once."""
        hand = Hand()
        counts = hand.input("counts", 4, dtype=torch.int32)
        gm = hand.returns(hand(WAIT, hand(ALL_GATHER, counts, 2, "ep")))
        self.assertGraph(
            note_routing(gm, NOTED),
            """\
%counts: i32[4]
%all_gather_into_tensor_default: i32[8] = all_gather_into_tensor(%counts, 2, 'ep')
%wait_tensor_default: i32[8] = wait_tensor(%all_gather_into_tensor_default)
note_counts_(%wait_tensor_default, %counts)
return [%wait_tensor_default]""",
        )

    def test_option(self):
        with self.assertRaisesRegex(ValueError, "record_routing=1; should be True or False"):
            Plan(record_routing=1)
