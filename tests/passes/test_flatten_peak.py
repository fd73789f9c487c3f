"""`flatten_peak`: what is the last to read something large is computed first where memory peaks."""

from typing import Any

from compiled_fsdp.passes.flatten_peak import flatten_peak
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.collectives import REDUCE_SCATTER
from compiled_fsdp.passes import flatten_peak as module
from compiled_fsdp.planning.lifetimes import Lifetimes

MM = aten.mm.default
TOKENS, VOCAB, WIDTH = 64, 512, 128


def heads(*vocabularies: int, behind: Any = None, beside: int = 0) -> GraphModule:
    """Backward of linear layers, each gathered and reduced, its weight first.

    behind: what is made of the gradient of the logits for that of the input.
    beside: so many elements more are alive all the time.
    """
    hand = Hand()
    returned = [hand.compute(hand.input("beside", beside))] if beside else []
    for number, size in enumerate(vocabularies):
        flat = hand.input(f"flat{number}", size * WIDTH // 2)
        (spec,) = unit(f"head{number}", {"weight": (size, WIDTH)})
        x = hand.input(f"x{number}", TOKENS, WIDTH)
        grad = hand(aten.div.Tensor, hand.input(f"logits{number}", TOKENS, size), 2.0)
        weight = hand.unshard(flat, spec)
        of_weight = hand(MM, hand(aten.t.default, grad), x)
        reduced = hand.reduce_grad(of_weight, flat, spec)
        of_x = hand(MM, grad if behind is None else behind(hand, grad, reduced), weight)
        returned.append(hand(aten.sum.default, of_x))
    return lower(hand.returns(*returned), PLAN)


def matmuls(gm: GraphModule) -> str:
    """`w` the gradient of a weight, `x` of an input, `r` a reduction."""
    found = []
    for node in gm.graph.nodes:
        if node.target is MM:
            found.append("x" if node.meta["val"].shape[0] == TOKENS else "w")
        elif node.target is REDUCE_SCATTER:
            found.append("r")
    return "".join(found)


def peak(gm: GraphModule) -> int:
    return Lifetimes(gm.graph).curve().peak


class TestFlattenPeak(GraphTest):
    def test_docstring(self):
        hand = Hand()
        weight = hand.compute(hand.input("weight", VOCAB, WIDTH))
        grad = hand(aten.div.Tensor, hand.input("logits", TOKENS, VOCAB), 2)
        of_weight = hand(MM, hand(aten.t.default, grad), hand.input("x", TOKENS, WIDTH))
        gm = hand.returns(of_weight, hand(MM, grad, weight))
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After, since", flatten_peak(gm, PLAN))

    def test_a_head(self):
        """The gathered weight is gone before its gradient is there; the reduction stands where it
        stood among those before and behind it.
        """
        gm = heads(VOCAB)
        self.assertEqual(matmuls(gm), "wrx")
        before = peak(gm)
        self.assertEqual(matmuls(flatten_peak(gm, PLAN)), "xwr")
        logits, weight, x = TOKENS * VOCAB * 4, VOCAB * WIDTH * 4, TOKENS * WIDTH * 4
        self.assertEqual(before, logits + weight + weight + weight // 2)  # as it is reduced
        self.assertEqual(peak(gm), logits + weight + x)

    def test_heads(self):
        """Of two, both or none; another one that is smaller stays as it is."""
        gm = heads(VOCAB, VOCAB)
        self.assertEqual(matmuls(flatten_peak(gm, PLAN)), "xwrxwr")
        self.assertEqual(matmuls(flatten_peak(heads(VOCAB, 128), PLAN)), "xwrwrx")
        self.assertUnchanged(flatten_peak, heads(*[VOCAB] * (module.MOST + 1)))

    def test_near_miss(self):
        """Nothing moves that needs random numbers, or what is awaited, nor past a write; nor where
        it would change little.
        """

        def noise(hand: Hand, grad: Node, reduced: Node) -> Node:
            return hand(aten.mul.Tensor, grad, hand(aten.bernoulli.default, grad))

        def awaited(hand: Hand, grad: Node, reduced: Node) -> Node:
            return hand(aten.mul.Tensor, grad, hand(aten.sum.default, reduced))

        def written(hand: Hand, grad: Node, reduced: Node) -> Node:
            hand(aten.zero_.default, grad)
            return grad

        for behind in (noise, awaited, written):
            self.assertUnchanged(flatten_peak, heads(VOCAB, behind=behind))
        self.assertUnchanged(flatten_peak, heads(VOCAB, beside=100 * WIDTH * VOCAB))
