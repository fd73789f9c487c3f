"""`step_in_backward`: the optimizer gets a reduced gradient where it is marked, and nobody else
does.
"""

from __future__ import annotations

from typing import Any

from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.leave_in_flight import leave_in_flight
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.step_in_backward import step_in_backward
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, numel, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.graph import find, output
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.schema import MARK_GRADS, STEP
from compiled_fsdp.ir.spec import IN_BACKWARD
from compiled_fsdp.passes import step_in_backward as module
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured


def half(hand: Hand, *returned: Node | None) -> GraphModule:
    gm = hand.returns(*returned)
    set_captured(gm, Captured(gm.graph))
    return delay_wait(bucket_reduce_scatter(lower(gm, PLAN), PLAN), PLAN)


def one_gradient(**changes: Any) -> tuple[Hand, Node, Node]:
    """A graph that reduces the gradient of a unit's two parameters, and its flat buffer."""
    hand = Hand()
    specs = unit("u", {"v": (4,), "w": (4, 2)}, **{"overlap": IN_BACKWARD, **changes})
    flat, x = hand.input("flat1", numel(specs)), hand.input("x", 4, 2)
    grads = [
        hand.reduce_grad(hand(aten.sum.dim_IntList, x, [1]), flat, specs[0]),
        hand.reduce_grad(x, flat, specs[1]),
    ]
    return hand, flat, hand.add(*grads)


class TestStepInBackward(GraphTest):
    def test_docstring(self):
        hand = Hand()
        (spec,) = unit("u", {"w": (4,)}, overlap=IN_BACKWARD)
        flat, rows = hand.input("flat1", 2), hand.input("rows1", 4)
        grad = hand.reduce_grad(rows, flat, spec)
        gm = lower(hand.returns(hand.compute(rows), grad), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", step_in_backward(gm, PLAN))
        self.assertEqual([entry is None for entry in output(gm.graph).args[0]], [False, True])

    def test_a_unit(self):
        hand, _, grad = one_gradient()
        gm = step_in_backward(half(hand, grad), PLAN)
        check(gm, PLAN, "step_in_backward")
        self.assertGraph(
            gm,
            """\
%flat1: f32[6]
%x: f32[4,2]
%sum_dim_int_list: f32[4] = sum(%x, [1])
%reshape_default_4: f32[2,2] = reshape(%sum_dim_int_list, [2, 2])  # u: reduce
%reshape_default_5: f32[2,4] = reshape(%x, [2, 4])  # u: reduce
%cat_default: f32[2,6] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[12] = reshape(%cat_default, [12])  # u: reduce
%reduce_scatter_tensor_default_2: f32[6] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_2: f32[6] = wait_tensor(%reduce_scatter_tensor_default_2)  # u: reduce
%div_tensor_2: f32[6] = div(%wait_tensor_default_2, 2.0)  # u: reduce
step_(%div_tensor_2, %flat1, [0, 2])
return [None]""",
        )

    def test_the_gradient_dies_there(self):
        hand, _, grad = one_gradient()
        gm = half(hand, hand.compute(hand.input("y", 4)), grad)
        (mark,) = find(gm.graph, MARK_GRADS)
        before = Lifetimes(gm.graph).of(mark.all_input_nodes[0])
        self.assertEqual([s.is_kept for s in before], [True])
        step_in_backward(gm, PLAN)
        (step,) = find(gm.graph, STEP)
        after = Lifetimes(gm.graph).of(step.all_input_nodes[0])
        self.assertEqual([s.is_kept for s in after], [False])

    def test_parts_and_unbucketed_gradients(self):
        """The mark of what was put together counts, whatever it was put together from."""
        hand, _, grad = one_gradient()
        gm = hand.returns(grad)
        set_captured(gm, Captured(gm.graph))
        gm = step_in_backward(delay_wait(lower(gm, PLAN), PLAN), PLAN)
        check(gm, PLAN, "step_in_backward")
        self.assertEqual((len(find(gm.graph, STEP)), output(gm.graph).args), (1, ((None,),)))

    def test_leaves_alone(self):
        for changes in ({"overlap": ""}, {"overlap": "step"}):
            hand, _, grad = one_gradient(**changes)
            self.assertUnchanged(step_in_backward, half(hand, grad))

    def test_what_is_left_in_flight(self):
        hand, _, grad = one_gradient()
        gm = leave_in_flight(half(hand, grad), PLAN)
        self.assertUnchanged(step_in_backward, gm)
        check(gm, PLAN, "step_in_backward")

    def test_a_gradient_that_something_reads(self):
        hand, _, grad = one_gradient()
        self.assertUnchanged(step_in_backward, half(hand, grad, hand.compute(grad)))

    def test_a_buffer_that_is_read_later(self):
        """Itself, a view of it, and a gather that is not awaited yet."""
        for how in ("itself", "a view", "a gather"):
            hand, flat, grad = one_gradient()
            start = hand(comm.ALL_GATHER, flat, 2, "shard") if how == "a gather" else None
            gm = half(hand, grad)
            end = output(gm.graph)
            with gm.graph.inserting_before(end):
                if start is not None:
                    late = gm.graph.call_function(comm.WAIT, (start,))
                    late.meta["val"] = start.meta["val"]
                else:
                    source = hand(aten.view.default, flat, [6]) if how == "a view" else flat
                    late = hand.compute(source)
            end.args = ((*end.args[0], late),)
            self.assertUnchanged(step_in_backward, gm)

    def test_verify_sees_another_gradient(self):
        hand, _, grad = one_gradient()
        gm = step_in_backward(half(hand, grad), PLAN)
        (step,) = find(gm.graph, STEP)
        with gm.graph.inserting_before(step):
            other = hand.graph.call_function(aten.neg.default, (step.args[0],))
        other.meta["val"] = step.args[0].meta["val"]
        step.args = (other, *step.args[1:])
        with self.assertRaisesRegex(GraphInvariantError, "output 0 is not what was captured"):
            check(gm, PLAN, "by hand")
