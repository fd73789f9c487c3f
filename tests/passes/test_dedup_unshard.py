"""`dedup_unshard`: repeated reads gather once, repeated gradients reduce once, in the order of
autograd.
"""

from dataclasses import replace

import torch
from compiled_fsdp.passes.dedup_unshard import dedup_unshard
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops, unit

from compiled_fsdp.ir.graph import ADD, erase_unused, sum_leaves
from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.schema import REDUCE_GRAD
from compiled_fsdp.passes import dedup_unshard as module

(W,) = unit("u", {"w": (4, 2)})
A, B = unit("u", {"a": (4, 2), "b": (2,)})


class TestDedupUnshard(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat, da, db = hand.input("flat", 4), hand.input("da", 4, 2), hand.input("db", 4, 2)
        hand.unshard(flat, W)
        hand.unshard(flat, W)
        ga, gb = hand.reduce_grad(da, flat, W), hand.reduce_grad(db, flat, W)
        gm = hand.returns(hand.add(gb, ga))
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", dedup_unshard(gm, PLAN))

    def test_two_reads(self):
        hand = Hand()
        flat = hand.input("flat", 4)
        x = hand.compute(hand.unshard(flat, W))
        y = hand.compute(hand.unshard(flat, W))
        self.assertGraph(
            dedup_unshard(hand.returns(x, y), PLAN),
            """\
%flat: f32[4]
%unshard_default: f32[4,2] = unshard(%flat, 'w', reshard=gather)
%neg_default: f32[4,2] = neg(%unshard_default)
%neg_default_1: f32[4,2] = neg(%unshard_default)
return [%neg_default, %neg_default_1]""",
        )

    def test_tied_behind_sharding(self):
        """Added in the dtype in which they are reduced; what is in it already is not cast."""
        hand = Hand()
        low, wide = torch.bfloat16, torch.float32
        spec = replace(W, dtype=low, reduce_dtype=wide, adds_wide=True)
        flat, da, db = (
            hand.input("flat", 4),
            hand.input("da", 4, 2, dtype=low),
            hand.input("db", 4, 2),
        )
        ga, gb = hand.reduce_grad(da, flat, spec), hand.reduce_grad(db, flat, spec)
        self.assertGraph(
            dedup_unshard(hand.returns(hand.add(gb, ga)), PLAN),
            """\
%flat: f32[4]
%da: bf16[4,2]
%db: f32[4,2]
%convert_element_type_default: f32[4,2] = convert_element_type(%da, f32)
%add_tensor_1: f32[4,2] = add(%db, %convert_element_type_default)
%reduce_grad_default_2: f32[4] = reduce_grad(%add_tensor_1, %flat, 'w', reshard=gather)
return [%reduce_grad_default_2]""",
        )

    def test_order_of_additions(self):
        """((b + a1) + a2) + a3 becomes b + ((a1 + a2) + a3): each parameter's terms in the order in
        which they arrived.
        """
        hand = Hand()
        flat = hand.input("flat", 5)
        d1, d2, d3 = (hand.input(f"d{i}", 4, 2) for i in (1, 2, 3))
        db = hand.input("db", 2)
        total = hand.reduce_grad(db, flat, B)
        for d in (d1, d2, d3):
            total = hand.add(total, hand.reduce_grad(d, flat, A))
        self.assertGraph(
            dedup_unshard(hand.returns(total), PLAN),
            """\
%flat: f32[5]
%d1: f32[4,2]
%d2: f32[4,2]
%d3: f32[4,2]
%db: f32[2]
%reduce_grad_default: f32[5] = reduce_grad(%db, %flat, 'b', reshard=gather)
%add_tensor_3: f32[4,2] = add(%d1, %d2)
%add_tensor_4: f32[4,2] = add(%add_tensor_3, %d3)
%reduce_grad_default_4: f32[5] = reduce_grad(%add_tensor_4, %flat, 'a', reshard=gather)
%add_tensor_5: f32[5] = add(%reduce_grad_default, %reduce_grad_default_4)
return [%add_tensor_5]""",
        )

    def test_bf16_gradients_are_added_as_they_arrive(self):
        (spec,) = unit("u", {"w": (4, 2)}, dtype=torch.bfloat16, reduce_dtype=torch.float32)
        hand = Hand()
        flat = hand.input("flat", 4)
        d1, d2 = (hand.input(f"d{i}", 4, 2, dtype=torch.bfloat16) for i in (1, 2))
        gm = hand.returns(
            hand.add(hand.reduce_grad(d1, flat, spec), hand.reduce_grad(d2, flat, spec))
        )
        self.assertGraph(
            dedup_unshard(gm, PLAN),
            """\
%flat: f32[4]
%d1: bf16[4,2]
%d2: bf16[4,2]
%add_tensor_1: bf16[4,2] = add(%d1, %d2)
%reduce_grad_default_2: f32[4] = reduce_grad(%add_tensor_1, %flat, 'w', reshard=gather)
return [%reduce_grad_default_2]""",
        )

    def test_near_miss_other_parameter_or_policy(self):
        hand = Hand()
        flat = hand.input("flat", 5)
        half = replace(A, dtype=torch.bfloat16)
        self.assertUnchanged(
            dedup_unshard, hand.returns(*(hand.unshard(flat, s) for s in (A, B, half)))
        )

    def test_near_miss_other_flat(self):
        hand = Hand()
        flats = hand.input("flat1", 4), hand.input("flat2", 4)
        self.assertUnchanged(dedup_unshard, hand.returns(*(hand.unshard(f, W) for f in flats)))

    def test_near_miss_foreign_term(self):
        hand = Hand()
        flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
        both = hand.add(hand.reduce_grad(d, flat, W), hand.reduce_grad(hand.compute(d), flat, W))
        self.assertUnchanged(dedup_unshard, hand.returns(hand.add(both, hand.input("penalty", 4))))

    def test_near_miss_scalar_or_scaled_term(self):
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 4, 2), hand.input("e", 4, 2)
        scaled = hand(
            aten.add.Tensor, hand.reduce_grad(d, flat, W), hand.reduce_grad(e, flat, W), alpha=2
        )
        self.assertUnchanged(dedup_unshard, hand.returns(hand(aten.add.Tensor, scaled, 1)))

    def test_near_miss_two_sums(self):
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 4, 2), hand.input("e", 4, 2)
        shared, other = hand.reduce_grad(d, flat, W), hand.reduce_grad(e, flat, W)
        self.assertUnchanged(dedup_unshard, hand.returns(hand.add(shared, other), shared))

    def test_keeps_effects_nobody_reads(self):
        """A mutation (running statistics, say) has no users and must survive."""
        hand = Hand()
        flat, d, e, mean = (
            hand.input("flat", 4),
            hand.input("d", 4, 2),
            hand.input("e", 4, 2),
            hand.input("mean", 2),
        )
        hand(aten.copy_.default, mean, hand.compute(mean))
        gm = hand.returns(hand.add(hand.reduce_grad(d, flat, W), hand.reduce_grad(e, flat, W)))
        self.assertEqual(ops(dedup_unshard(gm, PLAN).graph), ["neg", "copy_", "add", "reduce_grad"])

    def test_deep_sum(self):
        """A unit of two thousand parameters is a sum two thousand additions deep."""
        hand = Hand()
        terms = [hand.graph.call_function(REDUCE_GRAD) for _ in range(2000)]
        total = terms[0]
        for term in terms[1:]:
            total = hand.graph.call_function(ADD, (total, term))
        self.assertEqual(sum_leaves(total), terms)
        erase_unused(total, ADD)
        self.assertEqual(ops(hand.graph), ["reduce_grad"] * len(terms))

    def test_idempotent(self):
        hand = Hand()
        flat, d, e = hand.input("flat", 4), hand.input("d", 4, 2), hand.input("e", 4, 2)
        x = hand.add(hand.unshard(flat, W), hand.unshard(flat, W))
        gm = dedup_unshard(
            hand.returns(x, hand.add(hand.reduce_grad(d, flat, W), hand.reduce_grad(e, flat, W))),
            PLAN,
        )
        once = show(gm.graph)
        self.assertEqual(show(dedup_unshard(gm, PLAN).graph), once)
