"""`add_checksums`: what travels is summed up before it is sent and when it has arrived."""

from dataclasses import replace

import torch
from compiled_fsdp.passes.add_checksums import add_checksums
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import COMPARE, UPDATE
from compiled_fsdp.ir.spec import AGAIN, ParamSpec
from compiled_fsdp.passes import add_checksums as module
from compiled_fsdp.planning.plan import Plan

(W,) = unit("u#1", {"w": (4, 2)}, is_checked=True, reduce_algorithm="all_to_all")


def gathers(*specs: ParamSpec) -> GraphModule:
    hand = Hand()
    flat = hand.input("flat", sum(spec.shard_numel for spec in specs))
    return hand.returns(*(hand.compute(hand.unshard(flat, spec)) for spec in specs))


class TestAddChecksums(GraphTest):
    def test_docstring(self):
        hand = Hand()
        gm = lower(hand.returns(hand.unshard(hand.input("flat", 8), replace(W, shape=(16,)))), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", add_checksums(gm, PLAN))

    def test_a_bucket_that_is_cast(self):
        specs = unit("u#1", {"a": (4, 2), "b": (6,)}, is_checked=True, dtype=torch.bfloat16)
        gm = add_checksums(bucket_all_gather(lower(gathers(*specs), PLAN), PLAN), PLAN)
        check(gm, PLAN, "add_checksums")
        self.assertGraph(
            gm,
            """\
%flat: f32[7]
%convert_element_type_default_2: bf16[7] = convert_element_type(%flat, bf16)  # u: gather
%checksum_default: i64[1,2] = checksum([%convert_element_type_default_2], 1, [7], [4, 3])
%all_gather_into_tensor_default_2: bf16[14] = all_gather_into_tensor(%convert_element_type_default_2, 2, 'shard')  # u: gather
%checksum_default_1: i64[1,2] = checksum([%flat], 1, [7], [4, 3])
%wait_tensor_default_2: bf16[14] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%checksum_default_2: i64[2,2] = checksum([%wait_tensor_default_2], 2, [7], [4, 3])
compare_(%checksum_default, %checksum_default_2, [%checksum_default_1], [%flat], [2], 'all-gather', 'forward', ['u#1:a', 'u#1:b'])
%view_default_2: bf16[2,7] = view(%wait_tensor_default_2, [2, 7])  # u: gather
%slice_tensor_2: bf16[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: bf16[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: bf16[4,2] = view(%clone_default, [4, 2])  # u: gather
%neg_default: bf16[4,2] = neg(%view_default_3)
%view_default_4: bf16[2,7] = view(%wait_tensor_default_2, [2, 7])  # u: gather
%slice_tensor_3: bf16[2,3] = slice(%view_default_4, 1, 4, 7)  # u: gather
%clone_default_1: bf16[2,3] = clone(%slice_tensor_3, memory_format=torch.contiguous_format)  # u: gather
%view_default_5: bf16[6] = view(%clone_default_1, [6])  # u: gather
%neg_default_1: bf16[6] = neg(%view_default_5)
return [%neg_default, %neg_default_1]""",
        )

    def test_a_reduction_with_replicas(self):
        hand = Hand()
        flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
        spec = replace(W, replicate_size=2, replicate_group="replicate", post_divide=4.0)
        gm = lower(hand.returns(hand.reduce_grad(d, flat, spec)), PLAN)
        gm = add_checksums(bucket_reduce_scatter(gm, PLAN), PLAN)
        check(gm, PLAN, "add_checksums")
        self.assertGraph(
            gm,
            """\
%flat: f32[4]
%d: f32[4,2]
%reshape_default: f32[2,4] = reshape(%d, [2, 4])  # u: reduce
%checksum_default: i64[2,1] = checksum([%reshape_default], 2, [4], [4])
%all_to_all_default: f32[2,4] = all_to_all([%reshape_default], 2, 'shard')  # u: reduce
%wait_tensor_default: f32[2,4] = wait_tensor(%all_to_all_default)  # u: reduce
%checksum_default_1: i64[2,1] = checksum([%wait_tensor_default], 2, [4], [4])
compare_(%checksum_default, %checksum_default_1, [], [], [], 'all-to-all', 'forward', ['u#1:w'])
%sum_dim_int_list: f32[4] = sum(%wait_tensor_default, [0])  # u: reduce
%all_reduce_default: f32[4] = all_reduce(%sum_dim_int_list, 'sum', 'replicate')  # u: reduce
%wait_tensor_default_1: f32[4] = wait_tensor(%all_reduce_default)  # u: reduce
%checksum_default_2: i64[1,1] = checksum([%wait_tensor_default_1], 1, [4], [4])
compare_(%checksum_default_2, %checksum_default_2, [], [], [], 'all-reduce', 'forward', ['u#1:w'])
%div_tensor: f32[4] = div(%wait_tensor_default_1, 4.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%div_tensor]""",
        )

    def test_near_miss(self):
        """Nobody asked for it; one rank; of a bucket, some did not ask."""
        off = replace(W, is_checked=False)
        self.assertUnchanged(add_checksums, lower(gathers(off), PLAN))
        self.assertUnchanged(add_checksums, lower(gathers(replace(W, group_size=1)), PLAN))
        a, b = unit("u#1", {"a": (4, 2), "b": (6,)})
        mixed = gathers(replace(a, is_checked=True), b)
        self.assertUnchanged(add_checksums, bucket_all_gather(lower(mixed, PLAN), PLAN))

    def test_two_flat_buffers(self):
        """A bucket of two units: each buffer with its number of parameters."""
        hand = Hand()
        flats = [hand.input(f"flat{n}", 7) for n in range(2)]
        found = []
        for n, flat in enumerate(flats):
            specs = unit(f"u{n}#{n}", {"a": (4, 2), "b": (6,)}, is_checked=True)
            found += [hand.compute(hand.unshard(flat, spec)) for spec in specs]
        gm = bucket_all_gather(lower(hand.returns(*found), PLAN), Plan())
        (compare,) = find(add_checksums(gm, PLAN).graph, COMPARE)
        self.assertEqual([flat.name for flat in compare.args[3]], ["flat0", "flat1"])
        self.assertEqual(compare.args[4], [2, 2])
        self.assertEqual(compare.args[7], ["u0#0:a", "u0#0:b", "u1#1:a", "u1#1:b"])

    def test_slices(self):
        """What forward has kept of a parameter is no flat buffer: it is summed up on the way alone;
        in a whole step too.
        """
        for reshard in ("slice", AGAIN):
            spec = replace(W, reshard=reshard, post_size=2, post_group="half")
            hand = Hand()
            full = hand.compute(hand.unshard_slice(hand.input("kept", 4), spec))
            gm = add_checksums(lower(hand.returns(full), PLAN), PLAN)
            (compare,) = find(gm.graph, COMPARE)
            self.assertEqual(compare.args[2:6], ([], [], [], "all-gather"))

    def test_a_whole_step(self):
        """Its gathers for backward, and all reductions, are said to be backward's."""
        hand = Hand()
        flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
        read = [hand.compute(hand.unshard(flat, replace(W, reshard=r))) for r in ("gather", AGAIN)]
        hand(UPDATE, hand.reduce_grad(d, flat, W), flat, [0], "step0")
        gm = add_checksums(lower(hand.returns(*read), PLAN), PLAN)
        said = [compare.args[5:7] for compare in find(gm.graph, COMPARE)]
        self.assertEqual(
            said,
            [("all-gather", "forward"), ("all-gather", "backward"), ("all-to-all", "backward")],
        )
