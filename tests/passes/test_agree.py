"""`agree`: a graph that communicates for a unit begins with its collectives as text."""

from compiled_fsdp.passes.agree import agree
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, unit

from compiled_fsdp.ir.collectives import ALL_GATHER, WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_record
from compiled_fsdp.ir.schema import AGREE
from compiled_fsdp.passes import agree as module

(W,) = unit("u", {"w": (4, 2)})


class TestAgree(GraphTest):
    def test_docstring(self):
        hand = Hand()
        gm = lower(hand.returns(hand.unshard(hand.input("flat", 4), W)), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", agree(gm, PLAN))

    def test_graph(self):
        hand = Hand()
        flat = hand.input("flat", 4)
        x = hand.unshard(flat, W)
        gm = lower(hand.returns(x, hand.reduce_grad(x, flat, W)), PLAN)
        set_record(gm, "what became of it")
        self.assertGraph(
            agree(gm, PLAN),
            """\
%flat: f32[4]
%new_empty_default: u8[1] = new_empty(%flat, [1], dtype=u8)
agree(%new_empty_default, 'a forward graph of 2 collectives'..., ['shard'], 'what became of it')
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%reshape_default: f32[2,4] = reshape(%view_default, [2, 4])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_1, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%view_default, %div_tensor]""",
        )
        (node,) = find(gm.graph, AGREE)
        self.assertExpectedInline(
            node.args[1],
            """\
a forward graph of 2 collectives
all_gather_into_tensor of 4 x torch.float32 over group 0: u (w)
reduce_scatter_tensor of 8 x torch.float32 over group 0: u (w)""",
        )
        self.assertEqual(node.args[2:], (["shard"], "what became of it"))

    def test_a_record_alone(self):
        """A graph of ours in which nothing is left to communicate still says what runs."""
        hand = Hand()
        gm = hand.returns(hand.compute(hand.input("x", 4)))
        set_record(gm, "a record")
        (node,) = find(agree(gm, PLAN).graph, AGREE)
        self.assertEqual(node.args[1:], ("", [], "a record"))

    def test_near_miss_the_users_own(self):
        hand = Hand()
        gathered = hand(WAIT, hand(ALL_GATHER, hand.input("x", 4), 2, "tp"))
        self.assertUnchanged(agree, hand.returns(gathered))

    def test_near_miss_without_tensors(self):
        hand = Hand()
        gm = hand.returns()
        set_record(gm, "a record")
        self.assertUnchanged(agree, gm)
