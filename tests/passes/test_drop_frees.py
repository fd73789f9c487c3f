"""`drop_frees`: no `free` is left, and nothing else changes."""

from compiled_fsdp.passes.drop_frees import drop_frees
from compiled_fsdp.passes.free import free
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

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
