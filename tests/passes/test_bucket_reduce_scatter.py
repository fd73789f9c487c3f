"""`bucket_reduce_scatter`: one reduction a unit, whose result is the flat gradient."""

from dataclasses import replace

import torch
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, numel, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.passes import bucket_reduce_scatter as module

TWO = unit("u", {"a": (4, 2), "b": (2,)})


def reductions(*specs: ParamSpec, flat_numel: int = 0) -> GraphModule:
    """Reduce the gradients in the order given, each as soon as it is computed, and add them up."""
    hand = Hand()
    flat = hand.input("flat", flat_numel or numel(list(specs)))
    inputs = {s: hand.input(f"d_{s.fqn}", *s.shape, dtype=s.dtype) for s in specs}
    total = None
    for spec in specs:
        term = hand.reduce_grad(hand.compute(inputs[spec]), flat, spec)
        total = term if total is None else hand.add(total, term)
    return lower(hand.returns(total), PLAN)


class TestBucketReduceScatter(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat, d0, d1 = hand.input("flat", 5), hand.input("d0", 4, 2), hand.input("d1", 2)
        first, second = hand.reduce_grad(d0, flat, TWO[0]), hand.reduce_grad(d1, flat, TWO[1])
        gm = lower(hand.returns(hand.add(second, first)), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", bucket_reduce_scatter(gm, PLAN))

    def test_two_parameters(self):
        """Starts where the last gradient is ready; the buffer's order, not the order of arrival."""
        a, b = TWO
        self.assertGraph(
            bucket_reduce_scatter(reductions(b, a, flat_numel=5), PLAN),
            """\
%flat: f32[5]
%d_b: f32[2]
%d_a: f32[4,2]
%neg_default: f32[2] = neg(%d_b)
%neg_default_1: f32[4,2] = neg(%d_a)
%reshape_default_4: f32[2,4] = reshape(%neg_default_1, [2, 4])  # u: reduce
%reshape_default_5: f32[2,1] = reshape(%neg_default, [2, 1])  # u: reduce
%cat_default: f32[2,5] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[10] = reshape(%cat_default, [10])  # u: reduce
%reduce_scatter_tensor_default_2: f32[5] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_2: f32[5] = wait_tensor(%reduce_scatter_tensor_default_2)  # u: reduce
%div_tensor_2: f32[5] = div(%wait_tensor_default_2, 2.0)  # u: reduce
mark_grads_(%div_tensor_2, %flat, [0, 4])
return [%div_tensor_2]""",
        )

    def test_rows_that_do_not_divide(self):
        gm = reductions(*unit("u", {"a": (3, 2), "b": (5,)}))
        self.assertGraph(
            bucket_reduce_scatter(gm, PLAN),
            """\
%flat: f32[7]
%d_a: f32[3,2]
%d_b: f32[5]
%neg_default: f32[3,2] = neg(%d_a)
%neg_default_1: f32[5] = neg(%d_b)
%constant_pad_nd_default_4: f32[4,2] = constant_pad_nd(%neg_default, [0, 0, 0, 1])  # u: reduce
%reshape_default_4: f32[2,4] = reshape(%constant_pad_nd_default_4, [2, 4])  # u: reduce
%constant_pad_nd_default_5: f32[6] = constant_pad_nd(%neg_default_1, [0, 1])  # u: reduce
%reshape_default_5: f32[2,3] = reshape(%constant_pad_nd_default_5, [2, 3])  # u: reduce
%cat_default: f32[2,7] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[14] = reshape(%cat_default, [14])  # u: reduce
%reduce_scatter_tensor_default_2: f32[7] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_2: f32[7] = wait_tensor(%reduce_scatter_tensor_default_2)  # u: reduce
%div_tensor_2: f32[7] = div(%wait_tensor_default_2, 2.0)  # u: reduce
mark_grads_(%div_tensor_2, %flat, [0, 4])
return [%div_tensor_2]""",
        )

    def test_gaps(self):
        """Of five parameters the second and fourth have a gradient: zeros around and between, not
        communicated.
        """
        _, b, _, d, _ = unit("u", {n: (2 * i,) for i, n in enumerate("abcde", 1)})
        self.assertGraph(
            bucket_reduce_scatter(reductions(b, d, flat_numel=15), PLAN),
            """\
%flat: f32[15]
%d_b: f32[4]
%d_d: f32[8]
%neg_default: f32[4] = neg(%d_b)
%neg_default_1: f32[8] = neg(%d_d)
%reshape_default_4: f32[2,2] = reshape(%neg_default, [2, 2])  # u: reduce
%reshape_default_5: f32[2,4] = reshape(%neg_default_1, [2, 4])  # u: reduce
%cat_default: f32[2,6] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[12] = reshape(%cat_default, [12])  # u: reduce
%reduce_scatter_tensor_default_2: f32[6] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_2: f32[6] = wait_tensor(%reduce_scatter_tensor_default_2)  # u: reduce
%div_tensor_2: f32[6] = div(%wait_tensor_default_2, 2.0)  # u: reduce
%slice_tensor: f32[2] = slice(%div_tensor_2, 0, 0, 2)  # u: reduce
%constant_pad_nd_default_2: f32[3] = constant_pad_nd(%slice_tensor, [1, 0])  # u: reduce
%slice_tensor_1: f32[4] = slice(%div_tensor_2, 0, 2, 6)  # u: reduce
%constant_pad_nd_default_3: f32[12] = constant_pad_nd(%slice_tensor_1, [3, 5])  # u: reduce
%cat_default_1: f32[15] = cat([%constant_pad_nd_default_2, %constant_pad_nd_default_3])  # u: reduce
mark_grads_(%cat_default_1, %flat, [1, 6])
return [%cat_default_1]""",
        )

    def test_hsdp_mixed_precision(self):
        specs = unit(
            "u",
            {"a": (4, 2), "b": (2,)},
            dtype=torch.bfloat16,
            replicate_size=4,
            replicate_group="replicate",
            post_divide=8.0,
        )
        self.assertGraph(
            bucket_reduce_scatter(reductions(*specs), PLAN),
            """\
%flat: f32[5]
%d_a: bf16[4,2]
%d_b: bf16[2]
%neg_default: bf16[4,2] = neg(%d_a)
%neg_default_1: bf16[2] = neg(%d_b)
%convert_element_type_default_2: f32[4,2] = convert_element_type(%neg_default, f32)  # u: reduce
%reshape_default_4: f32[2,4] = reshape(%convert_element_type_default_2, [2, 4])  # u: reduce
%convert_element_type_default_3: f32[2] = convert_element_type(%neg_default_1, f32)  # u: reduce
%reshape_default_5: f32[2,1] = reshape(%convert_element_type_default_3, [2, 1])  # u: reduce
%cat_default: f32[2,5] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[10] = reshape(%cat_default, [10])  # u: reduce
%reduce_scatter_tensor_default_2: f32[5] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_4: f32[5] = wait_tensor(%reduce_scatter_tensor_default_2)  # u: reduce
%all_reduce_default_2: f32[5] = all_reduce(%wait_tensor_default_4, 'sum', 'replicate')  # u: reduce
%wait_tensor_default_5: f32[5] = wait_tensor(%all_reduce_default_2)  # u: reduce
%div_tensor_2: f32[5] = div(%wait_tensor_default_5, 8.0)  # u: reduce
mark_grads_(%div_tensor_2, %flat, [0, 4])
return [%div_tensor_2]""",
        )

    def test_all_to_all(self):
        specs = unit("u", {"a": (4, 2), "b": (2,)}, reduce_algorithm="all_to_all")
        self.assertGraph(
            bucket_reduce_scatter(reductions(*specs), PLAN),
            """\
%flat: f32[5]
%d_a: f32[4,2]
%d_b: f32[2]
%neg_default: f32[4,2] = neg(%d_a)
%neg_default_1: f32[2] = neg(%d_b)
%reshape_default_2: f32[2,4] = reshape(%neg_default, [2, 4])  # u: reduce
%reshape_default_3: f32[2,1] = reshape(%neg_default_1, [2, 1])  # u: reduce
%cat_default: f32[2,5] = cat([%reshape_default_2, %reshape_default_3], 1)  # u: reduce
%all_to_all_default_2: f32[2,5] = all_to_all([%cat_default], 2, 'shard')  # u: reduce
%wait_tensor_default_2: f32[2,5] = wait_tensor(%all_to_all_default_2)  # u: reduce
%sum_dim_int_list_2: f32[5] = sum(%wait_tensor_default_2, [0])  # u: reduce
%div_tensor_2: f32[5] = div(%sum_dim_int_list_2, 2.0)  # u: reduce
mark_grads_(%div_tensor_2, %flat, [0, 4])
return [%div_tensor_2]""",
        )

    def test_two_ways_of_reducing(self):
        """What cannot travel together is added afterwards."""
        a, _, c = unit("u", {"a": (4,), "b": (4,), "c": (4,)})
        _, other, _ = unit("u", {"a": (4,), "b": (4,), "c": (4,)}, group="g")
        gm = bucket_reduce_scatter(reductions(a, other, c), PLAN)
        self.assertEqual(ops(gm.graph).count("reduce_scatter_tensor"), 2)
        self.assertGraph(
            gm,
            """\
%flat: f32[6]
%d_a: f32[4]
%d_b: f32[4]
%d_c: f32[4]
%neg_default: f32[4] = neg(%d_a)
%neg_default_1: f32[4] = neg(%d_b)
%reshape_default_9: f32[2,2] = reshape(%neg_default_1, [2, 2])  # u: reduce
%reshape_default_10: f32[4] = reshape(%reshape_default_9, [4])  # u: reduce
%reduce_scatter_tensor_default_4: f32[2] = reduce_scatter_tensor(%reshape_default_10, 'sum', 2, 'g')  # u: reduce
%wait_tensor_default_4: f32[2] = wait_tensor(%reduce_scatter_tensor_default_4)  # u: reduce
%div_tensor_4: f32[2] = div(%wait_tensor_default_4, 2.0)  # u: reduce
%slice_tensor_2: f32[2] = slice(%div_tensor_4, 0, 0, 2)  # u: reduce
%constant_pad_nd_default_4: f32[6] = constant_pad_nd(%slice_tensor_2, [2, 2])  # u: reduce
%neg_default_2: f32[4] = neg(%d_c)
%reshape_default_6: f32[2,2] = reshape(%neg_default, [2, 2])  # u: reduce
%reshape_default_7: f32[2,2] = reshape(%neg_default_2, [2, 2])  # u: reduce
%cat_default: f32[2,4] = cat([%reshape_default_6, %reshape_default_7], 1)  # u: reduce
%reshape_default_8: f32[8] = reshape(%cat_default, [8])  # u: reduce
%reduce_scatter_tensor_default_3: f32[4] = reduce_scatter_tensor(%reshape_default_8, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_3: f32[4] = wait_tensor(%reduce_scatter_tensor_default_3)  # u: reduce
%div_tensor_3: f32[4] = div(%wait_tensor_default_3, 2.0)  # u: reduce
%slice_tensor: f32[2] = slice(%div_tensor_3, 0, 0, 2)  # u: reduce
%slice_tensor_1: f32[2] = slice(%div_tensor_3, 0, 2, 4)  # u: reduce
%constant_pad_nd_default_3: f32[4] = constant_pad_nd(%slice_tensor_1, [2, 0])  # u: reduce
%cat_default_1: f32[6] = cat([%slice_tensor, %constant_pad_nd_default_3])  # u: reduce
%add_tensor_2: f32[6] = add(%cat_default_1, %constant_pad_nd_default_4)
mark_grads_(%add_tensor_2, %flat, [0, 2, 4])
return [%add_tensor_2]""",
        )

    def test_one_rank(self):
        specs = unit("u", {"a": (4, 2), "b": (2,)}, world=1)
        self.assertGraph(
            bucket_reduce_scatter(reductions(*specs), PLAN),
            """\
%flat: f32[10]
%d_a: f32[4,2]
%d_b: f32[2]
%neg_default: f32[4,2] = neg(%d_a)
%neg_default_1: f32[2] = neg(%d_b)
%reshape_default_4: f32[1,8] = reshape(%neg_default, [1, 8])  # u: reduce
%reshape_default_5: f32[1,2] = reshape(%neg_default_1, [1, 2])  # u: reduce
%cat_default: f32[1,10] = cat([%reshape_default_4, %reshape_default_5], 1)  # u: reduce
%reshape_default_6: f32[10] = reshape(%cat_default, [10])  # u: reduce
mark_grads_(%reshape_default_6, %flat, [0, 8])
return [%reshape_default_6]""",
        )

    def test_two_units(self):
        """Two flat gradients, two reductions, each at its own place."""
        v = unit("v", {"a": (2,), "b": (2,)})
        hand = Hand()
        one, two, d = hand.input("one", 5), hand.input("two", 2), hand.input("d", 2)
        dw = hand.input("dw", 4, 2)
        second = hand.add(*(hand.reduce_grad(d, two, s) for s in v))
        first = hand.add(
            hand.reduce_grad(dw, one, TWO[0]), hand.reduce_grad(hand.compute(d), one, TWO[1])
        )
        gm = bucket_reduce_scatter(lower(hand.returns(first, second), PLAN), PLAN)
        self.assertGraph(
            gm,
            """\
%one: f32[5]
%two: f32[2]
%d: f32[2]
%dw: f32[4,2]
%reshape_default_8: f32[2,1] = reshape(%d, [2, 1])  # v: reduce
%reshape_default_9: f32[2,1] = reshape(%d, [2, 1])  # v: reduce
%cat_default: f32[2,2] = cat([%reshape_default_8, %reshape_default_9], 1)  # v: reduce
%reshape_default_10: f32[4] = reshape(%cat_default, [4])  # v: reduce
%reduce_scatter_tensor_default_4: f32[2] = reduce_scatter_tensor(%reshape_default_10, 'sum', 2, 'shard')  # v: reduce
%wait_tensor_default_4: f32[2] = wait_tensor(%reduce_scatter_tensor_default_4)  # v: reduce
%div_tensor_4: f32[2] = div(%wait_tensor_default_4, 2.0)  # v: reduce
mark_grads_(%div_tensor_4, %two, [0, 1])
%neg_default: f32[2] = neg(%d)
%reshape_default_11: f32[2,4] = reshape(%dw, [2, 4])  # u: reduce
%reshape_default_12: f32[2,1] = reshape(%neg_default, [2, 1])  # u: reduce
%cat_default_1: f32[2,5] = cat([%reshape_default_11, %reshape_default_12], 1)  # u: reduce
%reshape_default_13: f32[10] = reshape(%cat_default_1, [10])  # u: reduce
%reduce_scatter_tensor_default_5: f32[5] = reduce_scatter_tensor(%reshape_default_13, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_5: f32[5] = wait_tensor(%reduce_scatter_tensor_default_5)  # u: reduce
%div_tensor_5: f32[5] = div(%wait_tensor_default_5, 2.0)  # u: reduce
mark_grads_(%div_tensor_5, %one, [0, 4])
return [%div_tensor_5, %div_tensor_4]""",
        )

    def test_near_miss_one_parameter(self):
        self.assertUnchanged(bucket_reduce_scatter, reductions(TWO[0], flat_numel=5))

    def test_near_miss_foreign_term(self):
        hand = Hand()
        flat, da, db = hand.input("flat", 5), hand.input("da", 4, 2), hand.input("db", 2)
        total = hand.add(hand.reduce_grad(da, flat, TWO[0]), hand.reduce_grad(db, flat, TWO[1]))
        gm = lower(hand.returns(hand.add(total, hand.input("penalty", 5))), PLAN)
        self.assertUnchanged(bucket_reduce_scatter, gm)

    def test_near_miss_scaled_sum(self):
        hand = Hand()
        flat, da, db = hand.input("flat", 5), hand.input("da", 4, 2), hand.input("db", 2)
        terms = hand.reduce_grad(da, flat, TWO[0]), hand.reduce_grad(db, flat, TWO[1])
        gm = lower(hand.returns(hand(torch.ops.aten.add.Tensor, *terms, alpha=2)), PLAN)
        self.assertUnchanged(bucket_reduce_scatter, gm)

    def test_idempotent(self):
        gm = bucket_reduce_scatter(
            reductions(*unit("u", {"a": (3, 2), "b": (5,), "c": (2,)})), PLAN
        )
        once = show(gm.graph)
        self.assertEqual(show(bucket_reduce_scatter(gm, PLAN).graph), once)

    def units(self, *specs: list[ParamSpec], limit: int = 1 << 10) -> GraphModule:
        """A flat gradient for each unit."""
        hand = Hand()
        flats = [hand.input(f"flat{n}", numel(unit_specs)) for n, unit_specs in enumerate(specs)]
        totals = []
        for flat, unit_specs in zip(flats, specs, strict=True):
            grads = [
                hand.compute(hand.input(f"d_{s.unit}_{s.fqn}", *s.shape, dtype=s.dtype))
                for s in unit_specs
            ]
            terms = [
                hand.reduce_grad(grad, flat, s) for grad, s in zip(grads, unit_specs, strict=True)
            ]
            total = terms[0]
            for term in terms[1:]:
                total = hand.add(total, term)
            totals.append(total)
        return bucket_reduce_scatter(
            lower(hand.returns(*totals), PLAN), replace(PLAN, bucket_bytes=limit)
        )

    def test_small_units_share(self):
        """Where the last gradient is ready; each flat gradient in storage of its own, marked once
        it is there.
        """
        gm = self.units(unit("a", {"w": (4, 2), "b": (2,)}), unit("b", {"w": (4, 2)}))
        self.assertGraph(
            gm,
            """\
%flat0: f32[5]
%flat1: f32[4]
%d_a_w: f32[4,2]
%neg_default: f32[4,2] = neg(%d_a_w)
%d_a_b: f32[2]
%neg_default_1: f32[2] = neg(%d_a_b)
%d_b_w: f32[4,2]
%neg_default_2: f32[4,2] = neg(%d_b_w)
%reshape_default_6: f32[2,4] = reshape(%neg_default, [2, 4])  # a to b: reduce
%reshape_default_7: f32[2,1] = reshape(%neg_default_1, [2, 1])  # a to b: reduce
%reshape_default_8: f32[2,4] = reshape(%neg_default_2, [2, 4])  # a to b: reduce
%cat_default: f32[2,9] = cat([%reshape_default_6, %reshape_default_7, %reshape_default_8], 1)  # a to b: reduce
%reshape_default_9: f32[18] = reshape(%cat_default, [18])  # a to b: reduce
%reduce_scatter_tensor_default_3: f32[9] = reduce_scatter_tensor(%reshape_default_9, 'sum', 2, 'shard')  # a to b: reduce
%wait_tensor_default_3: f32[9] = wait_tensor(%reduce_scatter_tensor_default_3)  # a to b: reduce
%slice_tensor: f32[5] = slice(%wait_tensor_default_3, 0, 0, 5)  # a to b: reduce
%div_tensor_3: f32[5] = div(%slice_tensor, 2.0)  # a to b: reduce
mark_grads_(%div_tensor_3, %flat0, [0, 4])
%slice_tensor_1: f32[4] = slice(%wait_tensor_default_3, 0, 5, 9)  # a to b: reduce
%div_tensor_4: f32[4] = div(%slice_tensor_1, 2.0)  # a to b: reduce
mark_grads_(%div_tensor_4, %flat1, [0])
return [%div_tensor_3, %div_tensor_4]""",
        )

    def test_shared_sums_that_nothing_divides(self):
        """Each flat gradient is a copy: it is a parameter's `.grad`."""
        gm = self.units(*(unit(name, {"w": (4, 2)}, post_divide=1.0) for name in "ab"))
        self.assertEqual(ops(gm.graph).count("clone"), 2)
        self.assertNotIn("div", ops(gm.graph))

    def test_units_share_up_to_the_limit(self):
        found = self.units(*(unit(name, {"w": (4, 2)}) for name in "abcde"), limit=64)
        self.assertEqual(
            [r.tag.unit for r in find_regions(found.graph, "reduce")], ["a to b", "c to d", "e"]
        )

    def test_units_that_stay_alone(self):
        plain = unit("a", {"w": (4, 2)})
        for changes in (
            {"group": "other"},
            {"reduce_dtype": torch.bfloat16},
            {"reduce_algorithm": "custom:0"},
            {"hook": "hook"},
            {"is_accumulating": True},
            {"post_divide": 3.0},
            {"reduces_in_flight": 2},
            {"overlap": "step"},
        ):
            gm = self.units(plain, unit("b", {"w": (4, 2)}, **changes))
            self.assertEqual(
                [r.tag.unit for r in find_regions(gm.graph, "reduce")], ["a", "b"], changes
            )
