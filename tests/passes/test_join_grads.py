"""`join_grads`: gradients of a flat parameter's views become one concatenation."""

from compiled_fsdp.passes.join_grads import join_grads
from kit.passes_harness import PLAN, GraphTest, Hand, unit

from compiled_fsdp.ir.schema import FLATTEN_GRAD
from compiled_fsdp.passes import join_grads as module

(FLAT,) = unit("u", {"flat": (8,)})


class TestJoinGrads(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat, d0, d1 = hand.input("flat", 4), hand.input("d0", 2, 2), hand.input("d1", 4)
        f1, f0 = hand(FLATTEN_GRAD, d1, 4, 8, [0]), hand(FLATTEN_GRAD, d0, 0, 8, [0, 1])
        gm = hand.returns(hand.reduce_grad(hand.add(f1, f0), flat, FLAT))
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", join_grads(gm, PLAN))

    def test_gaps_orders_and_repeated_places(self):
        """Zeros where nothing has a gradient; a transposed parameter in its memory's order; two
        reads added first.
        """
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 2, 3), hand.input("e", 2, 3)
        total = hand.add(hand(FLATTEN_GRAD, d, 1, 8, [1, 0]), hand(FLATTEN_GRAD, e, 1, 8, [1, 0]))
        self.assertGraph(
            join_grads(hand.returns(hand.reduce_grad(total, flat, FLAT)), PLAN),
            """\
%flat: f32[4]
%d: f32[2,3]
%e: f32[2,3]
%add_tensor_1: f32[2,3] = add(%d, %e)
%permute_default: f32[3,2] = permute(%add_tensor_1, [1, 0])
%reshape_default: f32[6] = reshape(%permute_default, [-1])
%constant_pad_nd_default: f32[8] = constant_pad_nd(%reshape_default, [1, 1])
%reduce_grad_default: f32[4] = reduce_grad(%constant_pad_nd_default, %flat, 'flat', reshard=gather)
return [%reduce_grad_default]""",
        )

    def test_a_view_of_no_elements(self):
        """It begins where the next one does."""
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 4, 0), hand.input("e", 8)
        total = hand.add(hand(FLATTEN_GRAD, d, 0, 8, [0, 1]), hand(FLATTEN_GRAD, e, 0, 8, [0]))
        self.assertGraph(
            join_grads(hand.returns(hand.reduce_grad(total, flat, FLAT)), PLAN),
            """\
%flat: f32[4]
%d: f32[4,0]
%e: f32[8]
%reshape_default: f32[8] = reshape(%e, [-1])
%clone_default: f32[8] = clone(%reshape_default, memory_format=torch.contiguous_format)
%reduce_grad_default: f32[4] = reduce_grad(%clone_default, %flat, 'flat', reshard=gather)
return [%reduce_grad_default]""",
        )

    def test_another_term(self):
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 8), hand.input("e", 8)
        total = hand.add(hand(FLATTEN_GRAD, d, 0, 8, [0]), e)
        gm = hand.returns(hand.reduce_grad(total, flat, FLAT))
        before = str(gm.graph)
        self.assertEqual(str(join_grads(gm, PLAN).graph), before)
