"""`verify`: for every invariant a graph that breaks it, with what is said about it; and graphs that keep them all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from compiled_fsdp.passes.base import run_pipeline
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.verify import INVARIANTS, verify
from passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SavedForBackwardsAOTOutput

from compiled_fsdp.collectives import ALL_GATHER, WAIT
from compiled_fsdp.errors import GraphInvariantError
from compiled_fsdp.graph import Builder, find
from compiled_fsdp.meta import CommTag
from compiled_fsdp.plan import Plan
from compiled_fsdp.schema import FREE, MARK_GRADS

if TYPE_CHECKING:
    from torch.fx import GraphModule

(W,) = unit("u", {"w": (4, 2)})


def half(num_units: int = 3) -> GraphModule:
    """Gather, compute and reduce units of two parameters."""
    hand = Hand()
    x = hand.input("x", 4)
    flats = [hand.input(f"flat{i}", 4) for i in range(num_units)]
    results = []
    for i, flat in enumerate(flats):
        a, b = unit(f"u{i}", {"a": (4,), "b": (4,)})
        x = hand.add(hand.add(x, hand.unshard(flat, a)), hand.unshard(flat, b))
        results.append(hand.add(hand.reduce_grad(x, flat, b), hand.reduce_grad(hand.compute(x), flat, a)))
    return hand.returns(x, *results)


class TestVerify(GraphTest):
    def assertBroken(self, gm: GraphModule, expected: str, plan: Plan = PLAN) -> None:
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, plan)
        self.assertExpectedInline(str(caught.exception), expected, skip=1)

    def test_good_graphs(self):
        """What the pipeline makes, whatever the plan."""
        for prefetch in range(3):
            for count in range(3):
                plan = Plan(prefetch=prefetch, reduces_in_flight=count)
                gm = run_pipeline(half(), plan, HALF)
                self.assertUnchanged(verify, gm, plan)

    def test_lowered(self):
        hand = Hand()
        gm = hand.returns(hand.compute(hand.unshard(hand.input("flat", 4), W)))
        self.assertBroken(
            gm,
            """\
after the pipeline: %unshard_default is still an fsdp op.
Invariant: Every fsdp op that communicates has been lowered to collectives.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %unshard_default: f32[4,2] = unshard(%flat, 'w', reshard=gather)
   %neg_default: f32[4,2] = neg(%unshard_default)
   return [%neg_default]""",
        )

    def test_waited_once(self):
        hand = Hand()
        start = hand(ALL_GATHER, hand.input("flat", 4), 2, "shard")
        self.assertBroken(
            hand.returns(hand(WAIT, start), hand.compute(start)),
            """\
after the pipeline: %all_gather_into_tensor_default is read by ['%wait_tensor_default', '%neg_default'].
Invariant: Every collective is awaited exactly once, or its wait is left to the unit, and nothing else reads its result.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)
   %neg_default: f32[8] = neg(%all_gather_into_tensor_default)
   return [%wait_tensor_default, %neg_default]""",
        )

    def test_never_waited(self):
        hand = Hand()
        hand(ALL_GATHER, hand.input("flat", 4), 2, "shard")
        self.assertBroken(
            hand.returns(),
            """\
after the pipeline: %all_gather_into_tensor_default is read by [].
Invariant: Every collective is awaited exactly once, or its wait is left to the unit, and nothing else reads its result.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')
   return []""",
        )

    def test_gathered_once(self):
        hand = Hand()
        flat = hand.input("flat", 4)
        twice = [hand.compute(hand.unshard(flat, W)) for _ in range(2)]
        self.assertBroken(
            lower(hand.returns(*twice), PLAN),
            """\
after the pipeline: w is gathered here and at %all_gather_into_tensor_default.
Invariant: Every parameter is gathered at most once over a group in a graph.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
   %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
   %neg_default: f32[4,2] = neg(%view_default)
-> %all_gather_into_tensor_default_1: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default_1: f32[8] = wait_tensor(%all_gather_into_tensor_default_1)  # u: gather
   %view_default_1: f32[4,2] = view(%wait_tensor_default_1, [4, 2])  # u: gather
   %neg_default_1: f32[4,2] = neg(%view_default_1)
   return [%neg_default, %neg_default_1]""",
        )

    def test_gathered_once_in_buckets_of_two_flat_buffers(self):
        """Frozen and trainable parameters in one bucket, and one of them once more by itself."""
        hand = Hand()
        trained, frozen = hand.input("trained", 4), hand.input("frozen", 4)
        bucket = Builder(hand.end, hand.end, CommTag("gather", 0, (W, replace(W, fqn="v"))))
        hand.compute(bucket(WAIT, bucket(ALL_GATHER, bucket(aten.cat.default, [trained, frozen]), 2, "shard")))
        again = Builder(hand.end, hand.end, CommTag("gather", 1, (W,)))
        hand.compute(again(WAIT, again(ALL_GATHER, trained, 2, "shard")))
        self.assertBroken(
            hand.returns(),
            """\
after the pipeline: w is gathered here and at %cat_default.
Invariant: Every parameter is gathered at most once over a group in a graph.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %trained: f32[4]
   %frozen: f32[4]
   %cat_default: f32[8] = cat([%trained, %frozen])  # u: gather
   %all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%cat_default, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %neg_default: f32[16] = neg(%wait_tensor_default)
-> %all_gather_into_tensor_default_1: f32[8] = all_gather_into_tensor(%trained, 2, 'shard')  # u: gather
   %wait_tensor_default_1: f32[8] = wait_tensor(%all_gather_into_tensor_default_1)  # u: gather
   %neg_default_1: f32[8] = neg(%wait_tensor_default_1)
   return []""",
        )

    def test_uniform_buckets(self):
        hand = Hand()
        run = Builder(hand.end, hand.end, CommTag("gather", 0, (W, replace(W, offset=4, dtype=torch.bfloat16))))
        self.assertBroken(
            hand.returns(hand.compute(run(WAIT, run(ALL_GATHER, hand.input("flat", 4), 2, "shard")))),
            """\
after the pipeline: members of the bucket of u differ: ["('shard', torch.bfloat16, None)", "('shard', torch.float32, None)"].
Invariant: All members of a bucket have the same group, dtype and way of reducing.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %neg_default: f32[8] = neg(%wait_tensor_default)
   return [%neg_default]""",
        )

    def test_no_use_after_free(self):
        hand = Hand()
        buffer = hand(WAIT, hand(ALL_GATHER, hand.input("flat", 4), 2, "shard"))
        view = hand(aten.view.default, buffer, [4, 2])
        hand(FREE, buffer)
        self.assertBroken(
            hand.returns(hand.compute(view)),
            """\
after the pipeline: %neg_default reads %view_default after it is freed.
Invariant: No gathered buffer, nor a view of it, is read after its free.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
   %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)
   %view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])
   free(%wait_tensor_default)
-> %neg_default: f32[4,2] = neg(%view_default)
   return [%neg_default]""",
        )

    def test_nothing_gathered_saved(self):
        hand = Hand()
        w = hand.unshard(hand.input("flat", 4), W)
        gm = lower(hand.returns(hand.compute(w), hand(aten.permute.default, w, [1, 0])), PLAN)
        self.assertBroken(
            gm,
            """\
after the pipeline: %permute_default is saved for backward and shares storage with the gathered ['w'].
Invariant: No graph saves storage of a parameter that is to be dropped after forward; what the user returns is the user's.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
   %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
   %neg_default: f32[4,2] = neg(%view_default)
-> %permute_default: f32[2,4] = permute(%view_default, [1, 0])
   return [%neg_default, %permute_default]""",
        )

    def test_kept_parameters_may_be_saved(self):
        hand = Hand()
        gm = lower(hand.returns(hand.unshard(hand.input("flat", 4), replace(W, reshard="keep"))), PLAN)
        self.assertUnchanged(verify, gm)

    def test_user_may_return_a_parameter(self):
        """The same two outputs, once both for the user, once one of them for backward."""
        hand = Hand()
        w = hand.unshard(hand.input("flat", 4), W)
        gm = lower(hand.returns(hand.compute(w), hand(aten.permute.default, w, [1, 0])), PLAN)
        hand.end.meta["desc"] = [PlainAOTOutput(0), PlainAOTOutput(1)]
        self.assertUnchanged(verify, gm)
        hand.end.meta["desc"] = [PlainAOTOutput(0), SavedForBackwardsAOTOutput(0)]
        with self.assertRaises(GraphInvariantError):
            verify(gm, PLAN)

    def test_gradients_marked(self):
        gm = lower(half(1), PLAN)
        (mark,) = find(gm.graph, MARK_GRADS)
        mark.args = (*mark.args[:2], [0])
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, PLAN)
        self.assertExpectedInline(
            str(caught.exception).split("\n")[0],
            """after the pipeline: offsets reduced {2: 1, 0: 1} are not the offsets marked {0: 1}.""",
        )

    def test_bounded_in_flight(self):
        plan = Plan(reduces_in_flight=2)
        gm = run_pipeline(half(), plan, HALF)
        verify(gm, plan)
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, Plan(reduces_in_flight=1))
        self.assertExpectedInline(
            str(caught.exception).split("\n")[0],
            """after the pipeline: %reduce_scatter_tensor_default_7 is the 2th reduction under way; the plan allows 1.""",
        )

    def test_every_invariant_is_tested_and_in_the_readme(self):
        names = [invariant.__name__ for invariant in INVARIANTS]
        untested = [n for n in names if not hasattr(self, f"test_{n}")]
        self.assertEqual(untested, [])
        readme = (Path(__file__).parent.parent / "passes" / "README.md").read_text()
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", readme, re.MULTILINE)
        self.assertEqual(rows, [(i.__name__, (i.__doc__ or "").strip()) for i in INVARIANTS])
