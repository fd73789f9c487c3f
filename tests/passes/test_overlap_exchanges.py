"""`overlap_exchanges`: what does not need tokens is computed while they travel."""

from dataclasses import replace
from typing import Any

import torch
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.overlap_exchanges import overlap_exchanges
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.collectives import ALL_REDUCE, WAIT
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.passes import overlap_exchanges as module
from compiled_fsdp.planning.costs import Costs, Link

MM = aten.mm.default
torch.library.custom_op(
    "tests_exchanges::send", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor"
)
torch.library.register_fake("tests_exchanges::send", torch.empty_like)
N = 64
OFF = replace(PLAN, overlap_exchanges=False)


def exchange(hand: Hand, x: Node) -> tuple[Node, Node]:
    """A start, and its wait."""
    start = hand(EXCHANGE, x, [N // 2] * 2, [N // 2] * 2, "ep")
    return start, hand(WAIT, start)


def letters(gm: GraphModule) -> str:
    """`S`tarts and `W`aits of exchanges, each followed by its number; `m`atmuls; `n`egations, of
    experts; `r`andom numbers; `A`ll-reduces.
    """
    numbers: dict[Node, int] = {}
    found = []
    for node in gm.graph.nodes:
        if node.target is EXCHANGE:
            numbers[node] = len(numbers)
            found.append(f"S{numbers[node]}")
        elif node.target is WAIT and node.args[0] in numbers:
            found.append(f"W{numbers[node.args[0]]}")
        else:
            short = {MM: "m", aten.neg.default: "n", aten.bernoulli.default: "r", ALL_REDUCE: "A"}
            found.append(short.get(node.target, ""))
    return " ".join(filter(None, found))


def block(hand: Hand, x: Node, *, shared: int = 0) -> Node:
    """Tokens there, experts, and back; then so many matmuls of a shared expert."""
    tokens = exchange(hand, hand.add(x, x))[1]
    routed = exchange(hand, hand.compute(tokens))[1]
    y = x
    for _ in range(shared):
        y = hand(MM, y, x)
    return hand.add(routed, y)


def made(build: Any) -> GraphModule:
    hand = Hand()
    x = hand.input("input", N, N)
    return lower(hand.returns(build(hand, hand(aten.tanh.default, x))), PLAN)


class TestOverlapExchanges(GraphTest):
    def test_docstring(self):
        hand = Hand()
        y = hand.compute(hand.input("x", N, N))
        grad = hand.compute(y)
        routed = hand.compute(exchange(hand, y)[1])
        gm = hand.returns(grad, routed, hand(MM, y, y))
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", overlap_exchanges(gm, PLAN))

    def test_a_shared_expert_is_divided_among_both(self):
        build = lambda hand, x: block(hand, x, shared=4)  # noqa: E731
        gm = made(build)
        self.assertEqual(letters(gm), "S0 W0 n S1 W1 m m m m")
        self.assertEqual(letters(overlap_exchanges(gm, PLAN)), "S0 m m W0 n S1 m m W1")
        self.assertUnchanged(overlap_exchanges, made(build), OFF)

    def test_a_wire_that_takes_no_time(self):
        links = (("ep", Link(0.0, float("inf"))),)
        plan = replace(PLAN, costs=Costs(5e10, 1e10, 5e-6, links))
        gm = made(lambda hand, x: block(hand, x, shared=4))
        self.assertEqual(letters(overlap_exchanges(gm, plan)), "S0 m m m m W0 n S1 W1")

    def test_chunks_travel_while_others_compute(self):
        def chunks(hand: Hand, x: Node) -> Node:
            parts = [hand(aten.mul.Tensor, x, float(i)) for i in (1, 2, 3)]
            return hand(aten.cat.default, [block(hand, part) for part in parts])

        gm = made(chunks)
        self.assertEqual(letters(gm), "S0 W0 n S1 W1 S2 W2 n S3 W3 S4 W4 n S5 W5")
        self.assertEqual(
            letters(overlap_exchanges(gm, PLAN)), "S0 S1 S2 W0 n S3 W1 n S4 W2 n S5 W3 W4 W5"
        )

    def test_gradients_of_weights_wait_for_the_start(self):
        """What the next exchange needs goes first."""

        def backward(hand: Hand, x: Node) -> Node:
            grad = exchange(hand, x)[1]
            of_weight = hand(MM, grad, grad)
            back = exchange(hand, hand.compute(grad))[1]
            return hand.add(hand.add(back, of_weight), x)

        self.assertEqual(letters(overlap_exchanges(made(backward), PLAN)), "S0 W0 n S1 m W1")

    def test_near_miss(self):
        """Nothing is moved past random numbers, other collectives, writes, or what another library
        may send; nothing from further down than the exchanges of the next block; nothing that reads
        only what is given.
        """

        def random(hand: Hand, x: Node) -> Node:
            routed = block(hand, x)
            dropped = hand(aten.mul.Tensor, hand(aten.bernoulli.default, x), x)
            reduced = hand(WAIT, hand(ALL_REDUCE, x, "sum", "ep"))
            return hand(aten.cat.default, [routed, dropped, hand(MM, reduced, reduced)])

        def far(hand: Hand, x: Node) -> Node:
            y = x
            for _ in range(3):
                y = block(hand, y)
            return hand.add(y, hand(MM, x, x))

        def given(hand: Hand, x: Node) -> Node:
            routed = block(hand, x)
            weight = hand.input("weight", N, N)
            return hand.add(routed, hand(MM, weight, hand(aten.t.default, weight)))

        def written(hand: Hand, x: Node) -> Node:
            routed = block(hand, x)
            hand(aten.copy_.default, x, routed)
            return hand(MM, x, x)

        def opaque(hand: Hand, x: Node) -> Node:
            routed = block(hand, x)
            sent = hand(torch.ops.tests_exchanges.send.default, x)
            return hand(aten.cat.default, [routed, hand(MM, sent, sent)])

        for build in (random, given, written, opaque):
            self.assertUnchanged(overlap_exchanges, made(build))
        self.assertEqual(
            letters(overlap_exchanges(made(far), PLAN)),
            "S0 W0 n S1 W1 S2 W2 n S3 W3 S4 m W4 n S5 W5",
        )

    def test_sizes_that_depend_on_data_come_along(self):
        """The counts of the next chunk are read before this chunk's tokens are awaited."""

        def counted(hand: Hand, x: Node) -> Node:
            found = []
            for i in (1, 2):
                part = hand(aten.mul.Tensor, x, float(i))
                counts = exchange(hand, part)[1]
                sent = exchange(hand, hand.add(counts, part))[1]
                found.append(exchange(hand, hand.compute(sent))[1])
            return hand(aten.cat.default, found)

        gm = made(counted)
        self.assertEqual(letters(gm), "S0 W0 S1 W1 n S2 W2 S3 W3 S4 W4 n S5 W5")
        self.assertEqual(
            letters(overlap_exchanges(gm, PLAN)), "S0 S1 W0 S2 W1 S3 W2 n S4 W3 n S5 W4 W5"
        )
        assert torch.Tag.nondeterministic_seeded in aten.bernoulli.default.tags
        assert "all_to_all_single" in ops(gm.graph)
