"""`verify`: for every invariant a graph that breaks it, with what is said about it; and graphs that
keep them all.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from compiled_fsdp.passes.add_checksums import add_checksums
from compiled_fsdp.passes.await_verdict import await_verdict
from compiled_fsdp.passes.base import Pass, Property, Stage, run_pipeline
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.gather_ahead import gather_ahead
from compiled_fsdp.passes.gather_next import gather_next
from compiled_fsdp.passes.invariants.gradients import gathered_after_update, judged_first
from compiled_fsdp.passes.invariants.offloads import within_host_budget
from compiled_fsdp.passes.invariants.states import fetched_once, stored_once
from compiled_fsdp.passes.leave_in_flight import leave_in_flight
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.step_in_backward import step_in_backward
from compiled_fsdp.passes.verify import INVARIANTS, check, verify
from kit.passes_harness import PLAN, GraphTest, Hand, aten, unit
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, SavedForBackwardsAOTOutput

from compiled_fsdp.compiler.matrices import updated_whole
from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from compiled_fsdp.ir.graph import Builder, find, join_batches, output
from compiled_fsdp.ir.matrices import Matrix
from compiled_fsdp.ir.meta import CommTag, compute_again, get_tag, set_heads, set_tag
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import (
    ADD_RETAINED,
    AGREE,
    COMPARE,
    FETCH_STATE,
    FREE,
    FROM_OWNERS,
    GATHER_NEXT,
    MARK_GRADS,
    MOMENTUM,
    OFFLOAD,
    ORTHOGONALIZE,
    REDUCE_LATER,
    RELOAD,
    START_COPY,
    STORE_STATE,
    TO_OWNERS,
    UPDATE,
    UPDATE_MATRICES,
    VERDICT,
    WATCH_HEADS,
)
from compiled_fsdp.ir.spec import AGAIN, IN_BACKWARD, NEXT
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.invariant import GraphInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, GraphModule, Node

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
        results.append(
            hand.add(hand.reduce_grad(x, flat, b), hand.reduce_grad(hand.compute(x), flat, a))
        )
    return hand.returns(x, *results)


def ours(hand: Hand, is_awaited: bool = True) -> list[Node]:
    """The start of a gather, and its wait."""
    add = Builder(hand.end, hand.end, CommTag("gather", 0, (W,)))
    add(ALL_GATHER, hand.input("flat", 4), 2, "shard")
    if is_awaited:
        add(WAIT, add.nodes[0])
    return add.nodes


def _input(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


BEFORE = tuple(itertools.takewhile(lambda entry: entry.name != "verify", HALF))
LATE = HALF[len(BEFORE) :]


def change(op: Any, place: int, value: Any) -> Callable[[GraphModule], None]:
    def do(gm: GraphModule) -> None:
        (node,) = find(gm.graph, op)
        node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return do


def erase(op: Any) -> Callable[[GraphModule], None]:
    def do(gm: GraphModule) -> None:
        (node,) = find(gm.graph, op)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return do


def unawaited(gm: GraphModule) -> None:
    (start,) = find(gm.graph, TO_OWNERS)
    (wait,) = start.users
    wait.replace_all_uses_with(start)
    gm.graph.erase_node(wait)


def other_buffer(gm: GraphModule) -> None:
    x = next(node for node in gm.graph.nodes if node.name == "x")
    change(UPDATE_MATRICES, 1, x)(gm)


def without_matrices(gm: GraphModule) -> None:
    for op in (UPDATE_MATRICES, FROM_OWNERS, ORTHOGONALIZE, TO_OWNERS, MOMENTUM):
        for node in find(gm.graph, op):
            for wait in list(node.users):
                gm.graph.erase_node(wait)
            gm.graph.erase_node(node)


HOSTED = Plan(memory_budget=1.0, offload="budget", host_budget=64)


def there_and_back(case: str = "") -> GraphModule:
    """A value [4, 4] that goes to the host and comes back, with something wrong in this case."""
    hand = Hand()
    x, y = hand.input("x", 4, 4), hand.input("y", 4, 4)
    a = hand(aten.mm.default, x, y)
    start = hand(OFFLOAD, a, False)
    if case == "copied twice":
        hand(WAIT, hand(OFFLOAD, a, False))
    hand.compute(a)
    if case == "written":
        hand(aten.copy_.default, a, y)
    moved = hand(WAIT, start)
    if case == "read late":
        hand.compute(a)
    source = {"never there": y, "not awaited there": start}.get(case, moved)
    other = hand(WAIT, hand(OFFLOAD, y, False)) if case == "beside each other" else None
    if case == "left there":
        return hand.returns(y)
    back = hand(RELOAD, source, "cpu")
    found = [hand.compute(hand(WAIT, back))]
    if case == "after each other":
        other = hand(WAIT, hand(OFFLOAD, y, False))
    if other is not None:
        found.append(hand(WAIT, hand(RELOAD, other, "cpu")))
    if case in ("back twice", "never there"):
        found.append(hand(WAIT, hand(RELOAD, moved, "cpu")))
    if case in ("read there", "not awaited"):
        found.append(hand.compute(moved if case == "read there" else back))
    return hand.returns(*found, *([a] if case == "saved" else []))


def remembered(case: str = "") -> GraphModule:
    """An update with its state from the host, with something wrong in this case."""
    hand = Hand()
    flat, grad, other = (hand.input(name, 2) for name in ("flat", "grad", "other"))
    whose: tuple[Any, ...] = (flat, [0], "step0")
    fetch = hand(FETCH_STATE, other if case == "of others" else flat, *whose[1:], 4)
    if case == "fetched twice":
        hand(WAIT, hand(FETCH_STATE, *whose, 4))
    state = hand(WAIT, fetch)
    if case == "stored early":
        hand(WAIT, hand(STORE_STATE, state, *whose))
    numel = 8 if case == "another size" else 4
    given = {"not fetched": None, "not awaited": fetch, "something else": hand.compute(other)}
    given_state = given.get(case, state)
    hand(UPDATE, grad, *whose, None, numel, True, given_state)
    if case == "read":
        hand.compute(state)
    if case not in ("left there", "stored early"):
        store = hand(STORE_STATE, state, other if case == "elsewhere" else flat, *whose[1:])
        if case != "never there":
            hand(WAIT, store)
    if case == "stored twice":
        hand(WAIT, hand(STORE_STATE, state, *whose))
    if case == "something stored":
        hand(WAIT, hand(STORE_STATE, other, *whose))
    return hand.returns()


class TestVerify(GraphTest):
    def assertBroken(self, gm: GraphModule, expected: str, plan: Plan = PLAN) -> None:
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, plan)
        self.assertExpectedInline(str(caught.exception), expected, skip=1)

    def test_good_graphs(self):
        """What the pipeline makes, whatever the plan."""
        for prefetch in range(3):
            for count in range(3):
                plan = Plan(prefetch=prefetch, reduces_in_flight=count, bucket_bytes=0)
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
        start, wait = ours(hand)
        self.assertBroken(
            hand.returns(wait, hand.compute(start)),
            """\
after the pipeline: %all_gather_into_tensor_default is read by ['%wait_tensor_default', '%neg_default'].
Invariant: Every collective is awaited exactly once, or its wait is left to the unit, and nothing else reads its result.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %neg_default: f32[8] = neg(%all_gather_into_tensor_default)
   return [%wait_tensor_default, %neg_default]""",
        )

    def test_copied_once(self):
        """A shard that is read while it is on its way to the device."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4, 2)}, device="cuda")
        add = Builder(hand.end, hand.end, CommTag("copy", 0, (spec,)))
        start = add(START_COPY, hand.input("flat", 4), "cuda", False)
        add(WAIT, start)
        self.assertBroken(
            hand.returns(hand.compute(start)),
            """\
after the pipeline: %start_copy_default is read by ['%wait_tensor_default', '%neg_default'].
Invariant: Every copy to or from the host is awaited exactly once, and nothing else reads its result.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %start_copy_default: f32[4] = start_copy(%flat, 'cuda', False)  # u: copy
   %wait_tensor_default: f32[4] = wait_tensor(%start_copy_default)  # u: copy
   %neg_default: f32[4] = neg(%start_copy_default)
   return [%neg_default]""",
        )

    def assertSaid(self, cases: dict[str, str]) -> None:
        """What is said of each way in which an activation's way there and back is broken."""
        verify(there_and_back(), HOSTED)
        for case, said in cases.items():
            with self.subTest(case), self.assertRaisesRegex(GraphInvariantError, said):
                verify(there_and_back(case), HOSTED)

    def test_free_where_awaited(self):
        self.assertSaid(
            {
                "copied twice": "%offload_default_1 copies %mm_default, which %offload_default has",
                "saved": "%mm_default is saved on the device too, beside %offload_default",
                "read late": "%neg_default_1 reads %mm_default behind the wait for its copy",
                "written": "%copy__default writes to %mm_default, which %offload_default copies",
            }
        )

    def test_back_once(self):
        self.assertSaid(
            {
                "back twice": r"%wait_tensor_default is read by \['%reload_default', '%reload_",
                "read there": r"%wait_tensor_default is read by \['%reload_default', '%neg_def",
                "left there": r"%wait_tensor_default is read by \[\]",
                "never there": "%reload_default copies %y, which is not on the host",
                "not awaited": r"%reload_default is read by \['%wait_tensor_default_1', '%neg_",
                "not awaited there": r"%offload_default is read by \['%wait_tensor_default', '%r",
            }
        )

    def assertStateSaid(self, rule: Any, cases: dict[str, str]) -> None:
        """What is said of each way in which the way of an optimizer's state is broken."""
        self.assertEqual(list(rule(remembered(), PLAN)), [])
        for case, said in cases.items():
            with self.subTest(case):
                found = [detail for _, detail in rule(remembered(case), PLAN)]
                self.assertRegex(" ".join(found), said)

    def test_fetched_once(self):
        self.assertStateSaid(
            fetched_once,
            {
                "fetched twice": "%fetch_state_default_1 reads on the host what %fetch_state_def",
                "of others": "%update__default reads the state of others, which %fetch_state_de",
                "another size": "%update__default remembers other elements than %fetch_state_",
                "not fetched": "%update__default is given no state, which is to rest on the host",
                "not awaited": "%update__default reads %fetch_state_default, which is no wait",
                "something else": "%update__default reads %neg_default, which is no wait for its",
            },
        )
        with self.assertRaisesRegex(GraphInvariantError, "is given no state"):
            verify(remembered("not fetched"), PLAN)

    def test_stored_once(self):
        self.assertStateSaid(
            stored_once,
            {
                "left there": r"what %update__default writes is read by \[\]",
                "never there": "what %update__default writes is read by",
                "stored twice": r"is read by \['%store_state_default', '%store_state_default_1'\]",
                "read": r"is read by \['%neg_default_1', '%store_state_default'\]",
                "elsewhere": "%store_state_default stores the state of %update__default elsewhere",
                "stored early": "%store_state_default stores what %update__default is yet to write",
                "something stored": "%store_state_default_1 stores what no update_ has written",
            },
        )
        with self.assertRaisesRegex(GraphInvariantError, r"%fetch_state_default is read by \["):
            verify(remembered("not awaited"), PLAN)

    def test_state_within_host_budget(self):
        """16 bytes that rest there."""
        plan = Plan(memory_budget=1.0, optimizer_state="budget", host_budget=16)
        self.assertEqual(list(within_host_budget(remembered(), plan)), [])
        ((_, said),) = within_host_budget(remembered(), replace(plan, host_budget=15))
        self.assertEqual(said, "16 bytes are on the host at once; host_budget=15")

    def test_within_host_budget(self):
        """64 bytes there and back; others may follow, but not beside them."""
        verify(there_and_back("after each other"), HOSTED)
        for case, budget in (("", 63), ("beside each other", 64)):
            with self.assertRaisesRegex(
                GraphInvariantError, f"bytes are on the host at once; host_budget={budget}"
            ):
                verify(there_and_back(case), replace(HOSTED, host_budget=budget))
        verify(there_and_back("beside each other"), replace(HOSTED, host_budget=128))

    def test_never_waited(self):
        hand = Hand()
        ours(hand, is_awaited=False)
        self.assertBroken(
            hand.returns(),
            """\
after the pipeline: %all_gather_into_tensor_default is read by [].
Invariant: Every collective is awaited exactly once, or its wait is left to the unit, and nothing else reads its result.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   return []""",
        )

    def test_a_wait_of_a_wait(self):
        hand = Hand()
        add = Builder(hand.end, hand.end, CommTag("gather", 0, (W,)))
        again = add(WAIT, add(WAIT, add(ALL_GATHER, hand.input("flat", 4), 2, "shard")))
        with self.assertRaisesRegex(
            GraphInvariantError, "awaits %wait_tensor_default, which is no collective"
        ):
            verify(hand.returns(again), PLAN)

    def test_the_user_may_await_his_own_as_often_as_he_likes(self):
        """What is gathered and awaited twice has two names, and is not freed at the last use of one
        of them.
        """
        hand = Hand()
        x = hand.input("x", 4)
        start = hand(ALL_GATHER, x, 2, "shard")
        once, again = hand.compute(hand(WAIT, start)), hand.compute(hand(WAIT, start))
        sent = hand(
            torch.ops._c10d_functional.all_to_all_single.default, x, [2, 2], [2, 2], "shard"
        )
        gm = hand.returns(once, again, hand.compute(hand(WAIT, hand(WAIT, sent))))
        gm = run_pipeline(gm, PLAN, HALF)
        self.assertUnchanged(verify, gm, PLAN)
        assert not find(gm.graph, FREE)

    def test_gathered_once(self):
        hand = Hand()
        flat = hand.input("flat", 4)
        twice = [hand.compute(hand.unshard(flat, W)) for _ in range(2)]
        self.assertBroken(
            lower(hand.returns(*twice), PLAN),
            """\
after the pipeline: w is gathered here and at %all_gather_into_tensor_default.
Invariant: Every parameter is gathered at most once over a group in a graph; of a whole step, once each way for each micro-batch.
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
        hand.compute(
            bucket(
                WAIT, bucket(ALL_GATHER, bucket(aten.cat.default, [trained, frozen]), 2, "shard")
            )
        )
        again = Builder(hand.end, hand.end, CommTag("gather", 1, (W,)))
        hand.compute(again(WAIT, again(ALL_GATHER, trained, 2, "shard")))
        self.assertBroken(
            hand.returns(),
            """\
after the pipeline: w is gathered here and at %cat_default.
Invariant: Every parameter is gathered at most once over a group in a graph; of a whole step, once each way for each micro-batch.
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
        run = Builder(
            hand.end,
            hand.end,
            CommTag("gather", 0, (W, replace(W, offset=4, dtype=torch.bfloat16))),
        )
        self.assertBroken(
            hand.returns(
                hand.compute(run(WAIT, run(ALL_GATHER, hand.input("flat", 4), 2, "shard")))
            ),
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
Invariant: No gathered buffer, nor a view of it, is read after its free, or by a collective that is not awaited by then.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
   %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)
   %view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])
   free(%wait_tensor_default)
-> %neg_default: f32[4,2] = neg(%view_default)
   return [%neg_default]""",
        )

    def test_added_first(self):
        (spec,) = unit("u", {"w": (4,)}, is_accumulating=True)
        hand = Hand()
        gm = lower(
            hand.returns(hand.reduce_grad(hand.input("d", 4), hand.input("flat", 2), spec)), PLAN
        )
        verify(gm, PLAN)
        (add,), (start,) = find(gm.graph, ADD_RETAINED), find(gm.graph, REDUCE_SCATTER)
        start.append(add)
        self.assertBroken(
            gm,
            """\
after the pipeline: %reduce_scatter_tensor_default reads %reshape_default_1 before what was kept is added to it.
Invariant: What a unit has kept of earlier backwards is added to gradients before anything reads them.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %d: f32[4]
   %flat: f32[2]
   %reshape_default: f32[2,2] = reshape(%d, [2, 2])  # u: reduce
   %clone_default: f32[2,2] = clone(%reshape_default, memory_format=torch.contiguous_format)  # u: reduce
   %reshape_default_1: f32[4] = reshape(%clone_default, [4])  # u: reduce
-> %reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u: reduce
   add_retained_(%clone_default, %flat, [0], 'rows')  # u: reduce
   %wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
   %div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # u: reduce
   mark_grads_(%div_tensor, %flat, [0])
   return [%div_tensor]""",
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

    def test_computed_again_alike(self):
        hand = Hand()
        x = hand.input("x", 4, 2)
        y = hand.compute(x)
        compute_again(y)
        self.assertBroken(
            hand.returns(hand(aten.permute.default, y, [1, 0])),
            """\
after the pipeline: %permute_default is saved for backward, which computes %neg_default again.
Invariant: What backward computes again for the memory budget is not saved, and is no random op, collective or write.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %x: f32[4,2]
   %neg_default: f32[4,2] = neg(%x)
-> %permute_default: f32[2,4] = permute(%neg_default, [1, 0])
   return [%permute_default]""",
        )
        hand = Hand()
        y = hand(aten.rand_like.default, hand.input("x", 4, 2))
        compute_again(y)
        with self.assertRaisesRegex(GraphInvariantError, "is computed again, and may differ"):
            verify(hand.returns(hand.compute(y)), PLAN)

    def test_kept_parameters_may_be_saved(self):
        hand = Hand()
        gm = lower(
            hand.returns(hand.unshard(hand.input("flat", 4), replace(W, reshard="keep"))), PLAN
        )
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
        plan = Plan(reduces_in_flight=2, bucket_bytes=0)
        gm = run_pipeline(half(), plan, HALF)
        verify(gm, plan)
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, Plan(reduces_in_flight=1, bucket_bytes=0))
        self.assertExpectedInline(
            str(caught.exception).split("\n")[0],
            """after the pipeline: %reduce_scatter_tensor_default_7 makes 2 reduces of together 64 bytes under way; the plan allows 1.""",
        )

    def left(self) -> GraphModule:
        """Three reductions of 16 bytes, each of a unit of its own."""
        hand = Hand()
        specs = [unit(name, {"w": (4,)}, overlap="step")[0] for name in "uvw"]
        flats = [hand.input(f"flat{i}", 2) for i in range(3)]
        x = hand.input("x", 4)
        return hand.returns(
            *(hand.reduce_grad(hand.compute(x), f, s) for f, s in zip(flats, specs, strict=True))
        )

    def test_bounded_left(self):
        with mock.patch("compiled_fsdp.passes.leave_in_flight.UNITS_IN_FLIGHT", 3):
            gm = leave_in_flight(lower(self.left(), PLAN), PLAN)
        self.assertEqual(
            self.broken_detail(gm),
            "after the pipeline: 3 reductions of together 48 bytes; at most 32.\n"
            "Invariant: What a graph leaves in flight for the unit to await is no more than twice "
            "the bytes of its largest reduction.",
        )

    def test_stepped_last(self):
        """The unit is stepped, and gathered once more."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4,)}, overlap=IN_BACKWARD)
        flat, x = hand.input("flat", 2), hand.input("x", 4)
        late = hand.compute(flat)
        gm = step_in_backward(
            lower(hand.returns(hand.reduce_grad(x, flat, spec), late), PLAN), PLAN
        )
        output(gm.graph).prepend(late)
        self.assertEqual(
            self.broken_detail(gm),
            "after the pipeline: %step__default writes %flat, which is still to be read.\n"
            "Invariant: No flat buffer is read after the optimizer has stepped it, nor by a "
            "collective that is not awaited by then.",
        )

    def step(self, scaled: tuple[int, ...] = (), taken: tuple[int, ...] = (0, 1)) -> GraphModule:
        """The graph of a whole step of two units, whose gradients of these numbers are scaled, and
        go to these buffers; lowered.
        """
        hand = Hand()
        x = hand.input("x", 4)
        flats = [hand.input(f"flat{i}", 2) for i in range(2)]
        grads = []
        for i, flat in enumerate(flats):
            (spec,) = unit(f"u{i}", {f"w{i}": (4,)})
            x = hand.add(x, hand.unshard(flat, spec))
            grads.append(hand.reduce_grad(x, flat, spec))
        factor = hand(aten.sum.default, x)
        for i in scaled:
            grads[i] = hand(aten.mul.Tensor, grads[i], factor)
        for i, to in enumerate(taken):
            hand(UPDATE, grads[i], flats[to], [0], "step0")
        return lower(hand.returns(x), PLAN)

    def test_updated_once(self):
        """No update, two of one gradient, one of another buffer, one without the factor."""
        check(self.step(), PLAN, "the pipeline")
        check(self.step(scaled=(0, 1)), PLAN, "the pipeline")
        rule = (
            "\nInvariant: In the graph of a whole step, of every flat gradient that is reduced, "
            "each parameter's part goes to exactly one update_ or momentum_, of its own buffer and "
            "parameters, with those of other micro-batches; a parameter that no unit has is an "
            "input that is updated once, with a gradient of its shape; and all are scaled by the "
            "same factors or none is."
        )
        graphs = {
            "%mark_grads__default_1 marks a gradient that no update_ takes": self.step(taken=(0,)),
            "%update__default_1 updates what is not the gradient of its buffer": self.step(
                taken=(0, 0)
            ),
            "gradients are scaled by [[sum_default], []]": self.step(scaled=(0,)),
            "%update__default_2 and %update__default take the same gradient": self.step(),
        }
        twice = next(reversed(graphs.values())).graph
        first = find(twice, UPDATE)[0]
        Builder(output(twice), first)(UPDATE, *first.args)
        for detail, gm in graphs.items():
            self.assertEqual(self.broken_detail(gm), f"after the pipeline: {detail}.{rule}")

    def test_updated_alone(self):
        """A parameter that no unit has: updated twice, with the gradient of another, without the
        factor of the others; the near miss, a gradient that is a product.
        """

        def graph(*shapes: int, updates: int = 1, scaled: tuple[int, ...] = ()) -> GraphModule:
            hand = Hand()
            x, flat, own = hand.input("x", 4), hand.input("flat", 2), hand.input("own", shapes[0])
            (spec,) = unit("u", {"w": (4,)})
            other = hand.input("other", shapes[-1])
            grads = [hand.reduce_grad(x, flat, spec), hand(aten.mul.Tensor, other, other)]
            factor = hand(aten.sum.default, x)
            for i in scaled:
                grads[i] = hand(aten.mul.Tensor, grads[i], factor)
            hand(UPDATE, grads[0], flat, [0], "step0")
            for _ in range(updates):
                hand(UPDATE, grads[1], own, [], "step0")
            return lower(hand.returns(x), PLAN)

        check(graph(3), PLAN, "the pipeline")
        check(graph(3, scaled=(0, 1)), PLAN, "the pipeline")
        for gm, detail in (
            (graph(3, 2), "%update__default_1 updates %own, which is no input of its shape"),
            (graph(3, updates=2), "%update__default_2 and %update__default_1 update %own"),
            (graph(3, scaled=(0,)), "gradients are scaled by [[sum_default], [other]]"),
        ):
            self.assertIn(f"after the pipeline: {detail}", self.broken_detail(gm))

    def test_left_out_together(self):
        """Found in both gradients and told to both updates; told to one alone;
        found in one alone.
        """
        for looked_at, num_told, detail in (
            (2, 2, ""),
            (2, 1, "%update__default_1 does not take %sum_default, as others do"),
            (1, 2, "%sum_default does not depend on %div_tensor_1, which it updates with"),
        ):
            hand, grads, flats = Hand(), [], []
            for i in range(2):
                (spec,) = unit(f"u{i}", {f"w{i}": (4,)})
                flats.append(hand.input(f"flat{i}", 2))
                grads.append(hand.reduce_grad(hand.input(f"x{i}", 4), flats[i], spec))
            found = hand(aten.sum.default, hand.add(*grads) if looked_at == 2 else grads[0])
            for i, (grad, flat) in enumerate(zip(grads, flats, strict=True)):
                scaled = hand(aten.mul.Tensor, hand(aten.mul.Tensor, grad, found), found)
                hand(UPDATE, scaled, flat, [0], "step0", *([found] if i < num_told else []))
            gm = lower(hand.returns(), PLAN)
            if not detail:
                check(gm, PLAN, "the pipeline")
                continue
            self.assertEqual(
                self.broken_detail(gm),
                f"after the pipeline: {detail}.\nInvariant: In the graph of a whole step whose "
                "gradients are scaled, every update_ takes the same found_inf, which is computed "
                "from every flat gradient that is updated.",
            )

    def test_updated_once_of_micro_batches(self):
        """The gradients of both go to the update; one alone leaves the other behind."""
        for num_taken in (2, 1):
            hand = Hand()
            x, flat = hand.input("x", 4), hand.input("flat", 2)
            (spec,) = unit("u", {"w": (4,)})
            specs = [replace(spec, batch=i) for i in range(2)]
            params = [hand.unshard(flat, s) for s in specs]
            grads = [
                hand.reduce_grad(hand.add(x, p), flat, s)
                for p, s in zip(params, specs, strict=True)
            ]
            run = Builder(hand.end, hand.end)
            total = join_batches(run, *grads) if num_taken == 2 else grads[0]
            hand(UPDATE, total, flat, [0], "step0")
            gm = lower(hand.returns(x), PLAN)
            if num_taken == 2:
                check(gm, PLAN, "the pipeline")
            else:
                self.assertIn("marks a gradient that no update_ takes", self.broken_detail(gm))

    def at_owners(self) -> GraphModule:
        """The graph of a whole step with a matrix and a vector in one buffer."""
        hand = Hand()
        matrix, vector = unit("u#0", {"w": (4, 2), "b": (4,)})
        flat, x = hand.input("flat", 6), hand.input("x", 4, 2)
        y = hand.input("y", 4)
        grad = hand.add(hand.reduce_grad(x, flat, matrix), hand.reduce_grad(y, flat, vector))
        hand(UPDATE, grad, flat, [4], "step0")
        owned = [(matrix, Matrix("u#0", "w", 1, torch.bfloat16, 8.0))]
        updated_whole(Builder(hand.end, hand.end), grad, flat, owned, "step0")
        return lower(hand.returns(), PLAN)

    def test_updated_at_owners(self):
        """Another owner on the way back, another buffer, other parameters, another size; nothing
        awaited, nothing updated, one of two parts left out.
        """
        check(self.at_owners(), PLAN, "the pipeline")
        rule = (
            "\nInvariant: In the graph of a whole step, what a momentum_ yields goes to owners, is "
            "orthogonalized there, comes back and updates the same parameters, with nothing else "
            "in between: the same buffer, order, owners, sizes and group all the way; over one "
            "rank, without travelling."
        )
        way = "what %momentum__default yields goes to ["
        for do, detail in (
            (change(FROM_OWNERS, 2, [0]), "owners change on the way of %momentum__default: [["),
            (change(FROM_OWNERS, 1, [6]), "numels change on the way of %momentum__default: [["),
            (change(MOMENTUM, 4, 6), "%momentum__default yields other pieces than [4]"),
            (change(UPDATE_MATRICES, 2, [4]), "offsets change on the way of %momentum__default"),
            (other_buffer, "flat change on the way of %momentum__default: [flat, flat, x]"),
            (unawaited, f"{way}'%to_owners_default', '%orthogonalize_default', "),
            (erase(UPDATE_MATRICES), f"{way}'%to_owners_default', '%wait_tensor_default', "),
            (erase(ORTHOGONALIZE), f"{way}'%to_owners_default', '%wait_tensor_default', "),
        ):
            gm = self.at_owners()
            do(gm)
            found = self.broken_detail(gm)
            self.assertIn(detail, found)
            self.assertTrue(found.endswith(rule), found)
        gm = self.at_owners()
        without_matrices(gm)
        self.assertIn("marks a gradient that no update_ takes", self.broken_detail(gm))
        gm = self.at_owners()
        (update,) = find(gm.graph, UPDATE)
        update.args = (*update.args[:2], [0, 4], *update.args[3:])
        self.assertIn("and %update__default take the same gradient", self.broken_detail(gm))

    def next_step(self, num_units: int = 1) -> GraphModule:
        """The graph of a whole step that gathers its buffers for the next one."""
        hand = Hand()
        flats = [hand.input(f"flat{i or ''}", 2) for i in range(num_units)]
        x = hand.input("x", 4)
        specs = [unit(f"u{i}", {"w": (4,)}, overlap=NEXT)[0] for i in range(num_units)]
        for flat, spec in zip(flats, specs, strict=True):
            x = hand.add(x, hand.unshard(flat, spec))
        for flat, spec in zip(flats, specs, strict=True):
            hand(UPDATE, hand.reduce_grad(x, flat, spec), flat, [0], "step0")
        return gather_next(gather_ahead(lower(hand.returns(x), PLAN), PLAN), PLAN)

    def test_gathered_after_update(self):
        """Before the update, twice, another piece, another order."""
        gm = self.next_step()
        check(gm, PLAN, "the pipeline")
        (node,), (update,) = find(gm.graph, GATHER_NEXT), find(gm.graph, UPDATE)
        update.prepend(node)
        self.assertEqual(
            self.broken_detail(gm),
            "after the pipeline: %gather_next_default gathers %flat before %update__default writes "
            "it.\nInvariant: What is gathered for the next step is a piece that the graph takes "
            "over at its beginning, once each, in the same order, and its buffer is updated before, "
            "never after.",
        )
        output(gm.graph).prepend(node)
        with gm.graph.inserting_after(node):
            again = gm.graph.node_copy(node)
        self.assertIn("takes over, or a second time", self.broken_detail(gm))
        gm.graph.erase_node(again)
        node.args = (node.args[0], 1, *node.args[2:])
        self.assertIn("gathers what no gather_ahead takes over", self.broken_detail(gm))
        gm = self.next_step(2)
        check(gm, PLAN, "the pipeline")
        first, second = find(gm.graph, GATHER_NEXT)
        second.append(first)
        violations = list(gathered_after_update(gm, PLAN))
        self.assertEqual(
            violations[0][1],
            "%gather_next_default gathers behind others what the graph takes over before them",
        )

    def test_stepped_last_in_a_whole_step(self):
        """A gather of the next step's forward, started before the update that it should follow."""
        gm = self.step()
        update, (gather, _) = find(gm.graph, UPDATE)[0], find(gm.graph, ALL_GATHER)
        stale = Builder(output(gm.graph), update)(aten.neg.default, gather.all_input_nodes[0])
        self.assertIn(
            "%update__default writes %flat0, which is still to be read", self.broken_detail(gm)
        )
        gm.graph.erase_node(stale)
        check(gm, PLAN, "the pipeline")

    def test_gathered_again(self):
        """Backward gathers what forward has gathered; a third gather breaks the rule."""
        hand = Hand()
        (spec,) = unit("u", {"w": (4,)})
        flat = hand.input("flat", 2)
        again = replace(spec, reshard=AGAIN)
        gathered = [hand.unshard(flat, s) for s in (spec, again)]
        check(lower(hand.returns(*map(hand.compute, gathered)), PLAN), PLAN, "the pipeline")
        gathered = [hand.unshard(flat, s) for s in (spec, again, again)]
        gm = lower(hand.returns(*map(hand.compute, gathered)), PLAN)
        self.assertIn("w is gathered here and at", self.broken_detail(gm))

    def test_meaning_of_what_is_left(self):
        """The unit completes what was captured; with other offsets it would not."""

        def other(gm, plan):
            later = find(gm.graph, REDUCE_LATER)[0]
            later.args = (*later.args[:1], later.args[1], [1], *later.args[3:])
            return gm

        gm = run_pipeline(
            self.left(),
            PLAN,
            HALF,
            lambda gm, entry: check(gm, PLAN, entry.name) if entry in LATE else None,
        )
        self.assertEqual(len(find(gm.graph, REDUCE_LATER)), 2)
        broken = Pass(other, Stage.HALF, (), Property.FREED)
        with self.assertRaises(GraphInvariantError):
            run_pipeline(self.left(), PLAN, (*BEFORE, broken, *LATE))

    def broken_detail(self, gm: GraphModule, plan: Plan = PLAN) -> str:
        """The first line of the error, and the rule."""
        with self.assertRaises(GraphInvariantError) as caught:
            verify(gm, plan)
        return "\n".join(str(caught.exception).split("\n")[:2])

    def test_as_specified(self):
        """A reduction in another group, then in another dtype: both of the same shape."""
        for change, said in (
            ({"group": "shard2"}, "reduce_scatter_tensor(4 x torch.float32, sum, 2, shard2)"),
            ({"dtype": torch.bfloat16}, "reduce_scatter_tensor(4 x torch.bfloat16, sum, 2, shard)"),
        ):
            gm = lower(half(1), PLAN)
            start = find(gm.graph, comm.REDUCE_SCATTER)[0]
            source, op, size, group = start.args
            if "dtype" in change:
                source = Builder(start, start)(aten.to.dtype, source, change["dtype"])
            start.args = (source, op, size, change.get("group", group))
            self.assertEqual(
                self.broken_detail(gm),
                f"after the pipeline: the reduce of ['b'] starts ['{said}']; its settings name "
                "['reduce_scatter_tensor(4 x torch.float32, sum, 2, shard)'].\n"
                "Invariant: Each communication starts the collectives that its parameters' "
                "settings name: op, group, size and dtype.",
            )

    def test_divided(self):
        gm = lower(half(1), PLAN)
        find(gm.graph, aten.div.Tensor)[1].args = (find(gm.graph, aten.div.Tensor)[1].args[0], 4.0)
        self.assertEqual(
            self.broken_detail(gm),
            "after the pipeline: gradients of ['a'] are divided by (1.0, 4.0), not by (1.0, 2.0).\n"
            "Invariant: Every gradient is divided by what its settings say: before it is reduced, "
            "and after, or by the unit that awaits it.",
        )

    def test_divided_in_parts(self):
        """Of two units that share a reduction, one's part is left as it is."""
        hand = Hand()
        totals = []
        for name in "ab":
            (spec,) = unit(name, {"w": (4, 2)})
            flat, grad = hand.input(f"flat_{name}", 4), hand.input(f"d_{name}", 4, 2)
            totals.append(hand.reduce_grad(hand.compute(grad), flat, spec))
        shared = replace(PLAN, bucket_bytes=1 << 10)
        gm = bucket_reduce_scatter(lower(hand.returns(*totals), PLAN), shared)
        verify(gm, PLAN)
        last = find(gm.graph, aten.div.Tensor)[-1]
        last.target, last.args = aten.clone.default, last.args[:1]
        self.assertIn(
            "gradients of ['w', 'w'] are divided by (1.0, 1.0, 2.0), not by (1.0, 2.0)",
            self.broken_detail(gm),
        )

    def test_cast_by_policy(self):
        (w,) = unit("u", {"w": (4, 2)}, dtype=torch.bfloat16)
        hand = Hand()
        gm = lower(hand.returns(hand.compute(hand.unshard(hand.input("flat", 4), w))), PLAN)
        (cast,) = find(gm.graph, comm.CONVERT)
        late = find(gm.graph, WAIT)[0]
        narrow = Builder(late.next, late, get_tag(late))(comm.CONVERT, late, torch.float16)
        late.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
        self.assertEqual(
            self.broken_detail(gm),
            "after the pipeline: %convert_element_type_default_1 casts from torch.bfloat16 to "
            "torch.float16 after the gather of w in torch.bfloat16.\n"
            "Invariant: Parameters are cast to the compute dtype before they are gathered, "
            "gradients to the reduce dtype and back around it.",
        )
        self.assertEqual(cast.args[1], torch.bfloat16)

    def test_freed_once(self):
        for change in ("twice", "never"):
            gm = run_pipeline(half(2), PLAN, HALF)
            free = find(gm.graph, FREE)[0]
            if change == "twice":
                Builder(free.next, free)(FREE, *free.args)
            else:
                gm.graph.erase_node(free)
            self.assertEqual(
                self.broken_detail(gm),
                "after the pipeline: %wait_tensor_default_8 is freed "
                f"{2 if change == 'twice' else 0} times.\n"
                "Invariant: A graph that frees, frees every buffer that it received exactly once, "
                "unless it returns it.",
            )

    def test_freed_while_a_collective_reads_it(self):
        hand = Hand()
        buffer = hand(WAIT, hand(ALL_GATHER, hand.input("flat", 4), 2, "shard"))
        start = hand(ALL_GATHER, buffer, 2, "shard")
        hand(FREE, buffer)
        self.assertIn(
            "%all_gather_into_tensor_default_1 is still reading %wait_tensor_default when it is "
            "freed",
            (self.broken_detail(hand.returns(hand.compute(hand(WAIT, start))))),
        )

    def test_a_copy_of_a_parameter_is_not_saved_either(self):
        """Out of a bucket a parameter is copied: no alias of the gathered buffer, and as many
        bytes.
        """
        hand = Hand()
        a, b = unit("u", {"a": (4, 2), "b": (4, 2)})
        flat = hand.input("flat", 8)
        full = hand.unshard(flat, a)
        gm = run_pipeline(hand.returns(hand.add(full, hand.unshard(flat, b)), full), PLAN, HALF[:2])
        self.assertIn(
            "%view_default_3 is saved for backward and shares storage with the gathered ['a', 'b']",
            (self.broken_detail(gm)),
        )

    def test_reduced_once(self):
        hand = Hand()
        flat, x = hand.input("flat", 4), hand.input("x", 4, 2)
        gm = hand.returns(
            hand.add(hand.reduce_grad(x, flat, W), hand.reduce_grad(hand.compute(x), flat, W))
        )
        self.assertEqual(
            self.broken_detail(lower(gm, PLAN)),
            "after the pipeline: the gradient of w is reduced here and at %reshape_default.\n"
            "Invariant: Every parameter's gradient is reduced at most once into a flat gradient.",
        )

    def test_same_interface(self):
        def rename(gm, plan):
            next(iter(gm.graph.nodes)).name = "other"
            return gm

        def drop(gm, plan):
            end = output(gm.graph)
            end.args = (end.args[0][:1],)
            return gm

        for change, said in (
            (
                rename,
                "inputs differ from the captured ones: ['other: torch.float32[4]', 'x: "
                "torch.float32[4]']",
            ),
            (drop, "1 outputs; 2 were captured"),
        ):
            self.assertEqual(
                self.after(change),
                f"after the pipeline: {said}.\n"
                "Invariant: The inputs of the graph are those that were captured, and so is the "
                "number of its outputs.",
            )

    def after(self, change: Callable[[GraphModule, Plan], GraphModule]) -> str:
        """What is said when a pass makes this change to a finished graph."""
        broken = Pass(change, Stage.HALF, (), Property.FREED)
        with self.assertRaises(GraphInvariantError) as caught:
            run_pipeline(half(1), PLAN, (*BEFORE, broken, *LATE))
        return "\n".join(str(caught.exception).split("\n")[:2])

    def test_same_meaning(self):
        """Each with collectives, casts and frees as they should be: another column, another sum, a
        write, a gather for nothing.
        """

        def other_column(gm, plan):
            first, second = find(gm.graph, aten.slice.Tensor)
            second.args = (*second.args[:2], *first.args[2:])
            return gm

        def other_sum(gm, plan):
            add = find(gm.graph, aten.add.Tensor)[0]
            add.args = (add.args[0], add.args[0])
            return gm

        def write(gm, plan):
            end = output(gm.graph)
            Builder(end, end)(
                aten.copy_.default, *[n for n in gm.graph.nodes if n.op == "placeholder"]
            )
            return gm

        def again(gm, plan):
            start = find(gm.graph, ALL_GATHER)[0]
            Builder(start, start)(WAIT, Builder(start, start)(ALL_GATHER, *start.args))
            return gm

        for change, said in (
            (other_column, "output 0 is not what was captured"),
            (other_sum, "output 0 is not what was captured"),
            (
                write,
                "%copy__default communicates or writes what was not captured, or once too often",
            ),
            (
                again,
                "%all_gather_into_tensor_default_2 communicates or writes what was not captured, "
                "or once too often",
            ),
        ):
            self.assertEqual(
                self.after(change),
                f"after the pipeline: {said}.\n"
                "Invariant: The graph returns the values that were captured, with the same "
                "effects, of the communications that its settings name.",
            )

    def test_announced(self):
        """Collectives in another order than `agree` compares; a flat buffer that is left out."""
        gm = run_pipeline(half(2), PLAN, HALF)
        first, second = (r.starts[0] for r in find_regions(gm.graph, "gather"))
        first.prepend(second)
        self.assertIn("%agree_default compares\na forward graph of", self.broken_detail(gm))

        for flats in (1, 2):
            gm = half(2)
            named = [n for n in gm.graph.nodes if n.name.startswith("flat")]
            for flat in named:
                set_heads(flat, (2, {0: [1]}))
            gm = run_pipeline(gm, PLAN, HALF)
            (watch,) = find(gm.graph, WATCH_HEADS)
            if flats == 2:
                check(gm, PLAN, "the pipeline")
                continue
            watch.args = (watch.args[0], watch.args[1][:1], *watch.args[2:])
            self.assertEqual(
                self.broken_detail(gm),
                "after the pipeline: %watch_heads_default leaves out some of %flat0, %flat1, to "
                "which not all outputs lead.\n"
                "Invariant: What a graph says of itself before it runs is so: its collectives, in "
                "order, and which outputs lead to which parameters.",
            )

    def test_summed_up(self):
        """Summed up twice, too late, of something else, under another name, or not at all."""
        (w,) = unit("u#1", {"w": (4, 2)}, is_checked=True, reduce_algorithm="all_to_all")

        def summed() -> GraphModule:
            hand = Hand()
            flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
            full = hand.compute(hand.unshard(flat, w))
            gm = lower(hand.returns(full, hand.reduce_grad(d, flat, w)), PLAN)
            return add_checksums(gm, PLAN)

        self.assertUnchanged(verify, summed())
        gm = summed()
        gm.graph.erase_node(find(gm.graph, COMPARE)[0])
        self.assertBroken(
            gm,
            """\
after the pipeline: %all_gather_into_tensor_default is compared 0 times.
Invariant: Each collective of checked parameters is summed up on both sides, what is sent before it starts, and compared once under their names; no other is.
This is a bug in the pass named above, or in a pass added to the pipeline.
   %flat: f32[4]
   %d: f32[4,2]
   %checksum_default: i64[1,1] = checksum([%flat], 1, [4], [4])
-> %all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
   %wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
   %checksum_default_1: i64[2,1] = checksum([%wait_tensor_default], 2, [4], [4])
   %view_default: f32[4,2] = view(%wait_tensor_default, [4, 2])  # u: gather
   %neg_default: f32[4,2] = neg(%view_default)
   %reshape_default: f32[2,4] = reshape(%d, [2, 4])  # u: reduce
   %checksum_default_2: i64[2,1] = checksum([%reshape_default], 2, [4], [4])
   %all_to_all_default: f32[2,4] = all_to_all([%reshape_default], 2, 'shard')  # u: reduce
   %wait_tensor_default_1: f32[2,4] = wait_tensor(%all_to_all_default)  # u: reduce
   %checksum_default_3: i64[2,1] = checksum([%wait_tensor_default_1], 2, [4], [4])
   compare_(%checksum_default_2, %checksum_default_3, [], [], [], 'all-to-all', 'forward', ['u#1:w'])""",
        )

        def is_broken(change: Callable[[Node, Node], None], expected: str) -> None:
            gm = summed()
            change(find(gm.graph, COMPARE)[0], find(gm.graph, ALL_GATHER)[0])
            with self.assertRaisesRegex(GraphInvariantError, expected):
                verify(gm, PLAN)

        is_broken(lambda compare, start: start.append(compare.args[0]), "is no sum of what")
        is_broken(
            lambda compare, start: compare.args[0].update_arg(0, [_input(start.graph, "d")]),
            "is no sum of what",
        )
        is_broken(lambda compare, _: compare.update_arg(7, ["u#1:b"]), "compares all-gather of")
        is_broken(lambda compare, _: compare.update_arg(5, "all-to-all"), "compares all-to-all of")
        is_broken(lambda compare, _: compare.update_arg(1, compare.args[0]), "is compared 0 times")
        is_broken(
            lambda compare, _: compare.append(compare.graph.node_copy(compare, lambda n: n)),
            "is compared 2 times",
        )
        gm = summed()
        for node in gm.graph.nodes:
            if (tag := get_tag(node)) is not None:
                set_tag(node, replace(tag, specs=(replace(w, is_checked=False),)))
        with self.assertRaisesRegex(GraphInvariantError, "compares what no checked collective"):
            verify(gm, PLAN)

    def test_judged_first(self):
        """An update before it; a sum or a gradient left out; none, or two; in a graph that updates
        nothing.
        """
        (w,) = unit("u#1", {"w": (4, 2)}, is_checked=True, reduce_algorithm="all_to_all")

        def judged() -> GraphModule:
            hand = Hand()
            flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
            hand(UPDATE, hand.reduce_grad(d, flat, w), flat, [0], "step0")
            return await_verdict(add_checksums(lower(hand.returns(), PLAN), PLAN), PLAN)

        def is_broken(change: Callable[[Node, Node], None], expected: str) -> None:
            gm = judged()
            change(find(gm.graph, VERDICT)[0], find(gm.graph, UPDATE)[0])
            self.assertRegex(" ".join(text for _, text in judged_first(gm, PLAN)), expected)

        self.assertUnchanged(verify, judged())
        is_broken(lambda verdict, update: verdict.prepend(update), "does not wait for %verdict_")
        is_broken(lambda verdict, _: verdict.update_arg(0, []), "does not wait for %verdict_")
        is_broken(lambda verdict, _: verdict.update_arg(1, []), "or leaves it out")
        is_broken(
            lambda verdict, _: find(verdict.graph, COMPARE)[0].prepend(verdict),
            "comes before %compare_",
        )
        is_broken(
            lambda verdict, _: verdict.append(verdict.graph.node_copy(verdict, lambda n: n)),
            "2 verdicts for 1 sums and 1 updates",
        )
        gm = judged()
        gm.graph.erase_node(find(gm.graph, VERDICT)[0])
        with gm.graph.inserting_before(find(gm.graph, UPDATE)[0]):
            gm.graph.call_function(AGREE, (_input(gm.graph, "d"), "", []))
        with self.assertRaisesRegex(GraphInvariantError, "0 verdicts for 1 sums and 1 updates"):
            verify(gm, PLAN)

    def test_every_invariant_is_tested_and_in_the_readme(self):
        names = [invariant.__name__ for invariant in INVARIANTS]
        untested = [n for n in names if not hasattr(self, f"test_{n}")]
        self.assertEqual(untested, [])
        readme = (Path(__file__).parents[2] / "passes" / "README.md").read_text()
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", readme, re.MULTILINE)
        self.assertEqual(
            rows, [(i.__name__, " ".join((i.__doc__ or "").split())) for i in INVARIANTS]
        )
