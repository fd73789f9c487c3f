"""`leave_in_flight`: the last reductions are handed over under way; the order of starts stays."""

from typing import Any

from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.leave_in_flight import leave_in_flight
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.verify import verify
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import output
from compiled_fsdp.passes import leave_in_flight as module

HSDP = {"replicate_size": 2, "replicate_group": "replicate", "post_divide": 4.0}


def reductions(sizes: list[int], **changes: Any) -> GraphModule:
    """Reduce the gradients of units of one parameter each; compute before each."""
    hand = Hand()
    results = []
    x = hand.input("x", 4)
    for i, size in enumerate(sizes):
        flat = hand.input(f"flat{i}", size // 2)
        x = hand.compute(x)
        grad = hand(aten.repeat.default, x, [size // 4])
        results.append(
            hand.reduce_grad(
                grad, flat, *unit(f"u{i}", {"w": (size,)}, **{"overlap": "step", **changes})
            )
        )
    return delay_wait(lower(hand.returns(*results), PLAN), PLAN)


def sequence(gm: GraphModule) -> str:
    """`S`tarts, `R` starts of all-reduces, `W`aits, `M`arks and reductions that are `L`eft, in
    order.
    """
    letters = {
        "reduce_scatter_tensor": "S",
        "all_reduce": "R",
        "wait_tensor": "W",
        "mark_grads_": "M",
        "reduce_later_": "L",
    }
    return "".join(letters.get(op, "") for op in ops(gm.graph))


def returned(gm: GraphModule) -> list[bool]:
    return [entry is not None for entry in output(gm.graph).args[0]]  # type: ignore[union-attr]


class TestLeaveInFlight(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flats = hand.input("flat0", 2), hand.input("flat1", 2)
        (u,), (v,) = unit("u", {"w": (4,)}, overlap="step"), unit("v", {"w": (4,)}, overlap="step")
        rows1 = hand.compute(hand.input("x", 4))
        g1 = hand.reduce_grad(rows1, flats[1], v)
        g0 = hand.reduce_grad(hand.compute(rows1), flats[0], u)
        gm = delay_wait(lower(hand.returns(g0, g1), PLAN), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", leave_in_flight(gm, PLAN))

    def test_twice_the_largest(self):
        """From the end: as much as two of the largest; the others are awaited as planned."""
        for sizes, expected, kept in (
            ([16, 16, 16], "SWMSSLL", [True, False, False]),
            ([16, 16, 4], "SWMSSLL", [True, False, False]),
            ([16, 8, 8, 4], "SWMSSSLLL", [True, False, False, False]),
            ([16], "SL", [False]),
        ):
            gm = leave_in_flight(reductions(sizes), PLAN)
            self.assertEqual((sequence(gm), returned(gm)), (expected, kept))
            verify(gm, PLAN)

    def test_hsdp_starts_nothing_later(self):
        """Only the wait of the all-reduce is left out."""
        gm = reductions([16, 16], **HSDP)
        before = sequence(gm)
        after = sequence(leave_in_flight(gm, PLAN))
        self.assertEqual(
            after.replace("W", "").replace("L", ""), before.replace("W", "").replace("M", "")
        )
        self.assertEqual((before.count("W"), after.count("W"), after.count("L")), (4, 2, 2))
        verify(gm, PLAN)

    def test_leaves_alone(self):
        """Units that did not ask, hooks, one rank, gradients that are returned otherwise, memory
        that others may write to.
        """
        for changes in (
            {"overlap": ""},
            {"hook": "f#0"},
            {"group_size": 1, "post_divide": 1.0},
            {"sync": "retain", "is_accumulating": True},
        ):
            self.assertUnchanged(leave_in_flight, reductions([8, 8], **changes))

    def test_leaves_alone_what_others_may_write_to(self):
        for is_returned in (False, True):
            hand = Hand()
            flat, x = hand.input("flat", 2), hand.input("x", 4)
            grad = hand.compute(x) if is_returned else x
            (spec,) = unit("u", {"w": (4,)}, overlap="step")
            reduced = hand.reduce_grad(grad, flat, spec)
            gm = delay_wait(
                lower(hand.returns(reduced, *([grad] if is_returned else [])), PLAN), PLAN
            )
            self.assertUnchanged(leave_in_flight, gm)

    def test_leaves_alone_what_others_read(self):
        hand = Hand()
        flat, x = hand.input("flat", 2), hand.compute(hand.input("x", 4))
        (spec,) = unit("u", {"w": (4,)}, overlap="step")
        reduced = hand.reduce_grad(x, flat, spec)
        other = hand.compute(reduced)
        self.assertUnchanged(leave_in_flight, lower(hand.returns(reduced, other), PLAN))

    def test_buckets_with_gaps(self):
        """A unit of three parameters, one of them without a gradient."""
        hand = Hand()
        specs = unit("u", {"a": (4,), "b": (4,), "c": (4,)}, overlap="step")
        flat, x = hand.input("flat", 6), hand.input("x", 4)
        grads = [hand.reduce_grad(hand.compute(x), flat, s) for s in (specs[0], specs[2])]
        gm = bucket_reduce_scatter(lower(hand.returns(hand.add(*grads)), PLAN), PLAN)
        gm = leave_in_flight(delay_wait(gm, PLAN), PLAN)
        (left,) = [n for n in gm.graph.nodes if n.target is module.REDUCE_LATER]
        self.assertEqual((left.args[2], sequence(gm), returned(gm)), ([0, 4], "SL", [False]))
        verify(gm, PLAN)
