"""`keep_grad_dtype`: no reduced gradient is rounded to the dtype of its parameters on its way out."""

from dataclasses import replace

import torch
from compiled_fsdp.passes.keep_grad_dtype import keep_grad_dtype
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit

from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import value
from compiled_fsdp.passes import keep_grad_dtype as module

LOW, FULL = torch.bfloat16, torch.float32
A, B = (replace(spec, grad_dtype=FULL) for spec in unit("u", {"a": (4, 2), "b": (2,)}))
OWN = unit("u", {"a": (4, 2)})[0]


def reduced(hand, flat, name, spec):
    return hand.reduce_grad(hand.input(f"d{name}", *spec.shape, dtype=LOW), flat, spec)


class TestKeepGradDtype(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat = hand.input("flat", 5, dtype=LOW)
        ga, gb = reduced(hand, flat, "a", A), reduced(hand, flat, "b", B)
        ca, cb = hand(CONVERT, ga, LOW), hand(CONVERT, gb, LOW)
        gm = hand.returns(hand.add(ca, cb))
        self.assertDocumented(module, "Before", gm)
        gm = keep_grad_dtype(gm, PLAN)
        self.assertDocumented(module, "After", gm)
        self.assertGraph(
            gm,
            """\
%flat: bf16[5]
%da: bf16[4,2]
%reduce_grad_default: f32[5] = reduce_grad(%da, %flat, 'a', reshard=gather)
%db: bf16[2]
%reduce_grad_default_1: f32[5] = reduce_grad(%db, %flat, 'b', reshard=gather)
%add_tensor_1: f32[5] = add(%reduce_grad_default, %reduce_grad_default_1)
return [%add_tensor_1]""",
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

    def test_near_misses(self):
        """Gradients that are kept as the buffer is; a cast to a third dtype; a cast of no gradient;
        a sum of what is no cast.
        """
        hand = Hand()
        flat = hand.input("flat", 4, dtype=LOW)
        own = hand(CONVERT, reduced(hand, flat, "own", OWN), FULL)
        kept = reduced(hand, flat, "kept", A)
        third = hand(CONVERT, kept, torch.float64)
        theirs = hand(CONVERT, hand.input("x", 4), LOW)
        total = hand.add(kept, hand.input("y", 4))
        self.assertUnchanged(keep_grad_dtype, hand.returns(own, third, theirs, total))
