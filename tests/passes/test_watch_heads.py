"""`watch_heads`: a forward names the flat buffers that only some outputs lead to;
other graphs stay.
"""

from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.watch_heads import watch_heads
from kit.passes_harness import PLAN, GraphTest, Hand, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import placeholders
from compiled_fsdp.ir.meta import set_heads
from compiled_fsdp.passes import watch_heads as module

(W,) = unit("u", {"w": (4, 2)})


def half(tangent: bool = False, heads: bool = True) -> GraphModule:
    hand = Hand()
    flat = hand.input("flat", 4)
    if tangent:
        hand.input("tangents_1", 4)
    gm = lower(hand.returns(hand.unshard(flat, W)), PLAN)
    if heads:
        set_heads(next(placeholders(gm.graph)), (2, {0: [1]}))
    return gm


class TestWatchHeads(GraphTest):
    def test_docstring(self):
        gm = half()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", watch_heads(gm, PLAN))

    def test_graph(self):
        self.assertGraph(
            watch_heads(half(), PLAN),
            """\
%flat: f32[4]
%new_empty_default: u8[1] = new_empty(%flat, [1], dtype=u8)
watch_heads(%new_empty_default, [%flat], 2, '[[[0, [1]]]]')
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
return [%view_default]""",
        )

    def test_near_miss(self):
        """A backward, to which the note came along; a forward whose outputs all lead to all."""
        self.assertUnchanged(watch_heads, half(tangent=True))
        self.assertUnchanged(watch_heads, half(heads=False))
