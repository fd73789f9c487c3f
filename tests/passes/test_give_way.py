"""`give_way`: all-gathers start in the longest stretch of computation between exchanges."""

from dataclasses import replace
from typing import Any

from compiled_fsdp.passes.give_way import give_way
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.prefetch_all_gather import prefetch_all_gather
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.collectives import ALL_GATHER, WAIT
from compiled_fsdp.ir.schema import EXCHANGE
from compiled_fsdp.passes import give_way as module
from compiled_fsdp.planning.costs import Costs, Link, assumed, traffic

MM = aten.mm.default
N = 512


def tokens(hand: Hand, x: Node) -> Node:
    """What an exchange brings."""
    half = x.meta["val"].shape[0] // 2
    return hand(WAIT, hand(EXCHANGE, x, [half, half], [half, half], "ep"))


def layers(stretches: list[list[int]], *, prefetch: int = 1, **changes: Any) -> GraphModule:
    """Units one after the other; each with so many matmuls before its first exchange, between that
    and the second, and so on, the last behind the last.
    """
    hand = Hand()
    x = hand.input("x", N, N)
    for number, counts in enumerate(stretches):
        specs = unit(f"u{number}", {"w": (N, N)}, **changes)
        weight = hand.unshard(hand.input(f"flat{number}", N * N // 2), *specs)
        for index, count in enumerate(counts):
            for _ in range(count):
                x = hand(MM, x, weight)
            if index < len(counts) - 1:
                x = tokens(hand, x)
    plan = replace(PLAN, prefetch=prefetch)
    return prefetch_all_gather(lower(hand.returns(x), plan), plan)


def on_a_wire(gm: GraphModule, *, matmuls: float) -> Costs:
    """Costs by which a gather takes as long as so many of the matmuls."""
    costs = assumed("cpu")
    nodes = {node.target: node for node in gm.graph.nodes}
    seconds = matmuls * costs.compute(nodes[MM])
    sent, _ = traffic(nodes[ALL_GATHER])
    return replace(costs, links=(("", Link(0.0, sent / seconds)),))


def letters(gm: GraphModule) -> str:
    """Gathers begin and are awaited as `(0` and `0)`; tokens travel as `<>`; `m`atmuls."""
    numbers: dict[Node, int] = {}
    found = []
    for node in gm.graph.nodes:
        if node.target is ALL_GATHER:
            numbers[node] = len(numbers)
            found.append(f"({numbers[node]}")
        elif node.target is WAIT:
            begun = node.all_input_nodes[0]
            found.append(f"{numbers[begun]})" if begun in numbers else ">")
        else:
            found.append({MM: "m", EXCHANGE: "<"}.get(node.target, ""))
    return "".join(found)


class TestGiveWay(GraphTest):
    def test_docstring(self):
        hand = Hand()
        (v,) = unit("v", {"w": (4,)})
        flat, x = hand.input("flat1", 2), hand.input("x", N, N)
        arrived = tokens(hand, hand.compute(x))
        back = tokens(hand, hand(MM, arrived, arrived))
        once = hand(MM, back, back)
        gm = lower(hand.returns(hand(MM, once, once), hand.unshard(flat, v)), PLAN)
        starts = [n for n in gm.graph.nodes if n.target in (ALL_GATHER, EXCHANGE)]
        starts[0].prepend(starts[-1])
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", give_way(gm, PLAN))

    def test_the_longest_stretch(self):
        gm = layers([[1, 1, 3], [1, 1, 3], [1, 1, 3]])
        self.assertEqual(letters(gm), "(0(10)m<>m<>mmm(21)m<>m<>mmm2)m<>m<>mmm")
        self.assertEqual(letters(give_way(gm, PLAN)), "(00)m<>m<>(1mmm1)m<>m<>(2mmm2)m<>m<>mmm")

    def test_of_stretches_alike_the_first(self):
        """So that it has most time; also where gathers start two units ahead."""
        gm = layers([[0, 2, 2], [0, 2, 2], [0, 2, 2]], prefetch=2)
        self.assertEqual(letters(gm), "(0(1(20)<>mm<>mm1)<>mm<>mm2)<>mm<>mm")
        self.assertEqual(letters(give_way(gm, PLAN)), "(00)<>(1(2mm<>mm1)<>mm<>mm2)<>mm<>mm")
        gm = layers([[0, 2, 4], [0, 2, 4], [0, 2, 4]], prefetch=2)
        self.assertEqual(letters(gm), "(0(1(20)<>mm<>mmmm1)<>mm<>mmmm2)<>mm<>mmmm")
        self.assertEqual(letters(give_way(gm, PLAN)), "(00)<>mm<>(1(2mmmm1)<>mm<>mmmm2)<>mm<>mmmm")

    def test_only_where_it_is_in_time(self):
        """A gather that needs more than the stretch at the end starts in a shorter one before."""
        stretches = [[1, 2, 3], [1, 2, 3]]
        slow = replace(PLAN, costs=on_a_wire(layers(stretches), matmuls=4))
        self.assertEqual(letters(give_way(layers(stretches), slow)), "(00)m<>(1mm<>mmm1)m<>mm<>mmm")
        slower = replace(PLAN, costs=on_a_wire(layers(stretches), matmuls=7))
        self.assertUnchanged(give_way, layers(stretches), slower)

    def test_near_miss(self):
        """Nothing moves for users' lists, where costs have decided,
        for no exchange, or if told so.
        """
        stretches = [[1, 1, 3], [1, 1, 3]]
        self.assertUnchanged(give_way, layers([[5], [5]]))
        self.assertUnchanged(give_way, layers(stretches), replace(PLAN, overlap_exchanges=False))
        self.assertUnchanged(give_way, layers(stretches, forward_after=("u0",)))
        costs = on_a_wire(layers(stretches), matmuls=1)
        self.assertUnchanged(give_way, layers(stretches), replace(PLAN, prefetch=None, costs=costs))
