"""`use_gloo`: over groups of gloo's, gathers are ours, and so are our all-reduces."""

from types import SimpleNamespace

import torch
from compiled_fsdp.passes.base import Context
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.use_gloo import use_gloo
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, unit
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compiled_fsdp.ir.collectives import ALL_GATHER, ALL_REDUCE, WAIT, as_in_torch
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_captured, set_context
from compiled_fsdp.ir.schema import ALL_GATHER as OURS
from compiled_fsdp.verification.meaning import Captured

(W,) = unit("u", {"w": (4, 2)}, replicate_size=2, replicate_group="replicate", post_divide=4.0)


def over(gm: GraphModule, *gloo: str) -> GraphModule:
    """With these groups being gloo's."""
    set_context(gm, Context(is_gloo=lambda group, device: group in gloo))
    return gm


def hybrid() -> GraphModule:
    """A gather, and a reduction over both axes."""
    hand = Hand()
    flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
    gm = hand.returns(hand.compute(hand.unshard(flat, W)), hand.reduce_grad(d, flat, W))
    set_captured(gm, Captured(gm.graph))
    return lower(gm, PLAN)


class TestUseGloo(GraphTest):
    def test_graph(self):
        gm = use_gloo(over(hybrid(), "shard", "replicate"), PLAN)
        check(gm, PLAN, "use_gloo")
        self.assertGraph(
            gm,
            """\
%flat: f32[4]
%d: f32[4,2]
%all_gather_into_tensor_default: f32[8] = all_gather(%flat, [4], 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%neg_default: f32[4,2] = neg(%view_default)
%reshape_default: f32[2,4] = reshape(%d, [2, 4])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%all_reduce_default: f32[4] = all_reduce(%wait_tensor_default_1, 'sum', 'replicate')  # u: reduce
%wait_tensor_default_2: f32[4] = wait_tensor(%all_reduce_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_2, 4.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%neg_default, %div_tensor]""",
        )

    def test_what_the_user_gathers(self):
        hand = Hand()
        gathered = hand(WAIT, hand(ALL_GATHER, hand.input("x", 3, 4), 2, "tp"))
        reduced = hand(WAIT, hand(ALL_REDUCE, gathered, "sum", "tp"))
        gm = use_gloo(over(hand.returns(reduced), "tp"), PLAN)
        self.assertEqual(find(gm.graph, OURS)[0].args[1:], ([12], 2, "tp"))
        self.assertEqual(len(find(gm.graph, ALL_REDUCE)), 1, "torch's own is safe")

    def test_of_any_length(self):
        """A symbol is not put into the graph: as no sizes, it is run, and means the same."""
        hand = Hand()
        x = hand.input("x", 3, 4)
        length = ShapeEnv().create_unbacked_symint()
        start = hand(ALL_GATHER, x, 2, "tp")
        x.meta["val"] = SimpleNamespace(numel=lambda: length, device=torch.device("cpu"))
        gm = use_gloo(over(hand.returns(start), "tp"), PLAN)
        (ours,) = find(gm.graph, OURS)
        self.assertEqual(ours.args, (x, [], 2, "tp"))
        self.assertEqual(as_in_torch(ours)[:2], (ALL_GATHER, (x, 2, "tp")))

    def test_other_sizes_do_not_mean_the_same(self):
        gm = use_gloo(over(hybrid(), "shard"), PLAN)
        (start,) = find(gm.graph, OURS)
        start.args = (start.args[0], [2, 2], *start.args[2:])
        with self.assertRaisesRegex(RuntimeError, r"starts \['all_gather\(4 x .*its settings name"):
            check(gm, PLAN, "use_gloo")

    def test_near_miss(self):
        """Other backends; a group of gloo's with other groups in the graph; no context."""
        self.assertUnchanged(use_gloo, over(hybrid()))
        self.assertUnchanged(use_gloo, over(hybrid(), "another"))
        self.assertUnchanged(use_gloo, hybrid())
