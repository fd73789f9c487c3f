"""`call_copies`: copies into buckets and out of what units reduced together are calls; what a
generated kernel would write in place, or reads, stays its own.
"""

from dataclasses import replace

import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.call_copies import call_copies
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, numel, unit
from torch.fx import GraphModule, Node

from compiled_fsdp.ir.meta import is_called
from compiled_fsdp.passes import call_copies as module

SHARED = replace(PLAN, bucket_bytes=1 << 20)


def reduced(names: str = "01", *, is_generated: bool = False, **changes: object) -> GraphModule:
    """A unit for each name, of one parameter, and the gradients of all in one bucket."""
    hand = Hand()
    totals = []
    for name in names:
        (spec,) = unit(name, {"w": (32, 4)}, **changes)
        flat, grad = hand.input(f"flat{name}", numel([spec])), hand.input(f"d{name}", 32, 4)
        grad = hand.compute(grad) if is_generated else grad
        totals.append(hand.reduce_grad(grad, flat, spec))
    return bucket_reduce_scatter(lower(hand.returns(*totals), PLAN), SHARED)


def called(gm: GraphModule) -> list[str]:
    """The names of the nodes that are marked."""
    return [node.name for node in call_copies(gm, PLAN).graph.nodes if is_called(node)]


class TestCallCopies(GraphTest):
    def test_docstring(self):
        gm = reduced()
        self.assertDocumented(module, "Before", gm)
        self.assertUnchanged(call_copies, gm)
        marked = [node.target for node in gm.graph.nodes if is_called(node)]
        self.assertEqual(marked, [aten.cat.default, aten.div.Tensor, aten.div.Tensor])

    def test_gathers(self):
        """What joins two flat buffers; not the casts of both to the dtype that travels."""
        for dtype, marked in ((torch.float32, ["cat_default"]), (torch.bfloat16, [])):
            hand = Hand()
            full: list[Node] = []
            for name in "uv":
                (spec,) = unit(name, {"w": (4, 2)}, dtype=dtype)
                full.append(hand.unshard(hand.input(f"flat_{name}", 4), spec))
            self.assertEqual(
                called(bucket_all_gather(lower(hand.returns(*full), PLAN), SHARED)), marked
            )

    def test_one_unit(self):
        """A gradient that is neither joined nor cut."""
        self.assertEqual(called(reduced("0")), ["div_tensor"])

    def test_sums_that_nothing_divides(self):
        marked = called(reduced(post_divide=1.0))
        self.assertEqual(marked, ["cat_default", "clone_default", "clone_default_1"])

    def test_what_is_generated(self):
        """A kernel that computes gradients writes them into the bucket; a small one among others is
        copied; what is cast is read by a kernel, and so is what is cast behind the reduction.
        """
        self.assertEqual(called(reduced(is_generated=True))[:1], ["div_tensor_2"])
        hand = Hand()
        specs = unit("u", {"w": (32, 4), "b": (2,)})
        flat, grads = hand.input("flat", numel(specs)), [hand.input("dw", 32, 4)]
        grads.append(hand.compute(hand.input("db", 2)))
        terms = [hand.reduce_grad(g, flat, s) for g, s in zip(grads, specs, strict=True)]
        gm = bucket_reduce_scatter(lower(hand.returns(hand.add(*terms)), PLAN), PLAN)
        self.assertEqual(called(gm), ["cat_default", "div_tensor_2"])
        self.assertEqual(called(reduced(reduce_dtype=torch.bfloat16)), [])

    def test_near_miss(self):
        """What the user joins and divides."""
        hand = Hand()
        joined = hand(aten.cat.default, [hand.input("a", 4), hand.input("b", 4)])
        gm = hand.returns(hand(aten.div.Tensor, hand(aten.slice.Tensor, joined, 0, 0, 4), 2.0))
        self.assertEqual(called(gm), [])
