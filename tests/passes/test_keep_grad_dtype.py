"""`keep_grad_dtype`: no gradient is rounded to the dtype of its parameters on its way to its reduction,
nor behind it.
"""

from dataclasses import replace

import torch
from compiled_fsdp.passes.keep_grad_dtype import keep_grad_dtype
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit

from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import value
from compiled_fsdp.ir.schema import CAST_GRAD
from compiled_fsdp.passes import keep_grad_dtype as module

LOW, FULL = torch.bfloat16, torch.float32
A, B = (
    replace(spec, grad_dtype=FULL, dtype=LOW, reduce_dtype=FULL, keeps_wide=True)
    for spec in unit("u", {"a": (4, 2), "b": (2,)})
)
OWN = unit("u", {"a": (4, 2)})[0]


def reduced(hand, flat, name, spec):
    return hand.reduce_grad(hand.input(f"d{name}", *spec.shape, dtype=LOW), flat, spec)


def traced(node, number):
    """What torch notes of a node of forward."""
    node.meta.update(seq_nr=number, original_aten=node.target)
    return node


def by_autograd(node, number, function="mul"):
    """What it notes of a cast that autograd makes in backward, and of others there."""
    node.meta.update(seq_nr=number)
    node.meta["fwd_source_fn_stack"] = [(function, function)]
    return node


class TestKeepGradDtype(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat, x = hand.input("flat", 5, dtype=LOW), hand.input("x", 2)
        da, dy = hand.input("da", 4, 2, dtype=LOW), hand.input("dy", 2)
        b = traced(hand.unshard(flat, B), 6)
        y = traced(hand(aten.mul.Tensor, x, b), 7)
        ra = hand(CAST_GRAD, hand.compute(hand(CAST_GRAD, da, FULL)), LOW)
        ga = hand.reduce_grad(ra, flat, A)
        rb = by_autograd(hand(CONVERT, hand(aten.mul.Tensor, x, dy), LOW), 7)
        gb = by_autograd(hand.reduce_grad(rb, flat, B), 6, "unshard_as")
        ca, cb = hand(CONVERT, ga, LOW), hand(CONVERT, gb, LOW)
        gm = hand.returns(hand.add(ca, cb), y)
        self.assertDocumented(module, "Before", gm)
        gm = keep_grad_dtype(gm, PLAN)
        self.assertDocumented(module, "After", gm)
        self.assertGraph(
            gm,
            """\
%flat: bf16[5]
%x: f32[2]
%da: bf16[4,2]
%dy: f32[2]
%unshard_default: bf16[2] = unshard(%flat, 'b', reshard=gather)
%mul_tensor: f32[2] = mul(%x, %unshard_default)
%convert_element_type_default_3: f32[4,2] = convert_element_type(%da, f32)
%neg_default: f32[4,2] = neg(%convert_element_type_default_3)
%reduce_grad_default: f32[5] = reduce_grad(%neg_default, %flat, 'a', reshard=gather)
%mul_tensor_1: f32[2] = mul(%x, %dy)
%reduce_grad_default_1: f32[5] = reduce_grad(%mul_tensor_1, %flat, 'b', reshard=gather)
%add_tensor_1: f32[5] = add(%reduce_grad_default, %reduce_grad_default_1)
return [%add_tensor_1, %mul_tensor]""",
        )

    def test_other_casts(self):
        """Autograd's own op for a cast; of one of two terms; and one that is of narrower gradients."""
        hand = Hand()
        flat, wide = hand.input("flat", 4, dtype=LOW), hand.input("wide", 4)
        cast = hand(aten._to_copy.default, reduced(hand, flat, "a", A), dtype=LOW)
        other = hand.input("other", 4, dtype=LOW)
        narrow = hand.reduce_grad(hand.input("d", 4, 2), wide, replace(OWN, grad_dtype=LOW))
        gm = hand.returns(hand.add(cast, other), hand(CONVERT, narrow, FULL))
        self.assertGraph(
            keep_grad_dtype(gm, PLAN),
            """\
%flat: bf16[4]
%wide: f32[4]
%da: bf16[4,2]
%reduce_grad_default: f32[4] = reduce_grad(%da, %flat, 'a', reshard=gather)
%other: bf16[4]
%d: f32[4,2]
%reduce_grad_default_1: bf16[4] = reduce_grad(%d, %wide, 'a', reshard=gather)
%add_tensor_1: f32[4] = add(%reduce_grad_default, %other)
return [%add_tensor_1, %reduce_grad_default_1]""",
        )

    def test_a_thousand_terms(self):
        hand = Hand()
        flat = hand.input("flat", 5, dtype=LOW)
        total = hand(CONVERT, reduced(hand, flat, "0", A), LOW)
        for i in range(1, 1200):
            total = hand.add(total, hand(CONVERT, reduced(hand, flat, str(i), B), LOW))
        gm = keep_grad_dtype(hand.returns(total), PLAN)
        assert not gm.graph.find_nodes(op="call_function", target=CONVERT)
        assert {value(n).dtype for n in gm.graph.nodes if n.target is aten.add.Tensor} == {FULL}

    def test_a_sum_that_is_read_twice(self):
        """What else reads it rounded does so still; what is kept as the buffer is, is left so."""
        hand = Hand()
        flat, rounded = (
            hand.input("flat", 4, dtype=LOW),
            hand(CAST_GRAD, hand.input("d", 4, 2), LOW),
        )
        gm = hand.returns(hand.reduce_grad(rounded, flat, OWN), rounded)
        self.assertGraph(
            keep_grad_dtype(gm, PLAN),
            """\
%flat: bf16[4]
%d: f32[4,2]
%cast_grad_default: bf16[4,2] = cast_grad(%d, bf16)
%reduce_grad_default: bf16[4] = reduce_grad(%d, %flat, 'a', reshard=gather)
return [%reduce_grad_default, %cast_grad_default]""",
        )

    def test_near_misses(self):
        """Gradients that are kept as the buffer is; a cast to a third dtype; a cast of no gradient;
        a sum of what is no cast; a gradient that was rounded, and then added to.
        """
        hand = Hand()
        flat = hand.input("flat", 4, dtype=LOW)
        own = hand(CONVERT, reduced(hand, flat, "own", OWN), FULL)
        kept = reduced(hand, flat, "kept", A)
        third = hand(CONVERT, kept, torch.float64)
        theirs = hand(CONVERT, hand.input("x", 4), LOW)
        total = hand.add(kept, hand.input("y", 4))
        rounded = hand(CAST_GRAD, hand.input("d", 4, 2), LOW)
        more = hand.reduce_grad(hand.add(rounded, hand.input("e", 4, 2, dtype=LOW)), flat, OWN)
        self.assertUnchanged(keep_grad_dtype, hand.returns(own, third, theirs, total, more))
