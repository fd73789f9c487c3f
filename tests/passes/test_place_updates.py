"""`place_updates`: each update stands where its gradient is there, and nothing reads the buffer any
more.
"""

from __future__ import annotations

from typing import Any

from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.place_updates import place_updates
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import UPDATE
from compiled_fsdp.passes import place_updates as module
from compiled_fsdp.verification.meaning import Captured


def two_units() -> tuple[Hand, list[Node], list[Node]]:
    """A graph that reduces the gradients of two units, the later one first; its flat buffers and
    flat gradients.
    """
    hand = Hand()
    flats, grads = [], []
    rows = hand.input("rows1", 4)
    for number in (1, 0):
        (spec,) = unit(f"u{number}", {f"w{number}": (4,)})
        flats.append(hand.input(f"flat{number}", 2))
        grads.append(hand.reduce_grad(rows, flats[-1], spec))
        rows = hand.compute(rows) if number else rows
    return hand, flats, grads


def step(hand: Hand, flats: list[Node], grads: list[Node], *returned: Any) -> GraphModule:
    for grad, flat in zip(grads, flats, strict=True):
        hand(UPDATE, grad, flat, [0], "step0")
    gm = hand.returns(*returned)
    set_captured(gm, Captured(gm.graph))
    return lower(gm, PLAN)


class TestPlaceUpdates(GraphTest):
    def test_docstring(self):
        gm = step(*two_units())
        self.assertDocumented(module, "Before", gm)
        place_updates(gm, PLAN)
        check(gm, PLAN, "place_updates")
        self.assertDocumented(module, "After", gm)

    def test_a_later_reduction_is_under_way(self):
        gm = place_updates(delay_wait(step(*two_units()), PLAN), PLAN)
        check(gm, PLAN, "place_updates")
        self.assertGraph(
            gm,
            """\
%rows1: f32[4]
%flat1: f32[2]
%reshape_default: f32[2,2] = reshape(%rows1, [2, 2])  # u1: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u1: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u1: reduce
%neg_default: f32[4] = neg(%rows1)
%flat0: f32[2]
%reshape_default_2: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u0: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u1: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u1: reduce
mark_grads_(%div_tensor, %flat1, [0])
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u0: reduce
update_(%div_tensor, %flat1, [0], 'step0')
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u0: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_1, 2.0)  # u0: reduce
mark_grads_(%div_tensor_1, %flat0, [0])
update_(%div_tensor_1, %flat0, [0], 'step0')
return []""",
        )

    def test_clipped(self):
        hand, flats, grads = two_units()
        factor = hand.compute(hand.add(*grads))
        scaled = [hand(aten.mul.Tensor, grad, factor) for grad in grads]
        gm = place_updates(step(hand, flats, scaled), PLAN)
        check(gm, PLAN, "place_updates")
        self.assertGraph(
            gm,
            """\
%rows1: f32[4]
%flat1: f32[2]
%reshape_default: f32[2,2] = reshape(%rows1, [2, 2])  # u1: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u1: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u1: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u1: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u1: reduce
mark_grads_(%div_tensor, %flat1, [0])
%neg_default: f32[4] = neg(%rows1)
%flat0: f32[2]
%reshape_default_2: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u0: reduce
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u0: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u0: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_1, 2.0)  # u0: reduce
mark_grads_(%div_tensor_1, %flat0, [0])
%add_tensor: f32[2] = add(%div_tensor, %div_tensor_1)
%neg_default_1: f32[2] = neg(%add_tensor)
%mul_tensor: f32[2] = mul(%div_tensor, %neg_default_1)
update_(%mul_tensor, %flat1, [0], 'step0')
%mul_tensor_1: f32[2] = mul(%div_tensor_1, %neg_default_1)
update_(%mul_tensor_1, %flat0, [0], 'step0')
return []""",
        )

    def test_a_buffer_that_is_still_read(self):
        """The near miss: something reads the flat buffer later, and the update stays behind it."""
        hand, flats, grads = two_units()
        late = hand.compute(flats[0])
        gm = step(hand, flats, grads, late)
        place_updates(gm, PLAN)
        check(gm, PLAN, "place_updates")
        nodes = list(gm.graph.nodes)
        updates = [node for node in nodes if node.target is UPDATE]
        assert [nodes.index(late) < nodes.index(update) for update in updates] == [False, True]
        assert {update.args[1] for update in updates[1:]} == {flats[0]}

    def test_leaves_alone(self):
        hand, _, grads = two_units()
        self.assertUnchanged(place_updates, lower(hand.returns(*grads), PLAN))
