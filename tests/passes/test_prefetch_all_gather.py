"""`prefetch_all_gather`: all-gathers start ahead of their use, in the same order, as many ahead as
planned.
"""

from typing import Any

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.prefetch_all_gather import prefetch_all_gather
from kit.passes_harness import PLAN, GraphTest, Hand, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.printer import show
from compiled_fsdp.passes import prefetch_all_gather as module
from compiled_fsdp.planning.plan import Plan

aten = torch.ops.aten


def gathers(num_units: int, **changes: Any) -> GraphModule:
    """Units of one parameter; the flat buffer has another, so that a slice prepares each gather."""
    hand = Hand()
    named = changes.pop("forward_after", {})
    specs = [
        unit(name, {"w": (4,)}, forward_after=named.get(name, ()), **changes)[0]
        for name in (f"u{i}" for i in range(num_units))
    ]
    flats = [hand.input(f"flat{i}", spec.shard_numel + 1) for i, spec in enumerate(specs)]
    pairs = zip(flats, specs, strict=True)
    return lower(hand.returns(*(hand.compute(hand.unshard(f, s)) for f, s in pairs)), PLAN)


def with_matmuls(num_units: int, name: str = "x") -> GraphModule:
    """Units of one parameter, each read by the first of four matmuls."""
    hand = Hand()
    x = hand.input(name, 2, 2)
    for i in range(num_units):
        x = hand(
            aten.mm.default,
            x,
            hand.unshard(hand.input(f"flat{i}", 2), *unit(f"u{i}", {"w": (2, 2)})),
        )
        for _ in range(3):
            x = hand(aten.mm.default, x, x)
    return lower(hand.returns(x), PLAN)


def of_computed(is_of_matmul: bool) -> GraphModule:
    """Two units, of which the second gathers what is computed from its buffer alone, as all-gather
    extensions do, or with what the first has computed.
    """
    hand = Hand()
    x = hand.input("x", 2, 2)
    first, second = (unit(f"u{i}", {"w": (2, 2)})[0] for i in range(2))
    flats = [hand.input(f"flat{i}", 2) for i in range(2)]
    x = hand(aten.mm.default, x, hand.unshard(flats[0], first))
    row = hand(aten.select.int, x, 0, 0) if is_of_matmul else flats[1]
    codes = hand(aten.mul.Tensor, hand(aten.abs.default, row), flats[1])
    return lower(hand.returns(hand(aten.mm.default, x, hand.unshard(codes, second))), PLAN)


def sequence(gm: GraphModule) -> str:
    """`S`tarts, `W`aits and computation `c`, in order."""
    letters = {
        "all_gather_into_tensor": "S",
        "wait_tensor": "W",
        "neg": "c",
        "mm": "m",
        "reduce_scatter_tensor": "R",
    }
    return "".join(letters.get(op, "") for op in ops(gm.graph))


class TestPrefetchAllGather(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flats = hand.input("flat0", 2), hand.input("flat1", 2)
        (u,), (v,) = unit("u", {"w": (4,)}), unit("v", {"w": (4,)})
        used = hand.compute(hand.unshard(flats[0], u))
        gm = lower(hand.returns(used, hand.unshard(flats[1], v)), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", prefetch_all_gather(gm, Plan(prefetch=1)))

    def test_one_ahead(self):
        self.assertGraph(
            prefetch_all_gather(gathers(3), Plan(prefetch=1)),
            """\
%flat0: f32[3]
%flat1: f32[3]
%flat2: f32[3]
%slice_tensor: f32[2] = slice(%flat0, 0, 0, 2)  # u0: gather
%all_gather_into_tensor_default: f32[4] = all_gather_into_tensor(%slice_tensor, 2, 'shard')  # u0: gather
%slice_tensor_1: f32[2] = slice(%flat1, 0, 0, 2)  # u1: gather
%all_gather_into_tensor_default_1: f32[4] = all_gather_into_tensor(%slice_tensor_1, 2, 'shard')  # u1: gather
%wait_tensor_default: f32[4] = wait_tensor(%all_gather_into_tensor_default)  # u0: gather
%view_default: f32[4] = view(%wait_tensor_default, [4])  # u0: gather
%neg_default: f32[4] = neg(%view_default)
%slice_tensor_2: f32[2] = slice(%flat2, 0, 0, 2)  # u2: gather
%all_gather_into_tensor_default_2: f32[4] = all_gather_into_tensor(%slice_tensor_2, 2, 'shard')  # u2: gather
%wait_tensor_default_1: f32[4] = wait_tensor(%all_gather_into_tensor_default_1)  # u1: gather
%view_default_1: f32[4] = view(%wait_tensor_default_1, [4])  # u1: gather
%neg_default_1: f32[4] = neg(%view_default_1)
%wait_tensor_default_2: f32[4] = wait_tensor(%all_gather_into_tensor_default_2)  # u2: gather
%view_default_2: f32[4] = view(%wait_tensor_default_2, [4])  # u2: gather
%neg_default_2: f32[4] = neg(%view_default_2)
return [%neg_default, %neg_default_1, %neg_default_2]""",
        )

    def test_counts(self):
        """The n-th starts before the wait of the (n - prefetch)-th."""
        found = {n: sequence(prefetch_all_gather(gathers(4), Plan(prefetch=n))) for n in range(5)}
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0 SWcSWcSWcSWc
1 SSWcSWcSWcWc
2 SSSWcSWcWcWc
3 SSSSWcWcWcWc
4 SSSSWcWcWcWc""",
        )

    def test_fractions(self):
        """Half a unit ahead is halfway through the matmuls of the unit before; without matmuls, not
        ahead at all.
        """
        plans = (0.5, 0.75, 1, 1.5, 2.25)
        found = {n: sequence(prefetch_all_gather(with_matmuls(3), Plan(prefetch=n))) for n in plans}
        found["none"] = sequence(prefetch_all_gather(gathers(3), Plan(prefetch=0.5)))
        self.assertExpectedInline(
            "\n".join(f"{n} {s}" for n, s in found.items()),
            """\
0.5 SWmmSmmWmmSmmWmmmm
0.75 SWmSmmmWmSmmmWmmmm
1 SSWmmmmSWmmmmWmmmm
1.5 SSWmmSmmWmmmmWmmmm
2.25 SSSWmmmmWmmmmWmmmm
none SWcSWcSWc""",
        )

    def test_backward_has_its_own_distance(self):
        plan = Plan(prefetch=0, backward_prefetch=1)
        self.assertEqual(sequence(prefetch_all_gather(with_matmuls(2), plan)), "SWmmmmSWmmmm")
        self.assertEqual(
            sequence(prefetch_all_gather(with_matmuls(2, "tangents_1"), plan)), "SSWmmmmWmmmm"
        )

    def test_bucket_of_two_flat_buffers(self):
        """Slices, casts and the cat move with the start; copies out stay."""
        hand = Hand()
        x, first = hand.input("x", 4), hand.input("first", 2)
        trained, frozen = hand.input("trained", 3), hand.input("frozen", 3)
        y = hand.add(x, hand.unshard(first, *unit("u", {"w": (4,)})))
        pair = [
            hand.unshard(f, *unit("v", {"w": (4,)}, dtype=torch.bfloat16))
            for f in (trained, frozen)
        ]
        gm = bucket_all_gather(lower(hand.returns(y, *map(hand.compute, pair)), PLAN), PLAN)
        self.assertGraph(
            prefetch_all_gather(gm, Plan(prefetch=1)),
            """\
%x: f32[4]
%first: f32[2]
%trained: f32[3]
%frozen: f32[3]
%all_gather_into_tensor_default: f32[4] = all_gather_into_tensor(%first, 2, 'shard')  # u: gather
%slice_tensor_2: f32[2] = slice(%trained, 0, 0, 2)  # v: gather
%convert_element_type_default_2: bf16[2] = convert_element_type(%slice_tensor_2, bf16)  # v: gather
%slice_tensor_3: f32[2] = slice(%frozen, 0, 0, 2)  # v: gather
%convert_element_type_default_3: bf16[2] = convert_element_type(%slice_tensor_3, bf16)  # v: gather
%cat_default: bf16[4] = cat([%convert_element_type_default_2, %convert_element_type_default_3])  # v: gather
%all_gather_into_tensor_default_3: bf16[8] = all_gather_into_tensor(%cat_default, 2, 'shard')  # v: gather
%wait_tensor_default: f32[4] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4] = view(%wait_tensor_default, [4])  # u: gather
%add_tensor: f32[4] = add(%x, %view_default)
%wait_tensor_default_3: bf16[8] = wait_tensor(%all_gather_into_tensor_default_3)  # v: gather
%view_default_3: bf16[2,4] = view(%wait_tensor_default_3, [2, 4])  # v: gather
%slice_tensor_4: bf16[2,2] = slice(%view_default_3, 1, 0, 2)  # v: gather
%clone_default: bf16[2,2] = clone(%slice_tensor_4, memory_format=torch.contiguous_format)  # v: gather
%view_default_4: bf16[4] = view(%clone_default, [4])  # v: gather
%view_default_5: bf16[2,4] = view(%wait_tensor_default_3, [2, 4])  # v: gather
%slice_tensor_5: bf16[2,2] = slice(%view_default_5, 1, 2, 4)  # v: gather
%clone_default_1: bf16[2,2] = clone(%slice_tensor_5, memory_format=torch.contiguous_format)  # v: gather
%view_default_6: bf16[4] = view(%clone_default_1, [4])  # v: gather
%neg_default: bf16[4] = neg(%view_default_4)
%neg_default_1: bf16[4] = neg(%view_default_6)
return [%add_tensor, %neg_default, %neg_default_1]""",
        )

    def test_explicit_lists_come_before_the_plan(self):
        """A list starts what it names where its unit begins; a unit that has a list starts nothing
        else there.
        """

        def found(prefetch: int, **named: tuple[str, ...]) -> str:
            gm = gathers(4, forward_after=named)
            once = sequence(prefetch_all_gather(gm, Plan(prefetch=prefetch)))
            self.assertEqual(
                sequence(prefetch_all_gather(gm, Plan(prefetch=prefetch))), once, "idempotent"
            )
            return once

        self.assertExpectedInline(
            "\n".join(
                (
                    f"nothing planned {found(0, u2=('u0',))}",
                    f"one ahead {found(1, u2=('u0',))}",
                    f"two ahead {found(2, u2=('u0',))}",
                    f"two ahead, lists of the next {found(2, u1=('u0',), u2=('u1',), u3=('u2',))}",
                    f"of two lists the first {found(0, u3=('u2', 'u1'))}",
                    f"the outermost's {found(0, u1=('',), u3=('',))}",
                    f"a later unit's {found(0, u0=('u2',))}",
                )
            ),
            """\
nothing planned SSWcSWcWcSWc
one ahead SSWcSWcSWcWc
two ahead SSWcSSWcWcWc
two ahead, lists of the next SSWcSWcSWcWc
of two lists the first SWcSSWcSWcWc
the outermost's SSSWcWcSWcWc
a later unit's SWcSWcSWcSWc""",
        )

    def test_explicit_lists_in_backward(self):
        """A unit that kept its parameters begins where the one before it reduces, or with the
        graph.
        """

        def found(**named: tuple[str, ...]) -> str:
            hand, results = Hand(), []
            x = hand.input("tangents_1", 2, 2)
            for i, name in enumerate(("u0", "u1", "u2")):
                flat = hand.input(f"flat{i}", 2)
                (spec,) = unit(name, {"w": (2, 2)}, backward_after=named.get(name, ()))
                w = hand.input(f"w{i}", 2, 2) if i == 1 else hand.unshard(flat, spec)
                x = hand(aten.mm.default, x, w)
                results.append(hand.reduce_grad(hand(aten.mm.default, x, x), flat, spec))
            gm = lower(hand.returns(*results), PLAN)
            return sequence(prefetch_all_gather(gm, Plan(backward_prefetch=0)))

        self.assertExpectedInline(
            f"planned {found()}\nat the kept unit {found(u2=('u1',))}\nat the first unit "
            f"{found(u2=('u0',))}",
            """\
planned SWmmRWmmRWSWmmRW
at the kept unit SWmmSRWmmRWWmmRW
at the first unit SSWmmRWmmRWWmmRW""",
        )

    def test_a_list_of_a_unit_that_is_not_in_the_graph(self):
        with self.assertWarnsRegex(
            UserWarning,
            r"unit 'u1' is in the prefetch list of u9, which gathers and reduces nothing",
        ):
            self.assertUnchanged(
                prefetch_all_gather, gathers(2, forward_after={"u1": ("u9#4",)}), Plan(prefetch=0)
            )

    def test_near_miss_one_unit(self):
        self.assertUnchanged(prefetch_all_gather, gathers(1), Plan(prefetch=2))

    def test_near_miss_nothing_planned(self):
        self.assertUnchanged(prefetch_all_gather, gathers(3), Plan(prefetch=0))

    def test_near_miss_one_rank(self):
        self.assertUnchanged(prefetch_all_gather, gathers(3, world=1))

    def test_computed_from_inputs(self):
        """What is gathered is computed ahead, too."""
        self.assertExpectedInline(
            show(prefetch_all_gather(of_computed(is_of_matmul=False), Plan(prefetch=1)).graph),
            """\
%x: f32[2,2]
%flat0: f32[2]
%flat1: f32[2]
%all_gather_into_tensor_default: f32[4] = all_gather_into_tensor(%flat0, 2, 'shard')  # u0: gather
%abs_default: f32[2] = abs(%flat1)
%mul_tensor: f32[2] = mul(%abs_default, %flat1)
%all_gather_into_tensor_default_1: f32[4] = all_gather_into_tensor(%mul_tensor, 2, 'shard')  # u1: gather
%wait_tensor_default: f32[4] = wait_tensor(%all_gather_into_tensor_default)  # u0: gather
%view_default: f32[2,2] = view(%wait_tensor_default, [2, 2])  # u0: gather
%mm_default: f32[2,2] = mm(%x, %view_default)
%wait_tensor_default_1: f32[4] = wait_tensor(%all_gather_into_tensor_default_1)  # u1: gather
%view_default_1: f32[2,2] = view(%wait_tensor_default_1, [2, 2])  # u1: gather
%mm_default_1: f32[2,2] = mm(%mm_default, %view_default_1)
return [%mm_default_1]""",
        )

    def test_near_miss_computed_later(self):
        """What is gathered does not exist yet where the start would go."""
        self.assertUnchanged(prefetch_all_gather, of_computed(is_of_matmul=True), Plan(prefetch=1))

    def test_idempotent(self):
        for prefetch in range(3):
            gm = prefetch_all_gather(gathers(4), Plan(prefetch=prefetch))
            once = show(gm.graph)
            self.assertEqual(show(prefetch_all_gather(gm, Plan(prefetch=prefetch)).graph), once)
