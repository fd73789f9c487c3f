"""`reshard`: what backward gets from forward is said in tags that the partitioner obeys."""

from dataclasses import replace

import torch
from compiled_fsdp.passes.reshard import reshard
from kit.passes_harness import PLAN, GraphTest, Hand, aten, getitem, unit
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from compiled_fsdp.ir.printer import show
from compiled_fsdp.ir.spec import ParamSpec
from compiled_fsdp.passes import reshard as module

(GATHER,) = unit("u", {"w": (4, 4)}, world=4)
(KEEP,) = unit("u", {"w": (4, 4)}, world=4, reshard="keep")
(SLICE,) = unit("u", {"w": (4, 4)}, world=4, reshard="slice", post_size=2, post_group="post")


def linear(spec: ParamSpec, is_returned: bool = False) -> GraphModule:
    """The joint graph of `mm(x, w.t())`."""
    hand = Hand()
    x, flat, dy = hand.input("x", 4, 4), hand.input("flat", 4), hand.input("tangents_1", 4, 4)
    w = hand.unshard(flat, spec)
    t = hand(aten.permute.default, w, [1, 0])
    y = hand(aten.mm.default, x, t)
    u = hand(aten.permute.default, t, [1, 0])
    dx = hand(aten.mm.default, dy, u)
    return hand.returns(y, *([t] if is_returned else []), dx)


def looked_up(table: int, is_random: bool = False) -> GraphModule:
    """The joint graph of `mm(x, (table[codes] * scales).t())`, codes and scales gathered."""
    hand = Hand()
    x, dy = hand.input("x", 4, 4), hand.input("tangents_1", 4, 4)
    values = hand.input("table", table)
    gathered = []
    for i, (shape, dtype) in enumerate((((4, 4), torch.uint8), ((4, 1), torch.float32))):
        spec = replace(GATHER, shape=shape, dtype=dtype, fqn=f"w:{i}", is_extended=True)
        flat = hand.input(f"part{i}", spec.shard_numel, dtype=dtype)
        gathered.append(hand.unshard(flat, spec))
    codes = hand(aten._to_copy.default, gathered[0], dtype=torch.int64)
    w = hand(aten.mul.Tensor, hand(aten.index.Tensor, values, [codes]), gathered[1])
    w = hand(aten.bernoulli.default, w) if is_random else w
    t = hand(aten.permute.default, w, [1, 0])
    y = hand(aten.mm.default, x, t)
    return hand.returns(y, hand(aten.mm.default, dy, hand(aten.permute.default, t, [1, 0])))


def find_targets(gm: GraphModule, target: object) -> list[Node]:
    """The nodes that call this."""
    return [node for node in gm.graph.nodes if node.target is target]


def tags(gm: GraphModule) -> str:
    """Names of the nodes to recompute, to save, and to keep out of forward."""
    kinds = (
        ("recompute", "recompute", CheckpointPolicy.MUST_RECOMPUTE),
        ("save", "recompute", CheckpointPolicy.MUST_SAVE),
        ("backward only", "partitioner_tag", "must_be_in_backward"),
    )
    found = (
        (kind, [n.name for n in gm.graph.nodes if n.meta.get(key) == value])
        for kind, key, value in kinds
    )
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in found if names)


class TestReshard(GraphTest):
    def test_docstring(self):
        gm = linear(SLICE)
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", reshard(gm, PLAN))

    def test_gather(self):
        """No node changes; the gather and the views of it are recomputed."""
        gm = linear(GATHER)
        self.assertUnchanged(reshard, gm)
        self.assertExpectedInline(
            tags(gm),
            """recompute: unshard_default, permute_default, permute_default_1""",
        )

    def test_extension(self):
        """Codes are looked up in a small table: all of that is computed again, up to the matmul."""
        self.assertExpectedInline(
            tags(reshard(looked_up(table=16), PLAN)),
            """\
recompute: unshard_default, unshard_default_1, _to_copy_default, index_tensor, mul_tensor, permute_default, permute_default_1""",
        )

    def test_near_miss_extension(self):
        """A large input is an activation; so is what is random."""
        self.assertExpectedInline(
            tags(reshard(looked_up(table=2048), PLAN)),
            """recompute: unshard_default, unshard_default_1, _to_copy_default""",
        )
        self.assertExpectedInline(
            tags(reshard(looked_up(table=16, is_random=True), PLAN)),
            """recompute: unshard_default, unshard_default_1, _to_copy_default, index_tensor, mul_tensor""",
        )

    def test_no_room_for_a_slice(self):
        gm = reshard(linear(SLICE), replace(PLAN, dropped=(("u", "w"),)))
        self.assertEqual(tags(gm), tags(reshard(linear(GATHER), PLAN)))

    def test_keep(self):
        gm = linear(KEEP)
        self.assertUnchanged(reshard, gm)
        self.assertExpectedInline(tags(gm), """save: unshard_default""")

    def test_slice(self):
        gm = reshard(linear(SLICE), PLAN)
        self.assertGraph(
            gm,
            """\
%x: f32[4,4]
%flat: f32[4]
%tangents_1: f32[4,4]
%unshard_default: f32[4,4] = unshard(%flat, 'w', reshard=slice)
%keep_slice_default: f32[8] = keep_slice(%unshard_default, 'w', reshard=slice)
%permute_default: f32[4,4] = permute(%unshard_default, [1, 0])
%mm_default: f32[4,4] = mm(%x, %permute_default)
%permute_default_1: f32[4,4] = permute(%permute_default, [1, 0])
%unshard_slice_default: f32[4,4] = unshard_slice(%keep_slice_default, 'w', reshard=slice)
%permute_default_2: f32[4,4] = permute(%unshard_slice_default, [1, 0])
%permute_default_3: f32[4,4] = permute(%permute_default_2, [1, 0])
%mm_default_1: f32[4,4] = mm(%tangents_1, %permute_default_3)
return [%mm_default, %mm_default_1]""",
        )
        self.assertExpectedInline(
            tags(gm),
            """\
recompute: unshard_slice_default, permute_default_2, permute_default_3
save: keep_slice_default, mm_default
backward only: unshard_slice_default, permute_default_2, permute_default_3""",
        )

    def test_a_slice_that_a_checkpoint_would_not_read(self):
        """The matmul is computed again in backward, of what forward reads."""
        found = []
        for spec in (SLICE, GATHER):
            gm = linear(spec)
            (reader, _) = find_targets(gm, aten.mm.default)
            reader.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            found.append(reshard(gm, PLAN))
        self.assertEqual(tags(found[0]), tags(found[1]))
        self.assertEqual(show(found[0].graph), show(found[1].graph))

    def test_slice_leaves_what_the_user_returns(self):
        """The output is no part of backward, though it stands behind it."""
        gm = reshard(linear(SLICE, is_returned=True), PLAN)
        returned = gm.graph.output_node().args[0]
        self.assertEqual(
            [n.name for n in returned], ["mm_default", "permute_default", "mm_default_1"]
        )

    def test_slice_that_backward_does_not_read(self):
        hand = Hand()
        flat, dy = hand.input("flat", 4), hand.input("tangents_1", 4, 4)
        gm = hand.returns(hand.compute(hand.unshard(flat, SLICE)), hand.compute(dy))
        self.assertUnchanged(reshard, gm)

    def chain(self, *build: object) -> str:
        """Tags of a graph in which backward reads the last of a chain of ops on a gathered
        weight.
        """
        hand = Hand()
        flat, dy = hand.input("flat", 4), hand.input("tangents_1", 4, 4)
        node: Node = hand.unshard(flat, GATHER)
        for op, *args in build:
            node = hand(op, node, *args)
        return tags(reshard(hand.returns(node, hand.add(dy, node)), PLAN))

    def test_what_is_cheap(self):
        """Views, one of several views, casts, pointwise, concatenation: saving any keeps as many
        bytes alive.
        """
        found = self.chain(
            (aten.split.Tensor, 4),
            (getitem, 0),
            (aten._unsafe_view.default, [4, 4]),
            (torch.ops.prims.convert_element_type.default, torch.bfloat16),
            (aten.mul.Tensor, 2),
        )
        self.assertExpectedInline(
            found,
            """recompute: unshard_default, split_tensor, getitem, _unsafe_view_default, convert_element_type_default, mul_tensor""",
        )

    def test_cat_of_two_weights(self):
        a, b = unit("u", {"a": (4, 4), "b": (4, 4)}, world=4)
        hand = Hand()
        flat, dy = hand.input("flat", 8), hand.input("tangents_1", 8, 4)
        both = hand(aten.cat.default, [hand.unshard(flat, a), hand.unshard(flat, b)])
        found = tags(reshard(hand.returns(both, hand.add(dy, both)), PLAN))
        self.assertExpectedInline(
            found, """recompute: unshard_default, unshard_default_1, cat_default"""
        )

    def test_slices_of_fused_weights(self):
        """Backward reads a value made of two weights: both are kept as slices, and joined again
        from the second gathers.
        """
        a, b = (
            replace(s, reshard="slice", post_size=2, post_group="post")
            for s in unit("u", {"a": (4, 4), "b": (4, 4)}, world=4)
        )
        hand = Hand()
        flat, dy = hand.input("flat", 8), hand.input("tangents_1", 8, 4)
        both = hand(aten.cat.default, [hand.unshard(flat, a), hand.unshard(flat, b)])
        self.assertGraph(
            reshard(hand.returns(both, hand.add(dy, both)), PLAN),
            """\
%flat: f32[8]
%tangents_1: f32[8,4]
%unshard_default: f32[4,4] = unshard(%flat, 'a', reshard=slice)
%keep_slice_default: f32[8] = keep_slice(%unshard_default, 'a', reshard=slice)
%unshard_default_1: f32[4,4] = unshard(%flat, 'b', reshard=slice)
%keep_slice_default_1: f32[8] = keep_slice(%unshard_default_1, 'b', reshard=slice)
%cat_default: f32[8,4] = cat([%unshard_default, %unshard_default_1])
%unshard_slice_default: f32[4,4] = unshard_slice(%keep_slice_default, 'a', reshard=slice)
%unshard_slice_default_1: f32[4,4] = unshard_slice(%keep_slice_default_1, 'b', reshard=slice)
%cat_default_1: f32[8,4] = cat([%unshard_slice_default, %unshard_slice_default_1])
%add_tensor: f32[8,4] = add(%tangents_1, %cat_default_1)
return [%cat_default, %add_tensor]""",
        )

    def test_near_miss_not_cheap(self):
        """A product of weights is worth saving, or not: the partitioner's business."""
        found = self.chain((aten.sum.dim_IntList, [0]), (aten.neg.default,))
        self.assertEqual(found, "recompute: unshard_default")

    def test_near_miss_not_of_weights_alone(self):
        hand = Hand()
        x, flat, dy = hand.input("x", 4, 4), hand.input("flat", 4), hand.input("tangents_1", 4, 4)
        y = hand.add(hand.unshard(flat, GATHER), x)
        self.assertEqual(
            tags(reshard(hand.returns(y, hand.add(dy, y)), PLAN)), "recompute: unshard_default"
        )

    def test_near_miss_inference(self):
        hand = Hand()
        flat = hand.input("flat", 4)
        gm = hand.returns(hand.compute(hand.unshard(flat, SLICE)), hand.unshard(flat, KEEP))
        self.assertUnchanged(reshard, gm)
        self.assertEqual(tags(gm), "")

    def test_idempotent(self):
        for spec in (GATHER, KEEP, SLICE):
            gm = reshard(linear(spec), PLAN)
            once, tagged = show(gm.graph), tags(gm)
            self.assertEqual(show(reshard(gm, PLAN).graph), once)
            self.assertEqual(tags(gm), tagged)
