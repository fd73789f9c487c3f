"""`free`: every gathered or received buffer ends at its last use, views included."""

from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.free import free
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, getitem, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.passes import free as module

(W,) = unit("u", {"w": (4, 2)})


def after(gm: GraphModule) -> str:
    """The op after which the only buffer is freed."""
    names = ops(free(gm, PLAN).graph)
    assert names.count("free") == 1
    return names[names.index("free") - 1]


class TestFree(GraphTest):
    def test_docstring(self):
        hand = Hand()
        x, flat = hand.input("x", 3, 4), hand.input("flat", 4)
        gm = lower(hand.returns(hand(aten.mm.default, x, hand.unshard(flat, W))), PLAN)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", free(gm, PLAN))

    def test_after_the_last_use(self):
        hand = Hand()
        flat, x = hand.input("flat", 4), hand.input("x", 4, 2)
        w = hand.unshard(flat, W)
        y = hand.add(hand.add(x, w), w)
        self.assertGraph(
            free(lower(hand.returns(hand.compute(y)), PLAN), PLAN),
            """\
%flat: f32[4]
%x: f32[4,2]
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
%add_tensor: f32[4,2] = add(%x, %view_default)
%add_tensor_1: f32[4,2] = add(%add_tensor, %view_default)
free(%wait_tensor_default)
%neg_default: f32[4,2] = neg(%add_tensor_1)
return [%neg_default]""",
        )

    def test_a_collective_reads_until_it_is_awaited(self):
        """Tensor parallelism may gather what we have gathered."""
        hand = Hand()
        flat, x = hand.input("flat", 4), hand.input("x", 4, 2)
        started = hand(comm.ALL_GATHER, hand.unshard(flat, W), 2, "tp")
        y = hand.compute(x)
        gm = free(lower(hand.returns(y, hand(comm.WAIT, started)), PLAN), PLAN)
        self.assertEqual(
            ops(gm.graph)[-5:],
            ["view", "all_gather_into_tensor", "neg", "wait_tensor", "free"],
        )

    def test_views_count_as_use(self):
        """Whether declared, one of several, or not declared by the schema at all."""
        for first, *rest in (
            [(aten.permute.default, [1, 0])],
            [(aten.split.Tensor, 2), (getitem, 1)],
            [(aten.unbind.int,), (getitem, 0), (aten.unsqueeze.default, 0)],
            [(aten._unsafe_view.default, [8])],
        ):
            hand = Hand()
            flat = hand.input("flat", 4)
            view = hand.unshard(flat, W)
            for op, *args in (first, *rest):
                view = hand(op, view, *args)
            y = hand(aten.exp.default, hand.compute(flat))
            gm = lower(hand.returns(hand(aten.sin.default, view), y), PLAN)
            self.assertEqual(after(gm), "sin")

    def test_nobody_reads(self):
        """Freed at once."""
        hand = Hand()
        hand.unshard(hand.input("flat", 4), W)
        self.assertEqual(after(lower(hand.returns(), PLAN)), "view")

    def test_bucket_ends_with_the_last_copy_out(self):
        hand = Hand()
        flat = hand.input("flat", 5)
        specs = unit("u", {"a": (4, 2), "b": (2,)})
        gm = lower(hand.returns(*(hand.compute(hand.unshard(flat, s)) for s in specs)), PLAN)
        self.assertGraph(
            free(bucket_all_gather(gm, PLAN), PLAN),
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
free(%wait_tensor_default_2)
%view_default_5: f32[2] = view(%clone_default_1, [2])  # u: gather
%neg_default_1: f32[2] = neg(%view_default_5)
return [%neg_default, %neg_default_1]""",
        )

    def test_kept_bucket(self):
        """Backward gets the copies; the bucket itself ends in forward."""
        hand = Hand()
        flat = hand.input("flat", 5)
        specs = unit("u", {"a": (4, 2), "b": (2,)}, reshard="keep")
        gm = bucket_all_gather(
            lower(hand.returns(*(hand.unshard(flat, s) for s in specs)), PLAN), PLAN
        )
        self.assertEqual(after(gm), "clone")

    def test_received_rows(self):
        """all-to-all: freed once they are summed."""
        (spec,) = unit("u", {"w": (4, 2)}, reduce_algorithm="all_to_all")
        hand = Hand()
        gm = lower(
            hand.returns(hand.reduce_grad(hand.input("d", 4, 2), hand.input("flat", 4), spec)), PLAN
        )
        self.assertEqual(after(gm), "sum")

    def test_near_miss_returned(self):
        """Kept for backward, or wanted by the user; by itself or through a view."""
        for op in (aten.permute.default, aten.split.Tensor):
            hand = Hand()
            w = hand.unshard(hand.input("flat", 4), W)
            view = (
                hand(op, w, [1, 0])
                if op is aten.permute.default
                else hand(getitem, hand(op, w, 2), 0)
            )
            self.assertUnchanged(free, lower(hand.returns(view), PLAN))

    def test_near_miss_gradient(self):
        """What a reduce-scatter or an all-reduce leaves becomes the gradient."""
        for changes in (
            {"post_divide": 1.0},
            {"replicate_size": 2, "replicate_group": "r", "post_divide": 4.0},
        ):
            (spec,) = unit("u", {"w": (4, 2)}, **changes)
            hand = Hand()
            gm = lower(
                hand.returns(hand.reduce_grad(hand.input("d", 4, 2), hand.input("flat", 4), spec)),
                PLAN,
            )
            self.assertUnchanged(free, gm)

    def test_near_miss_one_rank(self):
        """There is no buffer, only the parameters themselves."""
        (spec,) = unit("u", {"w": (4, 2)}, world=1)
        hand = Hand()
        gm = lower(hand.returns(hand.compute(hand.unshard(hand.input("flat", 8), spec))), PLAN)
        self.assertUnchanged(free, gm)
