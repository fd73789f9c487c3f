"""`copy_columns`: copies out of a bucket are calls; other clones stay."""

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.copy_columns import copy_columns
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.passes import copy_columns as module
from compiled_fsdp.verification.meaning import Captured


def bucket(*, is_saved: bool = True) -> GraphModule:
    """Two parameters, which the graph returns, or computes with."""
    hand = Hand()
    flat = hand.input("flat", 5)
    full = [hand.unshard(flat, s) for s in unit("u", {"w0": (4, 2), "w1": (2,)})]
    gm = hand.returns(*(full if is_saved else map(hand.compute, full)))
    set_captured(gm, Captured(gm.graph))
    return bucket_all_gather(lower(gm, PLAN), PLAN)


class TestCopyColumns(GraphTest):
    def test_docstring(self):
        gm = bucket()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", copy_columns(gm, PLAN))

    def test_graph(self):
        self.assertGraph(
            copy_columns(bucket(), PLAN),
            """\
%flat: f32[5]
%all_gather_into_tensor_default_2: f32[10] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[10] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_2: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = copy_columns(%slice_tensor_2)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%view_default_4: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_3: f32[2,1] = slice(%view_default_4, 1, 4, 5)  # u: gather
%clone_default_1: f32[2,1] = copy_columns(%slice_tensor_3)  # u: gather
%view_default_5: f32[2] = view(%clone_default_1, [2])  # u: gather
return [%view_default_3, %view_default_5]""",
        )

    def test_means_the_same(self):
        """What was captured; and a copy of other columns does not."""
        gm = copy_columns(bucket(is_saved=False), PLAN)
        check(gm, PLAN, "copy_columns")
        (first, *_) = find(gm.graph, aten.slice.Tensor)
        first.args = (*first.args[:2], 1, 5)
        with self.assertRaisesRegex(RuntimeError, "output 0 is not what was captured"):
            check(gm, PLAN, "copy_columns")

    def test_near_miss(self):
        """A clone of the user's, and one that belongs to a reduction."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4,)}, world=1)
        flat, grad = hand.input("flat", 4), hand.input("d", 4)
        mine = hand(aten.clone.default, grad, memory_format=torch.contiguous_format)
        gm = lower(hand.returns(mine, hand.reduce_grad(grad, flat, spec)), PLAN)
        self.assertEqual(len(find(gm.graph, aten.clone.default)), 2)
        self.assertUnchanged(copy_columns, gm)
