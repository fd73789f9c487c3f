"""`fetch_states`: what an optimizer remembers comes from the host in time, and goes back behind."""

from dataclasses import replace
from typing import Any

from compiled_fsdp.passes.fetch_states import fetch_states
from compiled_fsdp.passes.invariants.states import fetched_once, stored_once
from kit.passes_harness import PLAN, GraphTest, Hand, ops
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import HOST
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import FETCH_STATE, UPDATE
from compiled_fsdp.ir.states import hosted_bytes, state_bytes
from compiled_fsdp.passes import fetch_states as module
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.lifetimes import STATE
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.planning.planner import predict

# Of a tensor of 16 elements: one second for what is computed, and as many as said for a copy; an
# update of nothing that takes time.
COSTS = Costs(1e30, 128.0, 0.0, (("", Link(0.0, 1.0)),), is_fused=False)


def taking(seconds: float) -> Plan:
    return replace(PLAN, costs=replace(COSTS, host=64 / seconds))


def step(before: int, number: int = 1, after: int = 0, *, is_hosted: bool = True) -> GraphModule:
    """Something that is computed, updates back to back, and something else."""
    hand = Hand()
    x = hand.input("x", 16)
    flats = [hand.input("flat" if number == 1 else f"flat{i}", 0) for i in range(number)]
    grads = [hand.input("grad" if number == 1 else f"grad{i}", 0) for i in range(number)]
    for _ in range(before):
        hand.compute(x)
    for flat, grad in zip(flats, grads, strict=True):
        hand(UPDATE, grad, flat, [0], "step0", None, 16, is_hosted)
    for _ in range(after):
        hand.compute(x)
    return hand.returns()


def short(gm: GraphModule) -> str:
    names = {
        "fetch_state": "in",
        "store_state": "out",
        "wait_tensor": "wait",
        "update_": "update",
        "neg": ".",
    }
    return " ".join(names.get(op, op) for op in ops(gm.graph))


class TestFetchStates(GraphTest):
    def test_docstring(self):
        before = step(3, after=3)
        for update in find(before.graph, UPDATE):
            self.assertTrue(state_bytes(update))
        self.assertDocumented(module, "Before", before)
        gm = fetch_states(step(3, after=3), taking(2.0))
        self.assertDocumented(module, "After", gm)

    def test_graph(self):
        self.assertGraph(
            fetch_states(step(1, after=1), taking(1.0)),
            """\
%x: f32[16]
%flat: f32[0]
%grad: f32[0]
%fetch_state_default: f32[16] = fetch_state(%flat, [0], 'step0', 16)
%neg_default: f32[16] = neg(%x)
%wait_tensor_default: f32[16] = wait_tensor(%fetch_state_default)
update_(%grad, %flat, [0], 'step0', None, 16, True, %wait_tensor_default)
%store_state_default: f32[1] = store_state(%wait_tensor_default, %flat, [0], 'step0')
%neg_default_1: f32[16] = neg(%x)
%wait_tensor_default_1: f32[1] = wait_tensor(%store_state_default)
return []""",
        )

    def test_near_miss(self):
        """State that is on the device; and of a parameter that no unit has."""
        self.assertUnchanged(fetch_states, step(3, is_hosted=False), taking(2.0))
        hand = Hand()
        hand(UPDATE, hand.input("grad", 4), hand.input("param", 4), [], "step0")
        self.assertUnchanged(fetch_states, hand.returns(), taking(2.0))

    def test_once(self):
        gm = fetch_states(step(3, 2), taking(2.0))
        self.assertUnchanged(fetch_states, gm, taking(2.0))

    def test_updates_that_follow_each_other(self):
        """Behind a clipped norm: no more than two ahead of an update, and two behind it."""
        gm = fetch_states(step(9, 4), taking(2.0))
        self.assertEqual(
            short(gm),
            ". . . . . in . . in . . wait update out in wait update out in wait wait update out "
            "wait wait update out wait wait",
        )
        for rule in (fetched_once, stored_once):
            self.assertEqual(list(rule(gm, PLAN)), [])
        fetched = [node.args[0].name for node in find(gm.graph, FETCH_STATE)]
        self.assertEqual(fetched, ["flat0", "flat1", "flat2", "flat3"])

    def test_no_time_to_hide_in(self):
        self.assertEqual(short(fetch_states(step(0), taking(2.0))), "in wait update out wait")

    def test_prediction(self):
        """Both ways are predicted beside what is computed, and what of them it does not hide."""
        for before, after, seconds, exposed in (
            (3, 3, 2.0, 0.0),
            (1, 3, 2.0, 1.0),
            (0, 0, 2.0, 4.0),
        ):
            plan = taking(seconds)
            gm = fetch_states(step(before, after=after), plan)
            line = predict(gm.graph, plan.costs)
            self.assertAlmostEqual(line.on_the_way(HOST), seconds)
            self.assertAlmostEqual(line.on_the_way("cpu"), seconds)
            self.assertAlmostEqual(sum(line.exposed.values()), exposed)

    def test_memory(self):
        """All the time on the device, or from its copy to the end of its way back."""
        found: list[Any] = []
        for is_hosted in (False, True):
            gm = fetch_states(step(4, 3, 4, is_hosted=is_hosted), taking(1.0))
            memory = profile(gm.graph)
            found.append(
                (memory.curve.during[len(list(gm.graph.nodes)) - 1], hosted_bytes(gm.graph))
            )
            kinds = {storage.kind for storage in memory.alive}
            self.assertEqual(STATE in kinds, not is_hosted, "those are under way")
        self.assertEqual(found, [(3 * 64, 0), (0, 3 * 64)])
