"""`mark_recomputed`: what the budget has no room for is marked,
and where the graph is split, computed again.
"""

from dataclasses import replace

import torch
from compiled_fsdp.passes.mark_recomputed import mark_recomputed
from kit.passes_harness import PLAN, GraphTest, Hand, aten
from torch.fx import GraphModule

from compiled_fsdp.compiler.recompute import compute_again
from compiled_fsdp.ir.meta import is_computed_again
from compiled_fsdp.passes import mark_recomputed as module
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.planning.recompute import Saved


def joint() -> GraphModule:
    hand = Hand()
    x, w, v, u = (hand.input(name, 4, 4) for name in "xwvu")
    dy = hand.input("tangents_1", 4, 4)
    a = hand(aten.mm.default, x, w)
    y = hand(aten.mm.default, hand(aten.silu.default, a), v)
    dh = hand(aten.mm.default, dy, u)
    return hand.returns(y, hand(aten.silu_backward.default, dh, a))


def halves(op: object = aten.mm.default) -> tuple[GraphModule, GraphModule]:
    """A forward that saves the result of an op, its input beside it,
    for a backward that needs it.
    """
    hand = Hand()
    x, w = hand.input("primals_1", 4, 4), hand.input("primals_2", 4, 4)
    b = hand(aten.tanh.default, x)
    inputs = (b, w) if op is aten.mm.default else (b,)
    a = hand(op, *inputs)
    a._rename("a")
    forward = hand.returns(hand(aten.sin.default, a), x, w, b, a)
    hand = Hand()
    saved = [hand.input(node.name, 4, 4) for node in (x, w, b, a)]
    dy = hand.input("tangents_1", 4, 4)
    first = hand(aten.mul.Tensor, dy, saved[2])
    second = hand(aten.mul.Tensor, first, hand(aten.cos.default, saved[3]))
    return forward, hand.returns(hand(aten.mul.Tensor, second, hand(aten.neg.default, saved[1])))


class TestMarkRecomputed(GraphTest):
    def test_docstring(self):
        self.assertDocumented(module, "Before", joint())
        gm = mark_recomputed(joint(), replace(PLAN, recomputed=("mm_default", "another")))
        marked = [node.name for node in gm.graph.nodes if is_computed_again(node)]
        self.assertEqual(marked, ["mm_default"])

    def test_near_miss(self):
        self.assertUnchanged(mark_recomputed, joint())
        self.assertFalse(any(map(is_computed_again, joint().graph.nodes)))

    def test_split(self):
        """Forward does not save it, and backward computes it directly before it is needed."""
        forward, backward = halves()
        self.assertEqual(compute_again((forward, backward), ["a"]), [])
        self.assertGraph(
            forward,
            """\
%primals_1: f32[4,4]
%primals_2: f32[4,4]
%tanh_default: f32[4,4] = tanh(%primals_1)
%a: f32[4,4] = mm(%tanh_default, %primals_2)
%sin_default: f32[4,4] = sin(%a)
return [%sin_default, %primals_1, %primals_2, %tanh_default]""",
        )
        self.assertGraph(
            backward,
            """\
%primals_1: f32[4,4]
%primals_2: f32[4,4]
%tanh_default: f32[4,4]
%tangents_1: f32[4,4]
%mul_tensor: f32[4,4] = mul(%tangents_1, %tanh_default)
%a: f32[4,4] = mm(%tanh_default, %primals_2)
%cos_default: f32[4,4] = cos(%a)
%mul_tensor_1: f32[4,4] = mul(%mul_tensor, %cos_default)
%neg_default: f32[4,4] = neg(%primals_2)
%mul_tensor_2: f32[4,4] = mul(%mul_tensor_1, %neg_default)
return [%mul_tensor_2]""",
        )

    def test_candidates(self):
        """Both that are saved, the one made of the other."""
        forward, backward = halves()
        found = Saved.of(forward.graph, backward.graph).candidates(assumed("cpu"))
        self.assertEqual(
            [(c.name, c.needs) for c in found], [("tanh_default", ()), ("a", ("tanh_default",))]
        )

    def test_what_may_differ_stays_saved(self):
        """Random numbers; a value that a checkpointing policy saves; one that the user gets too."""
        for op in (aten.bernoulli.default, aten.rand_like.default):
            forward, backward = halves(op)
            found = Saved.of(forward.graph, backward.graph).candidates(assumed("cpu"))
            self.assertEqual([c.name for c in found], ["tanh_default"])
            self.assertEqual(compute_again((forward, backward), ["a"]), ["a"])
        forward, backward = halves()
        node = next(node for node in forward.graph.nodes if node.name == "a")
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        self.assertEqual(compute_again((forward, backward), ["a"]), ["a"])
        forward, backward = halves()
        end = next(iter(reversed(forward.graph.nodes)))
        end.args = ([next(n for n in forward.graph.nodes if n.name == "a"), *end.args[0]],)
        self.assertEqual(compute_again((forward, backward), ["a"]), ["a"])

    def test_what_forward_writes_to_is_not_read_again(self):
        forward, backward = halves()
        end = next(iter(reversed(forward.graph.nodes)))
        w, b = (
            next(n for n in forward.graph.nodes if n.name == name)
            for name in ("primals_2", "tanh_default")
        )
        with forward.graph.inserting_before(end):
            written = forward.graph.call_function(aten.copy_.default, (w, b))
        written.meta["val"] = w.meta["val"]
        self.assertEqual(compute_again((forward, backward), ["a"]), ["a"])
