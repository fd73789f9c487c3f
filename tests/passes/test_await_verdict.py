"""`await_verdict`: in the graph of a whole step,
ranks compare their checksums before any update.
"""

from __future__ import annotations

from typing import Any

from compiled_fsdp.passes.add_checksums import add_checksums
from compiled_fsdp.passes.await_verdict import await_verdict
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.place_updates import place_updates
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import CHECKSUM, UPDATE
from compiled_fsdp.passes import await_verdict as module
from compiled_fsdp.verification.meaning import Captured


def step(*, is_checked: bool = True, is_scaled: bool = False) -> GraphModule:
    """A graph that reduces the gradients of two units, the later one first,
    up to `add_checksums`.
    """
    hand = Hand()
    rows, updates = hand.input("rows1", 4), []
    factor = hand.input("factor") if is_scaled else None
    for number in (1, 0):
        how: Any = {"is_checked": is_checked, "reduce_algorithm": "all_to_all"}
        (spec,) = unit(f"u{number}#{number}", {f"w{number}": (4,)}, **how)
        flat = hand.input(f"flat{number}", 2)
        grad = hand.reduce_grad(rows, flat, spec)
        updates.append((grad, flat))
        rows = hand.compute(rows) if number else rows
    for grad, flat in updates:
        scaled = hand(aten.mul.Tensor, grad, factor) if is_scaled else grad
        hand(UPDATE, scaled, flat, [0], "step0")
    gm = hand.returns()
    set_captured(gm, Captured(gm.graph))
    return add_checksums(place_updates(lower(gm, PLAN), PLAN), PLAN)


class TestAwaitVerdict(GraphTest):
    def test_docstring(self):
        gm = step()
        self.assertDocumented(module, "Before", gm)
        await_verdict(gm, PLAN)
        check(gm, PLAN, "await_verdict")
        self.assertDocumented(module, "After", gm)

    def test_what_scales_gradients_waits_too(self):
        gm = await_verdict(step(is_scaled=True), PLAN)
        check(gm, PLAN, "await_verdict")
        self.assertGraph(
            gm,
            """\
%rows1: f32[4]
%factor: f32[]
%flat1: f32[2]
%reshape_default: f32[2,2] = reshape(%rows1, [2, 2])  # u1: reduce
%checksum_default: i64[2,1] = checksum([%reshape_default], 2, [2], [2])
%all_to_all_default: f32[2,2] = all_to_all([%reshape_default], 2, 'shard')  # u1: reduce
%wait_tensor_default: f32[2,2] = wait_tensor(%all_to_all_default)  # u1: reduce
%checksum_default_1: i64[2,1] = checksum([%wait_tensor_default], 2, [2], [2])
compare_(%checksum_default, %checksum_default_1, [], [], [], 'all-to-all', 'backward', ['u1#1:w1'])
%sum_dim_int_list: f32[2] = sum(%wait_tensor_default, [0])  # u1: reduce
%div_tensor: f32[2] = div(%sum_dim_int_list, 2.0)  # u1: reduce
mark_grads_(%div_tensor, %flat1, [0])
%neg_default: f32[4] = neg(%rows1)
%flat0: f32[2]
%reshape_default_1: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%checksum_default_2: i64[2,1] = checksum([%reshape_default_1], 2, [2], [2])
%all_to_all_default_1: f32[2,2] = all_to_all([%reshape_default_1], 2, 'shard')  # u0: reduce
%wait_tensor_default_1: f32[2,2] = wait_tensor(%all_to_all_default_1)  # u0: reduce
%checksum_default_3: i64[2,1] = checksum([%wait_tensor_default_1], 2, [2], [2])
compare_(%checksum_default_2, %checksum_default_3, [], [], [], 'all-to-all', 'backward', ['u0#0:w0'])
%sum_dim_int_list_1: f32[2] = sum(%wait_tensor_default_1, [0])  # u0: reduce
%div_tensor_1: f32[2] = div(%sum_dim_int_list_1, 2.0)  # u0: reduce
mark_grads_(%div_tensor_1, %flat0, [0])
verdict_([%div_tensor, %div_tensor_1], [%checksum_default, %checksum_default_2], %flat1, 'step0')
%mul_tensor: f32[2] = mul(%div_tensor, %factor)
update_(%mul_tensor, %flat1, [0], 'step0')
%mul_tensor_1: f32[2] = mul(%div_tensor_1, %factor)
update_(%mul_tensor_1, %flat0, [0], 'step0')
return []""",
        )

    def test_near_miss(self):
        """Nothing is summed up; nothing is updated."""
        self.assertUnchanged(await_verdict, step(is_checked=False))
        gm = step()
        for update in find(gm.graph, UPDATE):
            gm.graph.erase_node(update)
        assert find(gm.graph, CHECKSUM)
        self.assertUnchanged(await_verdict, gm)
