"""`hide_copies`: an activation's copies start early and are awaited late, in turns, each once."""

from dataclasses import replace

from compiled_fsdp.passes.hide_copies import hide_copies
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.collectives import ALL_REDUCE, HOST, WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import CommTag, set_tag
from compiled_fsdp.ir.schema import COPY_TO, OFFLOAD, RELOAD
from compiled_fsdp.passes import hide_copies as module
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.offload import Trip, awaited, begun, homeward
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.planning.planner import predict

# Of a matrix [4, 4]: one second for what is computed, nothing for a matmul, 64 / host for a copy.
COSTS = Costs(1e30, 128.0, 0.0, (("", Link(0.0, 1.0)),), is_fused=False)
KERNELS = (("mm float32[4, 4] float32[4, 4]", 0.0),)


def taking(seconds: float) -> Plan:
    return replace(PLAN, costs=replace(COSTS, host=64 / seconds, kernels=KERNELS))


def step(number: int = 1, between: int = 5, *, is_read: bool = True) -> GraphModule:
    """So many values that are copied, things that are computed, and the copies back."""
    hand = Hand()
    x, w, y = (hand.input(name, 4, 4) for name in "xwy")
    moved = []
    for _ in range(number):
        a = hand(aten.mm.default, x, w)
        moved.append(hand(COPY_TO, a, HOST, True))
        if is_read:
            hand.compute(a)
    for _ in range(between - is_read):
        hand.compute(y)
    back = [hand(COPY_TO, h, "cpu", False) for h in reversed(moved)]
    return hand.returns(*[hand(aten.mm.default, y, b) for b in back])


def short(gm: GraphModule) -> str:
    names = {"offload": "out", "wait_tensor": "wait", "reload": "home", "neg": "."}
    return " ".join(names.get(op, op) for op in ops(gm.graph))


class TestClock(GraphTest):
    """Where copies take longer than what is computed, which stands still for them in any case."""

    def test_awaited(self):
        """The first two when the second one behind each could begin."""
        trips = [Trip(float(at), 5.0) for at in range(4)]
        self.assertEqual(awaited(trips, 30.0), [5.0, 10.0, 15.0, 20.0])
        self.assertEqual(awaited(trips, None), [5.0, 10.0, 15.0, 20.0])
        self.assertEqual(awaited(trips, 4.0), [2.0, 3.0, 15.0, 20.0])

    def test_awaited_if_nothing_is_later_for_it(self):
        """The first takes longer than what is to be waited for."""
        trips = [Trip(0.0, 20.0), Trip(1.0, 1.0), Trip(2.0, 1.0), Trip(100.0, 10.0)]
        self.assertEqual(awaited(trips, 101.0), [20.0, 21.0, 22.0, 110.0])

    def test_begun(self):
        """Each when the second one before it is read."""
        trips = [Trip(float(at), 5.0) for at in range(1, 5)]
        self.assertEqual(begun(trips, -16.0), [-16.0, -11.0, -6.0, -1.0])
        self.assertEqual(begun(trips, None), [-16.0, -11.0, -6.0, -1.0])
        self.assertEqual(begun(trips, 0.0), [-16.0, -11.0, 1.0, 2.0])

    def test_begun_if_nothing_is_later_for_it(self):
        """The last takes long: it begins behind the others, when the third before it is read."""
        trips = [Trip(1.0, 1.0), Trip(10.0, 1.0), Trip(20.0, 1.0), Trip(21.0, 40.0)]
        self.assertEqual(homeward(trips), [-22.0, -21.0, -20.0, -19.0])
        self.assertEqual(begun(trips, 0.0), [-22.0, -21.0, -20.0, 1.0])

    def test_stands_still_early(self):
        """Of a forward: no more than two wait for their copies at once."""
        hand = Hand()
        x, w, y = (hand.input(name, 4, 4) for name in "xwy")
        moved = []
        for _ in range(4):
            moved.append(hand(COPY_TO, hand(aten.mm.default, x, w), HOST, True))
            hand.compute(y)
        gm = hand.returns(y, *moved)
        self.assertEqual(
            short(hide_copies(gm, taking(5.0))),
            "mm out . mm out . wait mm out . wait mm out . wait wait",
        )


class TestHideCopies(GraphTest):
    def test_docstring(self):
        self.assertDocumented(module, "Before", step())
        gm = hide_copies(step(), taking(2.0))
        self.assertDocumented(module, "After", gm)
        check(gm, PLAN, "hide_copies")

    def test_graph(self):
        self.assertGraph(
            hide_copies(step(between=2), taking(0.5)),
            """\
%x: f32[4,4]
%w: f32[4,4]
%y: f32[4,4]
%mm_default: f32[4,4] = mm(%x, %w)
%offload_default: f32[4,4] = offload(%mm_default, True)
%neg_default: f32[4,4] = neg(%mm_default)
%wait_tensor_default: f32[4,4] = wait_tensor(%offload_default)
%reload_default: f32[4,4] = reload(%wait_tensor_default, 'cpu')
%neg_default_1: f32[4,4] = neg(%y)
%wait_tensor_default_1: f32[4,4] = wait_tensor(%reload_default)
%mm_default_1: f32[4,4] = mm(%y, %wait_tensor_default_1)
return [%mm_default_1]""",
        )

    def test_behind_the_last_use(self):
        """A copy that takes no time is awaited when nothing on the device reads its source."""
        self.assertEqual(
            short(hide_copies(step(), taking(1e-9))), "mm out . wait . . . home . wait mm"
        )

    def test_in_turns(self):
        """The second copy begins when the first is done,
        and the first one back before the second.
        """
        gm = hide_copies(step(2, 6, is_read=False), taking(2.0))
        self.assertEqual(short(gm), "mm out mm out . . wait home . . wait home . . wait mm wait mm")
        check(gm, PLAN, "hide_copies")

    def test_no_time_to_hide_in(self):
        """It is there before it comes back, however late."""
        gm = hide_copies(step(2, 2, is_read=False), taking(5.0))
        self.assertEqual(short(gm), "mm out mm out . . wait home wait home wait mm wait mm")
        check(gm, PLAN, "hide_copies")

    def test_prediction(self):
        """Both ways are predicted beside what is computed, and what of them it does not hide."""
        for number, between, seconds, exposed in (
            (1, 5, 2.0, 0.0),
            (2, 6, 2.0, 0.0),
            (2, 2, 5.0, 18.0),
        ):
            plan = taking(seconds)
            gm = hide_copies(step(number, between, is_read=False), plan)
            line = predict(gm.graph, plan.costs)
            self.assertAlmostEqual(line.on_the_way(HOST), number * seconds)
            self.assertAlmostEqual(line.on_the_way("cpu"), number * seconds)
            self.assertAlmostEqual(sum(line.exposed.values()), exposed)
            self.assertAlmostEqual(line.total, between + exposed)
            self.assertEqual(line.carried, {})

    def test_halves(self):
        """Of a forward, awaited at the end at the latest;
        of a backward, started at the beginning.
        """
        for seconds, forward, backward in (
            (2.0, "mm out . . wait .", ". home . . wait mm"),
            (9.0, "mm out . . . wait", "home . . . wait mm"),
        ):
            hand = Hand()
            a = hand(aten.mm.default, hand.input("x", 4, 4), hand.input("w", 4, 4))
            moved = hand(COPY_TO, a, HOST, True)
            y = hand.compute(hand.compute(hand.compute(a)))
            gm = hide_copies(hand.returns(y, moved), taking(seconds))
            self.assertEqual(short(gm), forward)
            check(gm, PLAN, "hide_copies")
            hand = Hand()
            moved, dy = hand.input("a_on_host", 4, 4), hand.input("tangents_1", 4, 4)
            for _ in range(3):
                hand.compute(dy)
            back = hand(COPY_TO, moved, "cpu", False)
            gm = hide_copies(hand.returns(hand(aten.mm.default, dy, back)), taking(seconds))
            self.assertEqual(short(gm), backward)
            check(gm, PLAN, "hide_copies")

    def test_a_collective_reads_until_it_is_awaited(self):
        hand = Hand()
        a = hand(aten.mm.default, hand.input("x", 4, 4), hand.input("w", 4, 4))
        moved = hand(COPY_TO, a, HOST, True)
        start = hand(ALL_REDUCE, a, "sum", "shard")
        y = hand.compute(hand.input("y", 4, 4))
        gm = hide_copies(hand.returns(y, hand(WAIT, start), moved), taking(1e-9))
        offload, waits = find(gm.graph, OFFLOAD)[0], find(gm.graph, WAIT)
        self.assertIs(waits[-1].args[0], offload)

    def test_near_miss(self):
        """Copies that belong to a communication are another pass's."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4, 2)}, device="cuda")
        copy = hand(COPY_TO, hand.input("flat", 4), "cpu", False)
        set_tag(copy, CommTag("gather", 0, (spec,)))
        self.assertUnchanged(hide_copies, hand.returns(hand.compute(copy)))
        self.assertFalse(find(hand.graph, OFFLOAD, RELOAD))

    def test_costs_that_are_assumed(self):
        gm = hide_copies(step(), PLAN)
        self.assertFalse(find(gm.graph, COPY_TO))
        check(gm, PLAN, "hide_copies")
