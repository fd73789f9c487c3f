"""`delay_wait`: reductions are awaited late, no more of them under way than planned."""

from typing import Any

from compiled_fsdp.passes.delay_wait import delay_wait
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.printer import show
from compiled_fsdp.passes import delay_wait as module
from compiled_fsdp.planning.plan import Plan

HSDP = {"replicate_size": 2, "replicate_group": "replicate", "post_divide": 4.0}


def reductions(num_units: int, **changes: Any) -> GraphModule:
    """Reduce the gradients of units of one parameter; compute before each."""
    hand = Hand()
    flats = [hand.input(f"flat{i}", 4 // changes.get("world", 2)) for i in range(num_units)]
    x = hand.input("x", 4)
    results = []
    for i, flat in enumerate(flats):
        x = hand.compute(x)
        results.append(hand.reduce_grad(x, flat, *unit(f"u{i}", {"w": (4,)}, **changes)))
    return lower(hand.returns(*results), PLAN)


def sequence(gm: GraphModule) -> str:
    """`S`tarts, `R` starts of all-reduces, `W`aits, `M`arks and computation `c`, in order."""
    letters = {
        "reduce_scatter_tensor": "S",
        "all_reduce": "R",
        "wait_tensor": "W",
        "mark_grads_": "M",
        "neg": "c",
    }
    return "".join(letters.get(op, """""") for op in ops(gm.graph))


class TestDelayWait(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flats = hand.input("flat0", 2), hand.input("flat1", 2)
        rows = hand.input("rows0", 4), hand.input("rows1", 4)
        (u,), (v,) = unit("u", {"w": (4,)}), unit("v", {"w": (4,)})
        g1 = hand.reduce_grad(rows[1], flats[1], v)
        y = hand.compute(hand.input("x", 4))
        gm = lower(hand.returns(y, hand.reduce_grad(rows[0], flats[0], u), g1), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", delay_wait(gm, Plan(reduces_in_flight=1)))

    def test_the_users_number_comes_before_the_plan(self):
        found = {
            n: sequence(delay_wait(reductions(4, reduces_in_flight=n), Plan(reduces_in_flight=1)))
            for n in (0, 1, 2, 3)
        }
        found["nothing planned"] = sequence(
            delay_wait(reductions(4, reduces_in_flight=2), Plan(reduces_in_flight=0))
        )
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0 cScWMScWMScWMSWM
1 cScWMScWMScWMSWM
2 cScScWMScWMSWMWM
3 cScScScWMSWMWMWM
nothing planned cScScWMScWMSWMWM""",
        )

    def test_one_in_flight(self):
        """The wait, the division and the mark go before the next start; the last ones to the
        end.
        """
        self.assertGraph(
            delay_wait(reductions(3), Plan(reduces_in_flight=1)),
            """\
%flat0: f32[2]
%flat1: f32[2]
%flat2: f32[2]
%x: f32[4]
%neg_default: f32[4] = neg(%x)
%reshape_default: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u0: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u0: reduce
%neg_default_1: f32[4] = neg(%neg_default)
%reshape_default_2: f32[2,2] = reshape(%neg_default_1, [2, 2])  # u1: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u1: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u0: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u0: reduce
mark_grads_(%div_tensor, %flat0, [0])
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u1: reduce
%neg_default_2: f32[4] = neg(%neg_default_1)
%reshape_default_4: f32[2,2] = reshape(%neg_default_2, [2, 2])  # u2: reduce
%reshape_default_5: f32[4] = reshape(%reshape_default_4, [4])  # u2: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u1: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_1, 2.0)  # u1: reduce
mark_grads_(%div_tensor_1, %flat1, [0])
%reduce_scatter_tensor_default_2: f32[2] = reduce_scatter_tensor(%reshape_default_5, 'sum', 2, 'shard')  # u2: reduce
%wait_tensor_default_2: f32[2] = wait_tensor(%reduce_scatter_tensor_default_2)  # u2: reduce
%div_tensor_2: f32[2] = div(%wait_tensor_default_2, 2.0)  # u2: reduce
mark_grads_(%div_tensor_2, %flat2, [0])
return [%div_tensor, %div_tensor_1, %div_tensor_2]""",
        )

    def test_counts(self):
        found = {
            n: sequence(delay_wait(reductions(4), Plan(reduces_in_flight=n))) for n in range(5)
        }
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0 cSWMcSWMcSWMcSWM
1 cScWMScWMScWMSWM
2 cScScWMScWMSWMWM
3 cScScScWMSWMWMWM
4 cScScScSWMWMWMWM""",
        )

    def test_hsdp(self):
        """The first wait goes before the next start, and the all-reduce with it; the second wait
        one start further.
        """
        self.assertGraph(
            delay_wait(reductions(3, **HSDP), Plan(reduces_in_flight=1)),
            """\
%flat0: f32[2]
%flat1: f32[2]
%flat2: f32[2]
%x: f32[4]
%neg_default: f32[4] = neg(%x)
%reshape_default: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u0: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u0: reduce
%neg_default_1: f32[4] = neg(%neg_default)
%reshape_default_2: f32[2,2] = reshape(%neg_default_1, [2, 2])  # u1: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u1: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u0: reduce
%all_reduce_default: f32[2] = all_reduce(%wait_tensor_default, 'sum', 'replicate')  # u0: reduce
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u1: reduce
%neg_default_2: f32[4] = neg(%neg_default_1)
%reshape_default_4: f32[2,2] = reshape(%neg_default_2, [2, 2])  # u2: reduce
%reshape_default_5: f32[4] = reshape(%reshape_default_4, [4])  # u2: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%all_reduce_default)  # u0: reduce
%div_tensor: f32[2] = div(%wait_tensor_default_1, 4.0)  # u0: reduce
mark_grads_(%div_tensor, %flat0, [0])
%wait_tensor_default_2: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u1: reduce
%all_reduce_default_1: f32[2] = all_reduce(%wait_tensor_default_2, 'sum', 'replicate')  # u1: reduce
%reduce_scatter_tensor_default_2: f32[2] = reduce_scatter_tensor(%reshape_default_5, 'sum', 2, 'shard')  # u2: reduce
%wait_tensor_default_3: f32[2] = wait_tensor(%all_reduce_default_1)  # u1: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_3, 4.0)  # u1: reduce
mark_grads_(%div_tensor_1, %flat1, [0])
%wait_tensor_default_4: f32[2] = wait_tensor(%reduce_scatter_tensor_default_2)  # u2: reduce
%all_reduce_default_2: f32[2] = all_reduce(%wait_tensor_default_4, 'sum', 'replicate')  # u2: reduce
%wait_tensor_default_5: f32[2] = wait_tensor(%all_reduce_default_2)  # u2: reduce
%div_tensor_2: f32[2] = div(%wait_tensor_default_5, 4.0)  # u2: reduce
mark_grads_(%div_tensor_2, %flat2, [0])
return [%div_tensor, %div_tensor_1, %div_tensor_2]""",
        )

    def test_hsdp_counts(self):
        found = {
            n: sequence(delay_wait(reductions(4, **HSDP), Plan(reduces_in_flight=n)))
            for n in range(4)
        }
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0 cSWRWMcSWRWMcSWRWMcSWRWM
1 cScWRScWMWRScWMWRSWMWRWM
2 cScScWRScWRSWMWMWRWMWRWM
3 cScScScWRSWMWRWMWRWMWRWM""",
        )

    def test_computation_with_the_result_moves_along(self):
        hand = Hand()
        one, two, x = hand.input("one", 2), hand.input("two", 2), hand.input("x", 4)
        first = hand.reduce_grad(x, one, *unit("u", {"w": (4,)}))
        used, other = hand.compute(first), hand.compute(x)
        second = hand.reduce_grad(other, two, *unit("v", {"w": (4,)}))
        gm = delay_wait(lower(hand.returns(used, second), PLAN), PLAN)
        self.assertGraph(
            gm,
            """\
%one: f32[2]
%two: f32[2]
%x: f32[4]
%reshape_default: f32[2,2] = reshape(%x, [2, 2])  # u: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%neg_default_1: f32[4] = neg(%x)
%reshape_default_2: f32[2,2] = reshape(%neg_default_1, [2, 2])  # v: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # v: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u: reduce
mark_grads_(%div_tensor, %one, [0])
%neg_default: f32[2] = neg(%div_tensor)
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # v: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # v: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_1, 2.0)  # v: reduce
mark_grads_(%div_tensor_1, %two, [0])
return [%neg_default, %div_tensor_1]""",
        )

    def test_near_miss_next_start_needs_the_result(self):
        hand = Hand()
        one, two, x = hand.input("one", 2), hand.input("two", 2), hand.input("x", 4)
        first = hand.reduce_grad(x, one, *unit("u", {"w": (4,)}))
        scaled = hand.add(x, hand(aten.cat.default, [first, first]))
        other = hand.compute(x)
        second = hand.reduce_grad(scaled, two, *unit("v", {"w": (4,)}))
        self.assertUnchanged(delay_wait, lower(hand.returns(other, first, second), PLAN), PLAN)

    def test_fractions(self):
        """Half a unit late is halfway through the matmuls before the next reduction; the last waits
        at the same share.
        """
        found = {}
        for late in (0.5, 1, 1.5, 5):
            hand = Hand()
            x, results = hand.input("x", 2, 2), []
            for i in range(3):
                for _ in range(4):
                    x = hand(aten.mm.default, x, x)
                results.append(
                    hand.reduce_grad(x, hand.input(f"flat{i}", 2), *unit(f"u{i}", {"w": (2, 2)}))
                )
            for _ in range(4):
                x = hand(aten.mm.default, x, x)
            gm = delay_wait(lower(hand.returns(x, *results), PLAN), Plan(reduces_in_flight=late))
            letters = {"reduce_scatter_tensor": "S", "wait_tensor": "W", "mm": "m"}
            found[late] = "".join(letters.get(op, "") for op in ops(gm.graph))
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0.5 mmmmSmmWmmSmmWmmSmmWmm
1 mmmmSmmmmWSmmmmWSmmmmW
1.5 mmmmSmmmmSmmWmmSmmWmmW
5 mmmmSmmmmSmmmmSmmmmWWW""",
        )

    def test_near_miss_nothing_planned(self):
        self.assertUnchanged(delay_wait, reductions(3), Plan(reduces_in_flight=0))

    def test_near_miss_one_rank(self):
        self.assertUnchanged(delay_wait, reductions(3, world=1, post_divide=1.0))

    def test_near_miss_gathers(self):
        hand = Hand()
        flat, x = hand.input("flat", 2), hand.input("x", 4)
        w = hand.unshard(flat, *unit("u", {"w": (4,)}))
        y = hand.compute(x)
        self.assertUnchanged(delay_wait, lower(hand.returns(hand.add(w, y)), PLAN))

    def test_idempotent(self):
        for changes in ({}, HSDP):
            for count in range(3):
                gm = delay_wait(reductions(4, **changes), Plan(reduces_in_flight=count))
                once = show(gm.graph)
                self.assertEqual(show(delay_wait(gm, Plan(reduces_in_flight=count)).graph), once)
