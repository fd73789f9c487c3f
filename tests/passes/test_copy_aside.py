"""`copy_aside`: copies between host and device start early and are awaited late, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_fsdp.passes.base import run_pipeline
from compiled_fsdp.passes.copy_aside import copy_aside
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, fake_ranks, ops, unit
from torch.fx import GraphModule

from compiled_fsdp.ir.graph import find, output
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import COPY_TO, START_COPY
from compiled_fsdp.passes import copy_aside as module
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured


def gathers(number: int = 2, **changes: Any) -> GraphModule:
    """So many units that rest on the host, each read where the one before was."""
    hand = Hand()
    specs = [unit(f"u{i}", {"w": (4,)}, **{"device": "cuda", **changes})[0] for i in range(number)]
    flats = [hand.input(f"flat{i}", 2) for i in range(number)]
    return hand.returns(
        *[hand.compute(hand.unshard(f, s)) for f, s in zip(flats, specs, strict=True)]
    )


def lowered(gm: GraphModule) -> GraphModule:
    set_captured(gm, Captured(gm.graph))
    return lower(gm, PLAN)


def gradients(*, is_read: bool = False) -> GraphModule:
    """Gradients of two units, then something of the user's; or one that the graph reads, too."""
    hand = Hand()
    specs = [
        unit(f"u{i}", {"w": (4,)}, device="cuda", pins=True, post_divide=1.0)[0] for i in range(2)
    ]
    flats = [hand.input(f"flat{i}", 2) for i in range(2)]
    with hand.mode:
        tangent = hand.input("tangents_1", 4)
        tangent.meta["val"] = torch.empty(4, device="cuda")
    reduced = []
    for flat, spec in zip(flats, specs, strict=True):
        reduced.append(hand.reduce_grad(hand.compute(tangent), flat, spec))
    last = hand.compute(reduced[0] if is_read else tangent)
    return hand.returns(*reduced, last)


class TestCopyAside(GraphTest):
    def test_docstring(self):
        gm = lowered(gathers())
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", copy_aside(gm, PLAN))
        check(gm, PLAN, "copy_aside")

    def test_one_gather_ahead(self):
        """Not all at once: the third is begun where the second is gathered."""
        gm = copy_aside(lowered(gathers(3)), PLAN)
        found = [op for op in ops(gm.graph) if op in ("start_copy", "neg")]
        self.assertEqual(found, ["start_copy", "start_copy", "neg", "start_copy", "neg", "neg"])

    def test_slices_move_along(self):
        hand = Hand()
        (first,) = unit("u0", {"w": (4,)}, device="cuda")
        _, second = unit("u1", {"a": (4,), "b": (4,)}, device="cuda")
        flats = [hand.input("flat0", 2), hand.input("flat1", 4)]
        read = [
            hand.compute(hand.unshard(f, s)) for f, s in zip(flats, (first, second), strict=True)
        ]
        gm = copy_aside(lowered(hand.returns(*read)), PLAN)
        self.assertEqual(ops(gm.graph)[:3], ["start_copy", "slice", "start_copy"])
        check(gm, PLAN, "copy_aside")

    def test_devices(self):
        """A shard and its gradient rest on the host; what is between is on the device."""
        for gm in map(lowered, (gathers(), gradients())):
            copy_aside(gm, PLAN)
            for region in (*find_regions(gm.graph, "gather"), *find_regions(gm.graph, "reduce")):
                on = {n.meta["val"].device.type for n in region.nodes if n.meta["val"] is not None}
                self.assertEqual(on, {"cuda"}, region.nodes)
        *flat_grads, _ = output(gm.graph).args[0]
        self.assertEqual({n.meta["val"].device.type for n in flat_grads}, {"cpu"})

    def test_gradients(self):
        """Copied from where they are reduced, and awaited at the end, where they are marked."""
        self.assertGraph(
            copy_aside(lowered(gradients()), PLAN),
            """\
%flat0: f32[2]
%flat1: f32[2]
%tangents_1: f32[4]
%neg_default: f32[4] = neg(%tangents_1)
%reshape_default: f32[2,2] = reshape(%neg_default, [2, 2])  # u0: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # u0: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, 'shard')  # u0: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # u0: reduce
%start_copy_default: f32[2] = start_copy(%wait_tensor_default, 'host', True)  # u0: copy
%neg_default_1: f32[4] = neg(%tangents_1)
%reshape_default_2: f32[2,2] = reshape(%neg_default_1, [2, 2])  # u1: reduce
%reshape_default_3: f32[4] = reshape(%reshape_default_2, [4])  # u1: reduce
%reduce_scatter_tensor_default_1: f32[2] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, 'shard')  # u1: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default_1)  # u1: reduce
%start_copy_default_1: f32[2] = start_copy(%wait_tensor_default_1, 'host', True)  # u1: copy
%neg_default_2: f32[4] = neg(%tangents_1)
%wait_tensor_default_2: f32[2] = wait_tensor(%start_copy_default)  # u0: copy
mark_grads_(%wait_tensor_default_2, %flat0, [0])
%wait_tensor_default_3: f32[2] = wait_tensor(%start_copy_default_1)  # u1: copy
mark_grads_(%wait_tensor_default_3, %flat1, [0])
return [%wait_tensor_default_2, %wait_tensor_default_3, %neg_default_2]""",
        )

    def test_a_gradient_that_the_graph_reads(self):
        gm = copy_aside(lowered(gradients(is_read=True)), PLAN)
        names = ops(gm.graph)
        first = names[names.index("start_copy") :][:3]
        self.assertEqual(first, ["start_copy", "wait_tensor", "mark_grads_"])
        check(gm, PLAN, "copy_aside")

    def test_near_miss(self):
        """Units that rest on the device have nothing to copy."""
        self.assertUnchanged(copy_aside, lowered(gathers(device="")))

    def test_whole_pipeline(self):
        """With buckets, early gathers and late waits, the copies are still those."""
        for make in (gathers, gradients):
            with fake_ranks(2):
                gm = run_pipeline(make(), PLAN, HALF)
            self.assertEqual(find(gm.graph, COPY_TO), [])
            self.assertEqual(len(find(gm.graph, START_COPY)), 2)


@pytest.mark.parametrize("make", [gathers, gradients])
def test_a_copy_that_nobody_awaits(make: Any) -> None:
    gm = copy_aside(lowered(make()), PLAN)
    start = find(gm.graph, START_COPY)[0]
    (wait,) = start.users
    wait.replace_all_uses_with(start)
    gm.graph.erase_node(wait)
    with pytest.raises(GraphInvariantError, match="copy to or from the host is awaited exactly"):
        check(gm, PLAN, "a mutation")


def test_a_shard_that_is_not_copied() -> None:
    gm = copy_aside(lowered(gathers()), PLAN)
    start = find(gm.graph, START_COPY)[0]
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])  # type: ignore[arg-type]
    for node in (wait, start):
        gm.graph.erase_node(node)
    with pytest.raises(GraphInvariantError, match=r"not what was captured"):
        check(gm, PLAN, "a mutation")
