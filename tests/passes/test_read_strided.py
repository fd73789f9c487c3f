"""`read_strided`: what generated kernels read in a bucket is not copied out of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.free import free
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.read_strided import read_strided
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, GraphTest, Hand, aten, fake_ranks, numel, ops, unit
from kit.schedules import costs
from torch.fx import GraphModule

from compiled_fsdp import fully_shard, planned
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.passes import read_strided as module
from compiled_fsdp.planning.costs import Costs
from compiled_fsdp.planning.lifetimes import Lifetimes
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.invariant import GraphInvariantError
from compiled_fsdp.verification.meaning import Captured

STRIDED = replace(PLAN, copy_out="strided")


def linear_and_scale(rows: int = 1, **changes: Any) -> GraphModule:
    """A matmul with one parameter of a unit, a product with the other, of `rows` rows for each
    rank.
    """
    hand = Hand()
    w, scale = unit("u", {"w": (4, 2 * rows), "scale": (2 * rows,)}, **changes)
    x, flat = hand.input("x", 3, 4), hand.input("flat", numel([w, scale]))
    y = hand(aten.mm.default, x, hand.unshard(flat, w))
    gm = hand.returns(hand(aten.mul.Tensor, y, hand.unshard(flat, scale)))
    set_captured(gm, Captured(gm.graph))
    return bucket_all_gather(lower(gm, PLAN), PLAN)


class TestReadStrided(GraphTest):
    def test_docstring(self):
        gm = linear_and_scale()
        self.assertDocumented(module, "Before", gm)
        self.assertDocumented(module, "After", read_strided(gm, STRIDED))

    def test_the_bucket_lives_until_it_is_read(self):
        gm = free(read_strided(linear_and_scale(), STRIDED), STRIDED)
        check(gm, STRIDED, "read_strided")
        self.assertGraph(
            gm,
            """\
%x: f32[3,4]
%flat: f32[5]
%all_gather_into_tensor_default_2: f32[10] = all_gather_into_tensor(%flat, 2, 'shard')  # u: gather
%wait_tensor_default_2: f32[10] = wait_tensor(%all_gather_into_tensor_default_2)  # u: gather
%view_default_2: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_2: f32[2,4] = slice(%view_default_2, 1, 0, 4)  # u: gather
%clone_default: f32[2,4] = clone(%slice_tensor_2, memory_format=torch.contiguous_format)  # u: gather
%view_default_3: f32[4,2] = view(%clone_default, [4, 2])  # u: gather
%mm_default: f32[3,2] = mm(%x, %view_default_3)
%view_default_4: f32[2,5] = view(%wait_tensor_default_2, [2, 5])  # u: gather
%slice_tensor_3: f32[2,1] = slice(%view_default_4, 1, 4, 5)  # u: gather
%reshape_default: f32[2] = reshape(%slice_tensor_3, [2])  # u: gather
%view_default_5: f32[2] = view(%reshape_default, [2])  # u: gather
%mul_tensor: f32[3,2] = mul(%mm_default, %view_default_5)
free(%wait_tensor_default_2)
return [%mul_tensor]""",
        )

    def test_memory(self):
        """Inductor allocates no reshaped parameter; who executes the graph as it is copies
        there.
        """
        gm = read_strided(linear_and_scale(2), STRIDED)
        (reshape,) = find(gm.graph, aten.reshape.default)
        (wait,) = (n for n in gm.graph.nodes if "wait_tensor" in n.name)
        fused, plain = Lifetimes(gm.graph, is_fused=True), Lifetimes(gm.graph)
        self.assertEqual([s.node for s in fused.of(reshape)], [wait.all_input_nodes[0]])
        self.assertEqual([s.node for s in plain.of(reshape)], [reshape])

    def test_the_default_copies(self):
        self.assertUnchanged(read_strided, linear_and_scale())

    def test_messages_of_their_own(self):
        """What is not copied anyway."""
        self.assertUnchanged(read_strided, linear_and_scale(own_message=0), STRIDED)

    def test_what_the_graph_returns(self):
        """As parameters that backward gets from forward: a view would keep the bucket."""
        hand = Hand()
        specs = unit("u", {"a": (4, 2), "b": (2,)})
        flat = hand.input("flat", 5)
        a, b = (hand.unshard(flat, s) for s in specs)
        gm = bucket_all_gather(lower(hand.returns(hand.compute(a), a, hand.compute(b)), PLAN), PLAN)
        before = ops(gm.graph).count("clone")
        read_strided(gm, STRIDED)
        self.assertEqual(
            (before, ops(gm.graph).count("clone"), ops(gm.graph).count("reshape")), (2, 1, 1)
        )

    def test_another_dim_and_padding(self):
        """A parameter that is cut on dim 1, and one whose last shard is filled up, keep their
        values.
        """
        hand = Hand()
        specs = unit("u", {"a": (3,), "b": (2, 4)})
        specs[1] = replace(specs[1], dim=1)
        flat = hand.input("flat", numel(specs))
        captured = hand.returns(*(hand.compute(hand.unshard(flat, s)) for s in specs))
        set_captured(captured, Captured(captured.graph))
        gm = read_strided(bucket_all_gather(lower(captured, PLAN), PLAN), STRIDED)
        check(gm, STRIDED, "read_strided")
        self.assertNotIn("clone", ops(gm.graph))
        x = torch.arange(2.0 * numel(specs))
        a = torch.cat([x[:2], x[6:7]])
        b = torch.cat([x[2:6].view(2, 2), x[8:].view(2, 2)], 1)
        rows = x.view(2, 6)
        found = [
            rows[:, :2].reshape(4)[:3],
            rows[:, 2:].reshape(8).view(2, 2, 2).permute(1, 0, 2).reshape(2, 4),
        ]
        self.assertEqual([t.tolist() for t in found], [a.tolist(), b.tolist()])

    def test_verify_sees_other_columns(self):
        gm = read_strided(linear_and_scale(), STRIDED)
        (reshape,) = find(gm.graph, aten.reshape.default)
        columns = reshape.all_input_nodes[0]
        columns.args = (columns.args[0], 1, 0, 1)
        with self.assertRaisesRegex(GraphInvariantError, "output 0 is not what was captured"):
            check(gm, STRIDED, "by hand")


@pytest.mark.parametrize(
    ("rows", "overhead", "expected"),
    [(16, 1.0, 1), (15, 1.0, 0), (16, 0.0, 0)],
    ids=["copies cost", "rows end within a cache line", "copies cost nothing"],
)
def test_from_costs(rows, overhead, expected):
    """A graph of a matmul of a second, and a copy; a row of 16 elements is a cache line of 64
    bytes.
    """
    gm = linear_and_scale(rows)
    machine = Costs(2.0 * 3 * 4 * 2 * rows, 1e12, overhead, costs(1.0, 1.0).links)
    read_strided(gm, Plan(copy_out=None, costs=machine))
    assert len(find(gm.graph, aten.reshape.default)) == expected


def test_from_costs_without_costs():
    gm = linear_and_scale(16)
    read_strided(gm, Plan(copy_out=None))
    assert not find(gm.graph, aten.reshape.default)


def test_only_where_kernels_are_generated():
    plan = Plan(copy_out="strided")
    assert (plan.executed_by(is_fused=True), plan.executed_by(is_fused=False).copy_out) == (
        plan,
        "copy",
    )


def test_bad_value():
    with pytest.raises(ValueError, match="Plan: copy_out='lazy'; should be one of"):
        Plan(copy_out="lazy")


def test_a_backend_without_kernels_says_that_it_copies():
    with fake_ranks(2), planned(copy_out="strided"):
        model = fully_shard(torch.nn.LayerNorm(8))
        with pytest.warns(
            UserWarning, match="is for kernels that Inductor generates; this backend copies"
        ):
            torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(2, 8))
