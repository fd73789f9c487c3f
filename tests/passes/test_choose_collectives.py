"""`choose_collectives`: what the plan and its costs choose stands in the ops."""

from __future__ import annotations

from compiled_fsdp.passes.choose_collectives import choose_collectives
from kit.passes_harness import GraphTest, Hand, numel, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD
from compiled_fsdp.ir.spec import OWN_MESSAGE, ParamSpec
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.plan import Plan

COSTS = Costs(1e9, 2e6, 0.0, (("shard", Link(1e-3, 1e6, message=1.0, scatter=1.0, exchange=2.0)),))


def joint(**changes: object) -> GraphModule:
    hand = Hand()
    specs = unit(
        "a", {"w": (4, 2), "b": (4,)}, **{"reduce_op": "avg", "post_divide": 1.0, **changes}
    )
    flat = hand.input("flat", numel(specs))
    results = [hand.unshard(flat, spec) for spec in specs]
    grads = [
        hand.reduce_grad(hand.compute(result), flat, spec)
        for result, spec in zip(results, specs, strict=True)
    ]
    return hand.returns(*results, *grads)


def messages(gm: GraphModule) -> list[int]:
    specs = [ParamSpec.of(n.args[1:]) for n in find(gm.graph, UNSHARD)]
    return [s.own_message for s in (*specs, *reductions(gm))]


def reductions(gm: GraphModule) -> list[ParamSpec]:
    return [ParamSpec.of(n.args[2:]) for n in find(gm.graph, REDUCE_GRAD)]


def ways(gm: GraphModule) -> set[tuple[str, str, float]]:
    return {(s.reduce_algorithm, s.reduce_op, s.post_divide) for s in reductions(gm)}


class TestChooseCollectives(GraphTest):
    def test_docstring(self):
        gm = joint()
        self.assertEqual(messages(gm), [2**18] * 4)
        self.assertEqual(ways(gm), {("reduce_scatter", "avg", 1.0)})
        gm = choose_collectives(gm, Plan(own_message=None, reductions=None, costs=COSTS))
        self.assertEqual(messages(gm), [10**6] * 4)
        self.assertEqual(ways(gm), {("all_to_all", "sum", 2.0)})

    def test_as_set(self):
        gm = choose_collectives(joint(), Plan(own_message=7, reductions="all_to_all"))
        self.assertEqual((messages(gm), ways(gm)), ([7] * 4, {("all_to_all", "sum", 2.0)}))

    def test_back(self):
        """From gloo's default; a sum stays a sum."""
        gm = joint(reduce_algorithm="all_to_all", reduce_op="sum", post_divide=2.0)
        self.assertEqual(
            ways(choose_collectives(gm, Plan(reductions="reduce_scatter"))),
            {("reduce_scatter", "sum", 2.0)},
        )

    def test_left_alone(self):
        plain = (
            Plan(),
            Plan(own_message=None, reductions=None),
            Plan(own_message=OWN_MESSAGE, reductions="reduce_scatter"),
        )
        exchange = Plan(reductions="all_to_all")
        users, replicas = (
            joint(reduce_algorithm="custom:0"),
            joint(replicate_size=2, replicate_group="replicate"),
        )
        for gm, plan in (
            *((joint(), plan) for plan in plain),
            (users, exchange),
            (replicas, exchange),
        ):
            before = [n.args for n in gm.graph.nodes]
            self.assertEqual([n.args for n in choose_collectives(gm, plan).graph.nodes], before)
