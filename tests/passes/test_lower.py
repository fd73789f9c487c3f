"""`lower`: each fsdp op becomes the arithmetic and the collectives that its arguments ask for."""

import torch
from compiled_fsdp.passes.invariants.messages import cast_by_policy
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, numel, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.passes import lower as module

PADDED, _ = unit("u", {"w": (3, 2), "b": (2,)})


def both_ways(
    spec: ParamSpec, flat_numel: int = 0, grad_dtype: torch.dtype = torch.float32
) -> GraphModule:
    """One parameter's unshard and reduce_grad."""
    hand = Hand()
    flat = hand.input("flat", flat_numel or numel([spec]))
    d = hand.input("d", *spec.shape, dtype=grad_dtype)
    return hand.returns(hand.unshard(flat, spec), hand.reduce_grad(d, flat, spec))


class TestLower(GraphTest):
    def test_docstring(self):
        w, _ = unit("u", {"w": (4, 2), "b": (2,)})
        gm = both_ways(w, flat_numel=5)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", lower(gm, PLAN))

    def test_alone_in_its_unit(self):
        (spec,) = unit("u", {"w": (4, 2)})
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[4]
%d: f32[4,2]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%reshape_default: f32[2,4] = reshape(%d, [2, 4])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_1, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%view_default, %div_tensor]""",
        )

    def test_second_in_its_unit(self):
        _, spec = unit("u", {"w": (4, 2), "b": (2,)})
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[5]
%d: f32[2]
%slice_tensor: f32[1] = slice(%flat, 0, 4, 5)  # u: gather
%all_gather_into_tensor_default: f32[2] = all_gather_into_tensor(%slice_tensor, 2, 'shard')  # u: gather
%wait_tensor_default: f32[2] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[2] = view(%wait_tensor_default, [2])  # u: gather
%reshape_default: f32[2,1] = reshape(%d, [2, 1])  # u: reduce
%reshape_default_1: f32[2] = reshape(%reshape_default, [2])  # u: reduce
%reduce_scatter_tensor_default: f32[1] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[1] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[1] = div(%wait_tensor_default_1, 2.0)  # u: reduce
%constant_pad_nd_default: f32[5] = constant_pad_nd(%div_tensor, [4, 0])  # u: reduce
mark_grads_(%constant_pad_nd_default, %flat, [4])
return [%view_default, %constant_pad_nd_default]""",
        )

    def test_rows_that_do_not_divide(self):
        (spec,) = unit("u", {"w": (3, 2, 2)})
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[8]
%d: f32[3,2,2]
%all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2,2] = view(%wait_tensor_default, [4, 2, 2])  # u: gather
%slice_tensor: f32[3,2,2] = slice(%view_default, 0, 0, 3)  # u: gather
%constant_pad_nd_default: f32[4,2,2] = constant_pad_nd(%d, [0, 0, 0, 0, 0, 1])  # u: reduce
%reshape_default: f32[2,8] = reshape(%constant_pad_nd_default, [2, 8])  # u: reduce
%reshape_default_1: f32[16] = reshape(%reshape_default, [16])  # u: reduce
%reduce_scatter_tensor_default: f32[8] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[8] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[8] = div(%wait_tensor_default_1, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%slice_tensor, %div_tensor]""",
        )

    def test_fewer_rows_than_ranks(self):
        (spec,) = unit("u", {"b": (3,)}, world=8)
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[1]
%d: f32[3]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 8, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[8] = view(%wait_tensor_default, [8])  # u: gather
%slice_tensor: f32[3] = slice(%view_default, 0, 0, 3)  # u: gather
%constant_pad_nd_default: f32[8] = constant_pad_nd(%d, [0, 5])  # u: reduce
%reshape_default: f32[8,1] = reshape(%constant_pad_nd_default, [8, 1])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[1] = reduce_scatter_tensor(%reshape_default_1, 'sum', 8, 'shard')  # u: reduce
%wait_tensor_default_1: f32[1] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[1] = div(%wait_tensor_default_1, 8.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%slice_tensor, %div_tensor]""",
        )

    def test_mixed_precision(self):
        """bf16 gather, fp32 reduction of a bf16 gradient into an fp32 shard."""
        (spec,) = unit("u", {"w": (4, 2)}, dtype=torch.bfloat16)
        self.assertGraph(
            lower(both_ways(spec, grad_dtype=torch.bfloat16), PLAN),
            """\
%flat: f32[4]
%d: bf16[4,2]
%convert_element_type_default: bf16[4] = convert_element_type(%flat, bf16)  # u: gather
%all_gather_into_tensor_default: bf16[8] = all_gather_into_tensor(%convert_element_type_default, 2, 'shard')  # u: gather
%wait_tensor_default: bf16[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: bf16[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%convert_element_type_default_1: f32[4,2] = convert_element_type(%d, f32)  # u: reduce
%reshape_default: f32[2,4] = reshape(%convert_element_type_default_1, [2, 4])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_1, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%view_default, %div_tensor]""",
        )

    def test_low_precision_reduction(self):
        """fp16 divides before and after, and is cast to the shard's dtype at the end."""
        (spec,) = unit(
            "u",
            {"w": (4, 2)},
            dtype=torch.float16,
            reduce_dtype=torch.float16,
            pre_divide=2.0,
            post_divide=1.0,
        )
        self.assertGraph(
            lower(both_ways(spec, grad_dtype=torch.float16), PLAN),
            """\
%flat: f32[4]
%d: f16[4,2]
%convert_element_type_default: f16[4] = convert_element_type(%flat, f16)  # u: gather
%all_gather_into_tensor_default: f16[8] = all_gather_into_tensor(%convert_element_type_default, 2, 'shard')  # u: gather
%wait_tensor_default: f16[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f16[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%reshape_default: f16[2,4] = reshape(%d, [2, 4])  # u: reduce
%reshape_default_1: f16[8] = reshape(%reshape_default, [8])  # u: reduce
%div_tensor: f16[8] = div(%reshape_default_1, 2.0)  # u: reduce
%reduce_scatter_tensor_default: f16[4] = reduce_scatter_tensor(%div_tensor, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f16[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%convert_element_type_default_1: f32[4] = convert_element_type(%wait_tensor_default_1, f32)  # u: reduce
mark_grads_(%convert_element_type_default_1, %flat, [0])
return [%view_default, %convert_element_type_default_1]""",
        )

    def test_hsdp(self):
        """The all-reduce over the replicate axis sees the scattered shard, and has its own wait."""
        (spec,) = unit(
            "u", {"w": (4, 2)}, replicate_size=4, replicate_group="replicate", post_divide=8.0
        )
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[4]
%d: f32[4,2]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%reshape_default: f32[2,4] = reshape(%d, [2, 4])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%all_reduce_default: f32[4] = all_reduce(%wait_tensor_default_1, 'sum', 'replicate')  # u: reduce
%wait_tensor_default_2: f32[4] = wait_tensor(%all_reduce_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_2, 8.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%view_default, %div_tensor]""",
        )

    def test_all_to_all(self):
        (spec,) = unit("u", {"w": (3, 2)}, reduce_algorithm="all_to_all")
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[4]
%d: f32[3,2]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%slice_tensor: f32[3,2] = slice(%view_default, 0, 0, 3)  # u: gather
%constant_pad_nd_default: f32[4,2] = constant_pad_nd(%d, [0, 0, 0, 1])  # u: reduce
%reshape_default: f32[2,4] = reshape(%constant_pad_nd_default, [2, 4])  # u: reduce
%all_to_all_default: f32[2,4] = all_to_all([%reshape_default], 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[2,4] = wait_tensor(%all_to_all_default)  # u: reduce
%sum_dim_int_list: f32[4] = sum(%wait_tensor_default_1, [0])  # u: reduce
%div_tensor: f32[4] = div(%sum_dim_int_list, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%slice_tensor, %div_tensor]""",
        )

    def test_average_on_the_device(self):
        (spec,) = unit("u", {"w": (4, 2)}, reduce_op="avg", post_divide=1.0)
        self.assertEqual(
            ops(lower(both_ways(spec), PLAN).graph),
            [
                *("all_gather_into_tensor", "wait_tensor", "view"),
                *("reshape", "reshape", "reduce_scatter_tensor", "wait_tensor", "mark_grads_"),
            ],
        )

    def test_one_rank(self):
        """No collective; but the gradient must not alias what it is made of, which another
        parameter may get too.
        """
        (spec,) = unit("u", {"w": (4, 2)}, world=1)
        self.assertGraph(
            lower(both_ways(spec), PLAN),
            """\
%flat: f32[8]
%d: f32[4,2]
%view_default: f32[4,2] = view(%flat, [4, 2])  # u: gather
%reshape_default: f32[1,8] = reshape(%d, [1, 8])  # u: reduce
%reshape_default_1: f32[8] = reshape(%reshape_default, [8])  # u: reduce
%clone_default: f32[8] = clone(%reshape_default_1)  # u: reduce
mark_grads_(%clone_default, %flat, [0])
return [%view_default, %clone_default]""",
        )

    def test_one_rank_needs_no_second_copy(self):
        _, spec = unit("u", {"w": (4, 2), "b": (2,)}, world=1)
        self.assertNotIn("clone", ops(lower(both_ways(spec), PLAN).graph))

    def test_unshard_slice(self):
        """Gathers over the small group; its padding is that group's (5 rows: 2 a rank of 4, 3 a
        rank of 2).
        """
        (spec,) = unit("u", {"w": (5, 2)}, world=4, reshard="slice", post_size=2, post_group="post")
        hand = Hand()
        kept = hand.input("kept", 6)
        self.assertGraph(
            lower(hand.returns(hand.unshard_slice(kept, spec)), PLAN),
            """\
%kept: f32[6]
%all_gather_into_tensor_default: f32[12] = all_gather_into_tensor(%kept, 2, 'post')  # u: gather
%wait_tensor_default: f32[12] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[6,2] = view(%wait_tensor_default, [6, 2])  # u: gather
%slice_tensor: f32[5,2] = slice(%view_default, 0, 0, 5)  # u: gather
return [%slice_tensor]""",
        )

    def test_one_mark_for_each_flat_gradient(self):
        """Of three parameters two have a gradient; the other unit's gradient is marked by
        itself.
        """
        a, _, c = unit("u", {"a": (4,), "b": (4,), "c": (4,)})
        (w,) = unit("v", {"w": (4,)})
        hand = Hand()
        flat, other, d = hand.input("flat", 6), hand.input("other", 2), hand.input("d", 4)
        total = hand.add(hand.reduce_grad(d, flat, c), hand.reduce_grad(d, flat, a))
        self.assertGraph(
            lower(hand.returns(total, hand.reduce_grad(d, other, w)), PLAN),
            """\
%flat: f32[6]
%other: f32[2]
%d: f32[4]
%reshape_default: f32[2,2] = reshape(%d, [2, 2])  # u: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u: reduce
%constant_pad_nd_default: f32[6] = constant_pad_nd(%div_tensor, [4, 0])  # u: reduce
%reshape_default_2: f32[2,2] = reshape(%d, [2, 2])  # u: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u: reduce
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u: reduce
%div_tensor_1: f32[2] = div(%wait_tensor_default_1, 2.0)  # u: reduce
%constant_pad_nd_default_1: f32[6] = constant_pad_nd(%div_tensor_1, [0, 4])  # u: reduce
%add_tensor: f32[6] = add(%constant_pad_nd_default, %constant_pad_nd_default_1)
mark_grads_(%add_tensor, %flat, [0, 4])
%reshape_default_4: f32[2,2] = reshape(%d, [2, 2])  # v: reduce
%reshape_default_5: f32[4] = reshape(%reshape_default_4, [4])  # v: reduce
%reduce_scatter_tensor_default_2: f32[2] = reduce_scatter_tensor(%reshape_default_5, 'sum', 2, 'shard')  # v: reduce
%wait_tensor_default_2: f32[2] = wait_tensor(%reduce_scatter_tensor_default_2)  # v: reduce
%div_tensor_2: f32[2] = div(%wait_tensor_default_2, 2.0)  # v: reduce
mark_grads_(%div_tensor_2, %other, [0])
return [%add_tensor, %div_tensor_2]""",
        )

    def test_retained_dtype(self):
        """What is kept stays in its own dtype, and is cast to the reduce dtype once it is
        summed.
        """
        ways = {"reduce_dtype": torch.float16, "retained_dtype": torch.float32}
        (kept,) = unit("u", {"w": (4,)}, sync="retain", **ways)
        (summed,) = unit("u", {"w": (4,)}, is_accumulating=True, **ways)
        hand = Hand()
        flat, d, e = hand.input("flat", 2), hand.input("d", 4), hand.input("e", 4)
        gm = lower(
            hand.returns(hand.reduce_grad(d, flat, kept), hand.reduce_grad(e, flat, summed)), PLAN
        )
        self.assertGraph(
            gm,
            """\
%flat: f32[2]
%d: f32[4]
%e: f32[4]
%reshape_default: f32[2,2] = reshape(%d, [2, 2])  # u: reduce
retain_(%reshape_default, %flat, [0], 'rows')  # u: reduce
%reshape_default_1: f32[2,2] = reshape(%e, [2, 2])  # u: reduce
%clone_default: f32[2,2] = clone(%reshape_default_1, memory_format=torch.contiguous_format)  # u: reduce
add_retained_(%clone_default, %flat, [0], 'rows')  # u: reduce
%convert_element_type_default: f16[2,2] = convert_element_type(%clone_default, f16)  # u: reduce
%reshape_default_2: f16[4] = reshape(%convert_element_type_default, [4])  # u: reduce
%reduce_scatter_tensor_default: f16[2] = reduce_scatter_tensor(%reshape_default_2, 'sum', 2, 'shard')  # u: reduce
%wait_tensor_default: f16[2] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f16[2] = div(%wait_tensor_default, 2.0)  # u: reduce
%convert_element_type_default_1: f32[2] = convert_element_type(%div_tensor, f32)  # u: reduce
mark_grads_(%convert_element_type_default_1, %flat, [0])
return [None, %convert_element_type_default_1]""",
        )
        self.assertEqual([*cast_by_policy(gm, PLAN)], [])

    def test_near_miss(self):
        hand = Hand()
        kept = hand.keep_slice(hand.input("w", 3, 2), PADDED)
        self.assertUnchanged(lower, hand.returns(kept, hand.compute(kept)))

    def test_idempotent(self):
        gm = lower(both_ways(PADDED, flat_numel=5), PLAN)
        once = show(gm.graph)
        self.assertEqual(show(lower(gm, PLAN).graph), once)
