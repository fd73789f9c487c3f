"""`bucket_all_gather`: one all-gather a unit, no copy on the way in, one copy a parameter on the
way out.
"""

from dataclasses import replace

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, numel, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.passes import bucket_all_gather as module

aten = torch.ops.aten


def gathers(*specs: ParamSpec, flat_numel: int = 0) -> GraphModule:
    """Gather each parameter of one flat buffer and compute with it before the next."""
    hand = Hand()
    flat = hand.input("flat", flat_numel or numel(list(specs)))
    return lower(hand.returns(*(hand.compute(hand.unshard(flat, s)) for s in specs)), PLAN)


def of_computed(is_of_first: bool) -> GraphModule:
    """Two parameters of a unit; the second is computed from its buffer alone, or with the first."""
    a, b = unit("u", {"a": (2,), "b": (2,)}, world=2)
    hand = Hand()
    flats = hand.input("codes", 1), hand.input("other", 1)
    first = hand.compute(hand.unshard(flats[0], replace(a, offset=0)))
    more = hand(aten.slice.Tensor, first, 0, 0, 1) if is_of_first else flats[1]
    second = hand(aten.mul.Tensor, more, flats[1])
    return lower(hand.returns(first, hand.unshard(second, replace(b, offset=0))), PLAN)


class TestBucketAllGather(GraphTest):
    def test_docstring(self):
        hand = Hand()
        flat = hand.input("flat", 5)
        gm = lower(
            hand.returns(*(hand.unshard(flat, s) for s in unit("u", {"a": (4, 2), "b": (2,)}))),
            PLAN,
        )
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", bucket_all_gather(gm, PLAN))
        hand = Hand()
        large = unit("u", {"a": (400, 200), "b": (300, 400)})
        flat = hand.input("flat", numel(large))
        gm = lower(hand.returns(*(hand.unshard(flat, s) for s in large)), PLAN)
        self.assertDocumented(module, "Large", bucket_all_gather(gm, PLAN))

    def test_small_between_large(self):
        """Neighbours that are small share a message; nothing large is copied."""
        gm = gathers(*unit("u", {"a": (400, 200), "s": (2,), "t": (4,), "b": (300, 400)}))
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[100003]
%all_gather_default: f32[200006] = all_gather(%flat, [40000, 3, 60000], 2, 'shard')  # u: gather
%wait_tensor_default_4: f32[200006] = wait_tensor(%all_gather_default)  # u: gather
%slice_tensor_4: f32[80000] = slice(%wait_tensor_default_4, 0, 0, 80000)  # u: gather
%view_default_4: f32[400,200] = view(%slice_tensor_4, [400, 200])  # u: gather
%neg_default: f32[400,200] = neg(%view_default_4)
%slice_tensor_5: f32[6] = slice(%wait_tensor_default_4, 0, 80000, 80006)  # u: gather
%view_default_5: f32[2,3] = view(%slice_tensor_5, [2, 3])  # u: gather
%slice_tensor_6: f32[2,1] = slice(%view_default_5, 1, 0, 1)  # u: gather
%clone_default: f32[2,1] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # u: gather
%view_default_6: f32[2] = view(%clone_default, [2])  # u: gather
%neg_default_1: f32[2] = neg(%view_default_6)
%slice_tensor_7: f32[6] = slice(%wait_tensor_default_4, 0, 80000, 80006)  # u: gather
%view_default_7: f32[2,3] = view(%slice_tensor_7, [2, 3])  # u: gather
%slice_tensor_8: f32[2,2] = slice(%view_default_7, 1, 1, 3)  # u: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_8, memory_format=torch.contiguous_format)  # u: gather
%view_default_8: f32[4] = view(%clone_default_1, [4])  # u: gather
%neg_default_2: f32[4] = neg(%view_default_8)
%slice_tensor_9: f32[120000] = slice(%wait_tensor_default_4, 0, 80006, 200006)  # u: gather
%view_default_9: f32[300,400] = view(%slice_tensor_9, [300, 400])  # u: gather
%neg_default_3: f32[300,400] = neg(%view_default_9)
return [%neg_default, %neg_default_1, %neg_default_2, %neg_default_3]""",
        )

    def test_slices_that_backward_cuts_itself(self):
        """Under activation checkpointing the second slice is computed after the first is gathered:
        no bucket of both.
        """
        hand = Hand()
        specs = unit(
            "u",
            {"a": (8, 2), "b": (4, 2)},
            world=4,
            reshard="slice",
            post_size=2,
            post_group="small",
        )
        flat = hand.input("flat", numel(specs))
        sliced = [
            hand.unshard_slice(hand.keep_slice(hand.compute(hand.unshard(flat, s)), s), s)
            for s in specs
        ]
        gm = bucket_all_gather(lower(hand.returns(*sliced), PLAN), PLAN)
        gm.graph.lint()
        self.assertEqual([len(r.tag.specs) for r in find_regions(gm.graph, "gather")], [2, 1, 1])

    def test_two_parameters(self):
        """Each is copied out where it was gathered."""
        gm = gathers(*unit("u", {"a": (4, 2), "b": (2,)}))
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[5]
%all_gather_into_tensor_default_2: f32[10] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[10] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_2: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default: f32[4,2] = neg(%view_default_3)
%view_default_4: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_3: f32[2,1] = slice(%view_default_4, 1, 4, 5)  # u: gather
%clone_default_1: f32[2,1] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: f32[2] = view(%clone_default_1, [2])  # u: gather
%neg_default_1: f32[2] = neg(%view_default_5)
return [%neg_default, %neg_default_1]""",
        )

    def test_order_of_the_buffer_not_of_use(self):
        a, b = unit("u", {"a": (4, 2), "b": (2,)})
        gm = gathers(b, a, flat_numel=5)
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[5]
%all_gather_into_tensor_default_2: f32[10] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[10] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_4: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_3: f32[2,1] = slice(%view_default_4, 1, 4, 5)  # u: gather
%clone_default_1: f32[2,1] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: f32[2] = view(%clone_default_1, [2])  # u: gather
%neg_default: f32[2] = neg(%view_default_5)
%view_default_2: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_2: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default_1: f32[4,2] = neg(%view_default_3)
return [%neg_default, %neg_default_1]""",
        )

    def test_rows_that_do_not_divide(self):
        gm = gathers(*unit("u", {"a": (3, 2), "b": (5,)}))
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[7]
%all_gather_into_tensor_default_2: f32[14] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[14] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,7] = view(%wait_tensor_default_2, [2, 7])  # u: gather
%slice_tensor_4: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = clone(%slice_tensor_4, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%slice_tensor_5: f32[3,2] = slice(%view_default_3, 0, 0, 3)  # u: gather
%neg_default: f32[3,2] = neg(%slice_tensor_5)
%view_default_4: f32[2,7] = view(%wait_tensor_default_2, [2, 7])  # u: gather
%slice_tensor_6: f32[2,3] = slice(%view_default_4, 1, 4, 7)  # u: gather
%clone_default_1: f32[2,3] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: f32[6] = view(%clone_default_1, [6])  # u: gather
%slice_tensor_7: f32[5] = slice(%view_default_5, 0, 0, 5)  # u: gather
%neg_default_1: f32[5] = neg(%slice_tensor_7)
return [%neg_default, %neg_default_1]""",
        )

    def test_subset_with_a_gap(self):
        """Backward reads the first and the last two of four: two slices, joined by a cat."""
        a, _, c, d = unit("u", {"a": (4,), "b": (4,), "c": (4,), "d": (2,)})
        self.assertGraph(
            bucket_all_gather(gathers(a, c, d, flat_numel=7), PLAN),
            """\
%flat: f32[7]
%slice_tensor_3: f32[2] = slice(%flat, 0, 0, 2)  # u: gather
%slice_tensor_4: f32[3] = slice(%flat, 0, 4, 7)  # u: gather
%cat_default: f32[5] = cat([%slice_tensor_3, %slice_tensor_4])  # u: gather
%all_gather_into_tensor_default_3: f32[10] = all_gather_into_tensor(%cat_default, 2, 'shard')  # u: gather
%wait_tensor_default_3: f32[10] = wait_tensor(%all_gather_into_tensor_default_3)  # u: gather
%view_default_3: f32[2,5] = view(%wait_tensor_default_3, [2, 5])  # u: gather
%slice_tensor_5: f32[2,2] = slice(%view_default_3, 1, 0, 2)  # u: gather
%clone_default: f32[2,2] = clone(%slice_tensor_5, memory_format=torch.contiguous_format)  # u: gather
%view_default_4: f32[4] = view(%clone_default, [4])  # u: gather
%neg_default: f32[4] = neg(%view_default_4)
%view_default_5: f32[2,5] = view(%wait_tensor_default_3, [2, 5])  # u: gather
%slice_tensor_6: f32[2,2] = slice(%view_default_5, 1, 2, 4)  # u: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # u: gather
%view_default_6: f32[4] = view(%clone_default_1, [4])  # u: gather
%neg_default_1: f32[4] = neg(%view_default_6)
%view_default_7: f32[2,5] = view(%wait_tensor_default_3, [2, 5])  # u: gather
%slice_tensor_7: f32[2,1] = slice(%view_default_7, 1, 4, 5)  # u: gather
%clone_default_2: f32[2,1] = clone(%slice_tensor_7, memory_format=torch.contiguous_format)  # u: gather
%view_default_8: f32[2] = view(%clone_default_2, [2])  # u: gather
%neg_default_2: f32[2] = neg(%view_default_8)
return [%neg_default, %neg_default_1, %neg_default_2]""",
        )

    def test_mixed_precision_casts_once(self):
        gm = gathers(*unit("u", {"a": (4, 2), "b": (2,)}, dtype=torch.bfloat16))
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[5]
%convert_element_type_default_2: bf16[5] = convert_element_type(%flat, bf16)  # u: gather
%all_gather_into_tensor_default_2: bf16[10] = all_gather_into_tensor(%convert_element_type_default_2, 2, 'shard')  # u: gather
%wait_tensor_default_2: bf16[10] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: bf16[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_2: bf16[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: bf16[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: bf16[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default: bf16[4,2] = neg(%view_default_3)
%view_default_4: bf16[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_3: bf16[2,1] = slice(%view_default_4, 1, 4, 5)  # u: gather
%clone_default_1: bf16[2,1] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: bf16[2] = view(%clone_default_1, [2])  # u: gather
%neg_default_1: bf16[2] = neg(%view_default_5)
return [%neg_default, %neg_default_1]""",
        )

    def test_two_flat_buffers(self):
        """Trainable and frozen parameters of a unit, or fp32 and bf16 ones with one compute dtype,
        travel together.
        """
        a, b = unit("u", {"a": (4, 2), "b": (2,)}, dtype=torch.bfloat16)
        (c,) = unit("u", {"c": (4,)}, dtype=torch.bfloat16)
        hand = Hand()
        trained, frozen = hand.input("trained", 5), hand.input("frozen", 2, dtype=torch.bfloat16)
        pairs = ((trained, a), (frozen, c), (trained, b))
        gm = lower(hand.returns(*(hand.compute(hand.unshard(f, s)) for f, s in pairs)), PLAN)
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%trained: f32[5]
%frozen: bf16[2]
%convert_element_type_default_2: bf16[5] = convert_element_type(%trained, bf16)  # u: gather
%cat_default: bf16[7] = cat([%convert_element_type_default_2, %frozen])  # u: gather
%all_gather_into_tensor_default_3: bf16[14] = all_gather_into_tensor(%cat_default, 2, 'shard')  # u: gather
%wait_tensor_default_3: bf16[14] = wait_tensor(%all_gather_into_tensor_default_3)  # u: gather
%view_default_3: bf16[2,7] = view(%wait_tensor_default_3, [2, 7])  # u: gather
%slice_tensor_2: bf16[2,4] = slice(%view_default_3, 1, 0, 4)  # u: gather
%clone_default: bf16[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_4: bf16[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default: bf16[4,2] = neg(%view_default_4)
%view_default_7: bf16[2,7] = view(%wait_tensor_default_3, [2, 7])  # u: gather
%slice_tensor_4: bf16[2,2] = slice(%view_default_7, 1, 5, 7)  # u: gather
%clone_default_2: bf16[2,2] = clone(%slice_tensor_4, memory_format=torch.contiguous_format)  # u: gather
%view_default_8: bf16[4] = view(%clone_default_2, [4])  # u: gather
%neg_default_1: bf16[4] = neg(%view_default_8)
%view_default_5: bf16[2,7] = view(%wait_tensor_default_3, [2, 7])  # u: gather
%slice_tensor_3: bf16[2,1] = slice(%view_default_5, 1, 4, 5)  # u: gather
%clone_default_1: bf16[2,1] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # u: gather
%view_default_6: bf16[2] = view(%clone_default_1, [2])  # u: gather
%neg_default_2: bf16[2] = neg(%view_default_6)
return [%neg_default, %neg_default_1, %neg_default_2]""",
        )

    def test_slices(self):
        """The second gather of int reshard: the slices are separate values and are joined first."""
        specs = unit(
            "u", {"a": (4, 2), "b": (3,)}, world=4, reshard="slice", post_size=2, post_group="post"
        )
        hand = Hand()
        kept = [hand.input(s.fqn, s.over_post_group().shard_numel) for s in specs]
        pairs = zip(kept, specs, strict=True)
        gm = lower(hand.returns(*(hand.compute(hand.unshard_slice(k, s)) for k, s in pairs)), PLAN)
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%a: f32[4]
%b: f32[2]
%cat_default: f32[6] = cat([%a, %b])  # u: gather
%all_gather_into_tensor_default_2: f32[12] = all_gather_into_tensor(%cat_default, 2, 'post')  # u: gather
%wait_tensor_default_2: f32[12] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,6] = view(%wait_tensor_default_2, [2, 6])  # u: gather
%slice_tensor_1: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = clone(%slice_tensor_1, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default: f32[4,2] = neg(%view_default_3)
%view_default_4: f32[2,6] = view(%wait_tensor_default_2, [2, 6])  # u: gather
%slice_tensor_2: f32[2,2] = slice(%view_default_4, 1, 4, 6)  # u: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: f32[4] = view(%clone_default_1, [4])  # u: gather
%slice_tensor_3: f32[3] = slice(%view_default_5, 0, 0, 3)  # u: gather
%neg_default_1: f32[3] = neg(%slice_tensor_3)
return [%neg_default, %neg_default_1]""",
        )

    def test_computed_from_inputs(self):
        """What extensions gather is computed before the first gather of the bucket."""
        gm = of_computed(is_of_first=False)
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%codes: f32[1]
%other: f32[1]
%mul_tensor: f32[1] = mul(%other, %other)
%cat_default: f32[2] = cat([%codes, %mul_tensor])  # u: gather
%all_gather_into_tensor_default_2: f32[4] = all_gather_into_tensor(%cat_default, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[4] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,2] = view(%wait_tensor_default_2, [2, 2])  # u: gather
%slice_tensor: f32[2,1] = slice(%view_default_2, 1, 0, 1)  # u: gather
%clone_default: f32[2,1] = clone(%slice_tensor, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[2] = view(%clone_default, [2])  # u: gather
%neg_default: f32[2] = neg(%view_default_3)
%view_default_4: f32[2,2] = view(%wait_tensor_default_2, [2, 2])  # u: gather
%slice_tensor_1: f32[2,1] = slice(%view_default_4, 1, 1, 2)  # u: gather
%clone_default_1: f32[2,1] = clone(%slice_tensor_1, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: f32[2] = view(%clone_default_1, [2])  # u: gather
return [%neg_default, %view_default_5]""",
        )

    def test_near_miss_computed_from_the_first(self):
        """What needs the first gather begins a bucket of its own."""
        self.assertUnchanged(bucket_all_gather, of_computed(is_of_first=True))

    def test_one_rank(self):
        """Nothing is gathered, and nothing needs a copy."""
        gm = gathers(*unit("u", {"a": (4, 2), "b": (2,)}, world=1))
        self.assertGraph(
            bucket_all_gather(gm, PLAN),
            """\
%flat: f32[10]
%view_default_2: f32[10] = view(%flat, [10])  # u: gather
%view_default_3: f32[1,10] = view(%view_default_2, [1, 10])  # u: gather
%slice_tensor_2: f32[1,8] = slice(%view_default_3, 1, 0, 8)  # u: gather
%view_default_4: f32[4,2] = view(%slice_tensor_2, [4, 2])  # u: gather
%neg_default: f32[4,2] = neg(%view_default_4)
%view_default_5: f32[1,10] = view(%view_default_2, [1, 10])  # u: gather
%slice_tensor_3: f32[1,2] = slice(%view_default_5, 1, 8, 10)  # u: gather
%view_default_6: f32[2] = view(%slice_tensor_3, [2])  # u: gather
%neg_default_1: f32[2] = neg(%view_default_6)
return [%neg_default, %neg_default_1]""",
        )

    def test_near_miss_one_parameter(self):
        a, _ = unit("u", {"a": (4, 2), "b": (2,)})
        self.assertUnchanged(bucket_all_gather, gathers(a, flat_numel=5))

    def test_near_miss_units_dtypes_groups(self):
        """Parameters of two units, of two compute dtypes, or on two groups do not share a
        bucket.
        """
        (a,) = unit("u", {"a": (4, 2)})
        others = (
            unit("v", {"a": (4, 2)}),
            unit("u", {"a": (4, 2)}, dtype=torch.bfloat16),
            unit("u", {"a": (4, 2)}, group="g"),
        )
        for (b,) in others:
            hand = Hand()
            one, two = hand.input("one", 4), hand.input("two", 4)
            gm = lower(hand.returns(hand.unshard(one, a), hand.unshard(two, b)), PLAN)
            self.assertUnchanged(bucket_all_gather, gm)

    def test_leaves_reductions_alone(self):
        a, b = unit("u", {"a": (4, 2), "b": (2,)})
        hand = Hand()
        flat, da, db = hand.input("flat", 5), hand.input("da", 4, 2), hand.input("db", 2)
        gm = lower(
            hand.returns(hand.add(hand.reduce_grad(da, flat, a), hand.reduce_grad(db, flat, b))),
            PLAN,
        )
        self.assertUnchanged(bucket_all_gather, gm)

    def test_idempotent(self):
        gm = bucket_all_gather(gathers(*unit("u", {"a": (3, 2), "b": (5,), "c": (2,)})), PLAN)
        once = show(gm.graph)
        self.assertEqual(show(bucket_all_gather(gm, PLAN).graph), once)
        self.assertEqual(ops(gm.graph).count("all_gather_into_tensor"), 1)

    def units(self, *specs: list[ParamSpec], limit: int = 1 << 10) -> GraphModule:
        """Each unit's parameters computed with in turn."""
        hand = Hand()
        flats = [hand.input(f"flat{n}", numel(unit_specs)) for n, unit_specs in enumerate(specs)]
        pairs = [
            (flat, s) for flat, unit_specs in zip(flats, specs, strict=True) for s in unit_specs
        ]
        gm = lower(hand.returns(*(hand.compute(hand.unshard(flat, s)) for flat, s in pairs)), PLAN)
        return bucket_all_gather(gm, replace(PLAN, bucket_bytes=limit))

    def test_small_units_share(self):
        gm = self.units(unit("a", {"w": (4, 2)}), unit("b", {"w": (2, 2), "v": (2,)}))
        self.assertGraph(
            gm,
            """\
%flat0: f32[4]
%flat1: f32[3]
%cat_default: f32[7] = cat([%flat0, %flat1])  # a to b: gather
%all_gather_into_tensor_default_3: f32[14] = all_gather_into_tensor(%cat_default, 2, 'shard')  # a to b: gather
%wait_tensor_default_3: f32[14] = wait_tensor(%all_gather_into_tensor_default_3)  # a to b: gather
%view_default_3: f32[2,7] = view(%wait_tensor_default_3, [2, 7])  # a to b: gather
%slice_tensor_2: f32[2,4] = slice(%view_default_3, 1, 0, 4)  # a to b: gather
%clone_default: f32[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # a to b: gather
%view_default_4: f32[4,2] = view(%clone_default, [4, 2])  # a to b: gather
%neg_default: f32[4,2] = neg(%view_default_4)
%view_default_5: f32[2,7] = view(%wait_tensor_default_3, [2, 7])  # a to b: gather
%slice_tensor_3: f32[2,2] = slice(%view_default_5, 1, 4, 6)  # a to b: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # a to b: gather
%view_default_6: f32[2,2] = view(%clone_default_1, [2, 2])  # a to b: gather
%neg_default_1: f32[2,2] = neg(%view_default_6)
%view_default_7: f32[2,7] = view(%wait_tensor_default_3, [2, 7])  # a to b: gather
%slice_tensor_4: f32[2,1] = slice(%view_default_7, 1, 6, 7)  # a to b: gather
%clone_default_2: f32[2,1] = clone(%slice_tensor_4, memory_format=torch.contiguous_format)  # a to b: gather
%view_default_8: f32[2] = view(%clone_default_2, [2])  # a to b: gather
%neg_default_2: f32[2] = neg(%view_default_8)
return [%neg_default, %neg_default_1, %neg_default_2]""",
        )

    def test_units_share_up_to_the_limit(self):
        """32 bytes each: two fit into 64, and the third begins another."""
        found = self.units(*(unit(name, {"w": (4, 2)}) for name in "abcde"), limit=64)
        self.assertEqual(
            [r.tag.unit for r in find_regions(found.graph, "gather")], ["a to b", "c to d", "e"]
        )

    def test_units_that_stay_alone(self):
        """Another dtype, group, algorithm or kind of keeping; lists of the user; an optimizer that
        overlaps.
        """
        plain = unit("a", {"w": (4, 2)})
        for changes in (
            {"dtype": torch.bfloat16},
            {"group": "other"},
            {"gather_algorithm": "custom:0"},
            {"reshard": "keep"},
            {"forward_after": ("a",)},
            {"overlap": "step"},
        ):
            gm = self.units(plain, unit("b", {"w": (4, 2)}, **changes))
            self.assertEqual(
                [r.tag.unit for r in find_regions(gm.graph, "gather")], ["a", "b"], changes
            )
