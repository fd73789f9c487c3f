"""The pipeline: its order, its table in passes/README.md, and a two-block model through every
stage.
"""

from __future__ import annotations

import importlib
import io
import re
import tempfile
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compiled_fsdp.passes.base import (
    Context,
    Pass,
    Property,
    Stage,
    check_order,
    consume,
    run_pipeline,
)
from compiled_fsdp.passes.pipeline import ALWAYS, HALF, JOINT, PIPELINE, current, key
from kit.passes_harness import (
    PLAN,
    GraphTest,
    Hand,
    body,
    changes,
    fake_ranks,
    ops,
    trace,
    unit,
)
from kit.stems import stem
from torch import Tensor, nn

from compiled_fsdp import dumped_to, fully_shard, pipeline, planned, print_graph
from compiled_fsdp.compiler.inductor import HalfPass, JointPass
from compiled_fsdp.inspection.dump_checks import violations
from compiled_fsdp.inspection.dump_folder import read_folder
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.planning.plan import ASKED

ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.scale = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).relu() * self.scale


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TestPipeline(GraphTest):
    def test_wrong_order(self):
        by_name = {entry.name: entry for entry in PIPELINE}
        wrong = [
            by_name[n] for n in ("keep_grad_dtype", "dedup_unshard", "reshard", "lower", "free")
        ]
        self.assertExpectedRaisesInline(
            ValueError,
            lambda: check_order(wrong),
            """pipeline: free requires ['PREFETCHED', 'DELAYED'], but the passes before it provide only ['GRADS_KEPT', 'DEDUPED', 'DECIDED', 'LOWERED']. Move it after the pass that provides them""",
        )

    def test_each_requirement_is_needed(self):
        """A pass put before what provides its requirement is refused."""
        for entry in PIPELINE:
            if entry.requires:
                with self.assertRaisesRegex(
                    ValueError, f"{entry.name} requires .*{entry.requires[0].name}"
                ):
                    check_order([entry, *(e for e in PIPELINE if e is not entry)])

    def test_stages(self):
        self.assertEqual(JOINT + HALF, PIPELINE)
        self.assertEqual([entry.provides for entry in PIPELINE], list(Property))

    def test_runs_in_order_and_reports(self):
        called: list[str] = []

        def first(gm, plan):
            called.append("first")
            return gm

        def second(gm, plan):
            called.append("second")
            return gm

        entries = [
            Pass(f, Stage.HALF, (), p)
            for f, p in ((first, Property.LOWERED), (second, Property.FREED))
        ]
        hand = Hand()
        gm = hand.returns(hand.input("x", 2))
        run_pipeline(gm, PLAN, entries, lambda gm, entry: called.append(f"after {entry.name}"))
        self.assertEqual(called, ["first", "after first", "second", "after second"])

    def test_a_pass_that_breaks_the_graph(self):
        """Lint runs after every pass: here a value is read before it is computed."""

        def swap(gm, plan):
            neg, exp = (n for n in gm.graph.nodes if n.op == "call_function")
            neg.prepend(exp)
            return gm

        hand = Hand()
        gm = hand.returns(hand(torch.ops.aten.exp.default, hand.compute(hand.input("x", 2))))
        with self.assertRaisesRegex(RuntimeError, "was used before it has been defined"):
            run_pipeline(gm, PLAN, [Pass(swap, Stage.HALF, (), Property.LOWERED)])

    def test_every_option_of_the_plan_is_consumed(self):
        """By a pass, as its entry says, or by one of the two decisions before."""
        declared = {option for entry in PIPELINE for option in entry.consumes}
        before = {"Plan.memory_budget", "Plan.recompute", "Plan.offload", "Plan.host_budget"}
        before |= {"Plan.optimizer_state"}
        self.assertEqual(
            {o for o in declared if o.startswith("Plan.")} | before, {*map("Plan.{}".format, ASKED)}
        )

    def test_options_of_a_pass_are_those_of_its_entry(self):
        def reads(gm, plan):
            consume(gm, unit="u#1")
            consume(gm, "Plan.costs")

        entry = Pass(reads, Stage.HALF, (), None, consumes=("Plan.prefetch", "Plan.costs"))
        hand, context = Hand(), Context()
        gm = hand.returns(hand.input("x", 2))
        run_pipeline(gm, PLAN, [entry], context=context)
        by = {"reads": None}
        expected = {("Plan.prefetch", "u#1"): by, ("Plan.costs", "u#1"): by, ("Plan.costs", ""): by}
        self.assertEqual(context.consumed, expected)
        reads(gm, PLAN)  # by hand, nothing is noted
        self.assertEqual(context.consumed, expected)
        other = replace(entry, consumes=("Plan.prefetch",))
        with self.assertRaisesRegex(
            ValueError, r"reads: consumed Plan.costs, which its entry .* does not"
        ):
            run_pipeline(gm, PLAN, [other], context=context)

    def test_any_other_pass_can_be_left_out(self):
        """Leaving one out costs speed or memory; what follows still runs, and the graph still
        verifies.
        """
        (w,) = unit("u", {"w": (4, 2)})
        for name in {entry.name for entry in HALF} - {*ALWAYS}:
            for context in (Context(), Context(is_fused=True)):
                hand = Hand()
                flat, x = hand.input("flat", 4), hand.input("x", 4, 2)
                y = hand.add(x, hand.unshard(flat, w))
                gm = hand.returns(y, hand.reduce_grad(y, flat, w))
                shorter = [entry for entry in HALF if entry.name != name]
                run_pipeline(gm, PLAN, shorter, context=context)

    def test_readme(self):
        """One row a pass: purpose as in the docstring, executor, requirements and property as in
        the list, the test file.
        """
        readme = (ROOT / "passes" / "README.md").read_text()
        rows = re.findall(
            r"^\| \[`(\w+)`\]\(\1\.py\) \| (.+?) \| (\w+) \| (.+?) \| (.+?) \| "
            r"\[test\]\((.+?)\) \|$",
            readme,
            re.MULTILINE,
        )
        self.assertEqual([row[0] for row in rows], [entry.name for entry in PIPELINE])
        for entry, row in zip(PIPELINE, rows, strict=True):
            name, purpose, executor, requires, provides, test = row
            self.assertEqual(executor, "both" if entry.only is None else entry.only.name.lower())
            doc = importlib.import_module(f"compiled_fsdp.passes.{name}").__doc__ or ""
            self.assertEqual(purpose, doc.split("\n\n")[0].replace("\n", " ").rstrip("."))
            self.assertEqual(requires, ", ".join(p.name for p in entry.requires) or "-")
            self.assertEqual(provides, f"{entry.provides.name}: {entry.provides.value}")
            self.assertTrue((ROOT / "passes" / test).resolve().is_file(), test)

    def test_two_blocks(self):
        """Every stage of a model of two blocks of two parameters on two ranks,
        reshard_after_forward=True; of what only moves, and is freed, the lines around it.
        """
        with fake_ranks(2), tempfile.TemporaryDirectory() as folder:
            model = Model()
            for block in model.blocks:
                fully_shard(block)
            found = trace(fully_shard(model), (torch.ones(3, 4, requires_grad=True),), Path(folder))
        self.assertEqual(
            [name.split("_", 1)[1] for name in found if name.startswith("backward")],
            ["capture", *(entry.name for entry in HALF if entry.runs_in(Context()))],
        )
        self.assertExpectedInline(
            body(found[f"joint/{stem('reshard')}"]),
            """\
%primals_1: f32[3,4]
%primals_2: f32[10]
%primals_3: f32[10]
%tangents_1: f32[3,4]
%unshard: f32[4,4] = unshard(%primals_2, 'blocks.0.weight', reshard=gather)
%mm: f32[3,4] = mm(%primals_1, %unshard)
%relu: f32[3,4] = relu(%mm)
%detach: f32[3,4] = detach(%relu)
%unshard_1: f32[3,1] = unshard(%primals_2, 'blocks.0.scale', reshard=gather)
%mul: f32[3,4] = mul(%relu, %unshard_1)
%unshard_2: f32[4,4] = unshard(%primals_3, 'blocks.1.weight', reshard=gather)
%mm_1: f32[3,4] = mm(%mul, %unshard_2)
%relu_1: f32[3,4] = relu(%mm_1)
%detach_1: f32[3,4] = detach(%relu_1)
%unshard_3: f32[3,1] = unshard(%primals_3, 'blocks.1.scale', reshard=gather)
%mul_1: f32[3,4] = mul(%relu_1, %unshard_3)
%mul_2: f32[3,4] = mul(%tangents_1, %relu_1)
%mul_3: f32[3,4] = mul(%tangents_1, %unshard_3)
%sum_1: f32[3,1] = sum(%mul_2, [1], True)
%reduce_grad: f32[10] = reduce_grad(%sum_1, %primals_3, 'blocks.1.scale', reshard=gather)
%detach_2: f32[3,4] = detach(%detach_1)
%threshold_backward: f32[3,4] = threshold_backward(%mul_3, %detach_2, 0)
%t: f32[4,3] = t(%mul)
%mm_2: f32[4,4] = mm(%t, %threshold_backward)
%t_1: f32[4,4] = t(%unshard_2)
%mm_3: f32[3,4] = mm(%threshold_backward, %t_1)
%reduce_grad_1: f32[10] = reduce_grad(%mm_2, %primals_3, 'blocks.1.weight', reshard=gather)
%add: f32[10] = add(%reduce_grad, %reduce_grad_1)
%mul_4: f32[3,4] = mul(%mm_3, %relu)
%mul_5: f32[3,4] = mul(%mm_3, %unshard_1)
%sum_2: f32[3,1] = sum(%mul_4, [1], True)
%reduce_grad_2: f32[10] = reduce_grad(%sum_2, %primals_2, 'blocks.0.scale', reshard=gather)
%detach_3: f32[3,4] = detach(%detach)
%threshold_backward_1: f32[3,4] = threshold_backward(%mul_5, %detach_3, 0)
%t_2: f32[4,3] = t(%primals_1)
%mm_4: f32[4,4] = mm(%t_2, %threshold_backward_1)
%t_3: f32[4,4] = t(%unshard)
%mm_5: f32[3,4] = mm(%threshold_backward_1, %t_3)
%reduce_grad_3: f32[10] = reduce_grad(%mm_4, %primals_2, 'blocks.0.weight', reshard=gather)
%add_1: f32[10] = add(%reduce_grad_2, %reduce_grad_3)
return [%mul_1, %mm_5, %add_1, %add]""",
        )
        self.assertExpectedInline(
            body(found["forward/00_capture"]),
            """\
%primals_1: f32[3,4]
%primals_2: f32[10]
%primals_3: f32[10]
%unshard: f32[4,4] = unshard(%primals_2, 'blocks.0.weight', reshard=gather)
%mm: f32[3,4] = mm(%primals_1, %unshard)
%relu: f32[3,4] = relu(%mm)
%unshard_1: f32[3,1] = unshard(%primals_2, 'blocks.0.scale', reshard=gather)
%mul: f32[3,4] = mul(%relu, %unshard_1)
%unshard_2: f32[4,4] = unshard(%primals_3, 'blocks.1.weight', reshard=gather)
%mm_1: f32[3,4] = mm(%mul, %unshard_2)
%relu_1: f32[3,4] = relu(%mm_1)
%unshard_3: f32[3,1] = unshard(%primals_3, 'blocks.1.scale', reshard=gather)
%mul_1: f32[3,4] = mul(%relu_1, %unshard_3)
%t_2: f32[4,3] = t(%primals_1)
return [%mul_1, %primals_2, %primals_3, %relu, %relu_1, %t_2]""",
        )
        self.assertExpectedInline(
            body(found[f"forward/{stem('lower')}"]),
            """\
%primals_1: f32[3,4]
%primals_2: f32[10]
%primals_3: f32[10]
%slice_tensor: f32[8] = slice(%primals_2, 0, 0, 8)  # blocks.0: gather
%all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%slice_tensor, 2, '0')  # blocks.0: gather
%wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # blocks.0: gather
%view_default: f32[4,4] = view(%wait_tensor_default, [4, 4])  # blocks.0: gather
%mm: f32[3,4] = mm(%primals_1, %view_default)
%relu: f32[3,4] = relu(%mm)
%slice_tensor_1: f32[2] = slice(%primals_2, 0, 8, 10)  # blocks.0: gather
%all_gather_into_tensor_default_1: f32[4] = all_gather_into_tensor(%slice_tensor_1, 2, '0')  # blocks.0: gather
%wait_tensor_default_1: f32[4] = wait_tensor(%all_gather_into_tensor_default_1)  # blocks.0: gather
%view_default_1: f32[4,1] = view(%wait_tensor_default_1, [4, 1])  # blocks.0: gather
%slice_tensor_2: f32[3,1] = slice(%view_default_1, 0, 0, 3)  # blocks.0: gather
%mul: f32[3,4] = mul(%relu, %slice_tensor_2)
%slice_tensor_3: f32[8] = slice(%primals_3, 0, 0, 8)  # blocks.1: gather
%all_gather_into_tensor_default_2: f32[16] = all_gather_into_tensor(%slice_tensor_3, 2, '0')  # blocks.1: gather
%wait_tensor_default_2: f32[16] = wait_tensor(%all_gather_into_tensor_default_2)  # blocks.1: gather
%view_default_2: f32[4,4] = view(%wait_tensor_default_2, [4, 4])  # blocks.1: gather
%mm_1: f32[3,4] = mm(%mul, %view_default_2)
%relu_1: f32[3,4] = relu(%mm_1)
%slice_tensor_4: f32[2] = slice(%primals_3, 0, 8, 10)  # blocks.1: gather
%all_gather_into_tensor_default_3: f32[4] = all_gather_into_tensor(%slice_tensor_4, 2, '0')  # blocks.1: gather
%wait_tensor_default_3: f32[4] = wait_tensor(%all_gather_into_tensor_default_3)  # blocks.1: gather
%view_default_3: f32[4,1] = view(%wait_tensor_default_3, [4, 1])  # blocks.1: gather
%slice_tensor_5: f32[3,1] = slice(%view_default_3, 0, 0, 3)  # blocks.1: gather
%mul_1: f32[3,4] = mul(%relu_1, %slice_tensor_5)
%t_2: f32[4,3] = t(%primals_1)
return [%mul_1, %primals_2, %primals_3, %relu, %relu_1, %t_2]""",
        )
        self.assertExpectedInline(
            body(found[f"forward/{stem('bucket_all_gather')}"]),
            """\
%primals_1: f32[3,4]
%primals_2: f32[10]
%primals_3: f32[10]
%all_gather_into_tensor_default_4: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  # blocks.0: gather
%wait_tensor_default_4: f32[20] = wait_tensor(%all_gather_into_tensor_default_4)  # blocks.0: gather
%view_default_4: f32[2,10] = view(%wait_tensor_default_4, [2, 10])  # blocks.0: gather
%slice_tensor_6: f32[2,8] = slice(%view_default_4, 1, 0, 8)  # blocks.0: gather
%clone_default: f32[2,8] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # blocks.0: gather
%view_default_5: f32[4,4] = view(%clone_default, [4, 4])  # blocks.0: gather
%mm: f32[3,4] = mm(%primals_1, %view_default_5)
%relu: f32[3,4] = relu(%mm)
%view_default_6: f32[2,10] = view(%wait_tensor_default_4, [2, 10])  # blocks.0: gather
%slice_tensor_7: f32[2,2] = slice(%view_default_6, 1, 8, 10)  # blocks.0: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_7, memory_format=torch.contiguous_format)  # blocks.0: gather
%view_default_7: f32[4,1] = view(%clone_default_1, [4, 1])  # blocks.0: gather
%slice_tensor_8: f32[3,1] = slice(%view_default_7, 0, 0, 3)  # blocks.0: gather
%mul: f32[3,4] = mul(%relu, %slice_tensor_8)
%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_3, 2, '0')  # blocks.1: gather
%wait_tensor_default_5: f32[20] = wait_tensor(%all_gather_into_tensor_default_5)  # blocks.1: gather
%view_default_8: f32[2,10] = view(%wait_tensor_default_5, [2, 10])  # blocks.1: gather
%slice_tensor_9: f32[2,8] = slice(%view_default_8, 1, 0, 8)  # blocks.1: gather
%clone_default_2: f32[2,8] = clone(%slice_tensor_9, memory_format=torch.contiguous_format)  # blocks.1: gather
%view_default_9: f32[4,4] = view(%clone_default_2, [4, 4])  # blocks.1: gather
%mm_1: f32[3,4] = mm(%mul, %view_default_9)
%relu_1: f32[3,4] = relu(%mm_1)
%view_default_10: f32[2,10] = view(%wait_tensor_default_5, [2, 10])  # blocks.1: gather
%slice_tensor_10: f32[2,2] = slice(%view_default_10, 1, 8, 10)  # blocks.1: gather
%clone_default_3: f32[2,2] = clone(%slice_tensor_10, memory_format=torch.contiguous_format)  # blocks.1: gather
%view_default_11: f32[4,1] = view(%clone_default_3, [4, 1])  # blocks.1: gather
%slice_tensor_11: f32[3,1] = slice(%view_default_11, 0, 0, 3)  # blocks.1: gather
%mul_1: f32[3,4] = mul(%relu_1, %slice_tensor_11)
%t_2: f32[4,3] = t(%primals_1)
return [%mul_1, %primals_2, %primals_3, %relu, %relu_1, %t_2]""",
        )
        self.assertExpectedInline(
            changes(
                found[f"forward/{stem('bucket_all_gather')}"],
                found[f"forward/{stem('prefetch_all_gather')}"],
            ),
            """\
@@ -4,2 +4,3 @@
 %all_gather_into_tensor_default_4: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  # blocks.0: gather
+%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_3, 2, '0')  # blocks.1: gather
 %wait_tensor_default_4: f32[20] = wait_tensor(%all_gather_into_tensor_default_4)  # blocks.0: gather
@@ -17,3 +18,2 @@
 %mul: f32[3,4] = mul(%relu, %slice_tensor_8)
-%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_3, 2, '0')  # blocks.1: gather
 %wait_tensor_default_5: f32[20] = wait_tensor(%all_gather_into_tensor_default_5)  # blocks.1: gather""",
        )
        self.assertExpectedInline(
            changes(
                found[f"forward/{stem('prefetch_all_gather')}"], found[f"forward/{stem('free')}"]
            ),
            """\
@@ -15,2 +15,3 @@
 %clone_default_1: f32[2,2] = clone(%slice_tensor_7, memory_format=torch.contiguous_format)  # blocks.0: gather
+free(%wait_tensor_default_4)
 %view_default_7: f32[4,1] = view(%clone_default_1, [4, 1])  # blocks.0: gather
@@ -28,2 +29,3 @@
 %clone_default_3: f32[2,2] = clone(%slice_tensor_10, memory_format=torch.contiguous_format)  # blocks.1: gather
+free(%wait_tensor_default_5)
 %view_default_11: f32[4,1] = view(%clone_default_3, [4, 1])  # blocks.1: gather""",
        )
        self.assertExpectedInline(
            body(found["backward/00_capture"]),
            """\
%primals_2: f32[10]
%primals_3: f32[10]
%relu: f32[3,4]
%relu_1: f32[3,4]
%t_2: f32[4,3]
%tangents_1: f32[3,4]
%mul_2: f32[3,4] = mul(%tangents_1, %relu_1)
%unshard_3: f32[3,1] = unshard(%primals_3, 'blocks.1.scale', reshard=gather)
%mul_3: f32[3,4] = mul(%tangents_1, %unshard_3)
%sum_1: f32[3,1] = sum(%mul_2, [1], True)
%reduce_grad: f32[10] = reduce_grad(%sum_1, %primals_3, 'blocks.1.scale', reshard=gather)
%detach_1: f32[3,4] = detach(%relu_1)
%detach_2: f32[3,4] = detach(%detach_1)
%threshold_backward: f32[3,4] = threshold_backward(%mul_3, %detach_2, 0)
%unshard_1: f32[3,1] = unshard(%primals_2, 'blocks.0.scale', reshard=gather)
%mul: f32[3,4] = mul(%relu, %unshard_1)
%t: f32[4,3] = t(%mul)
%mm_2: f32[4,4] = mm(%t, %threshold_backward)
%unshard_2: f32[4,4] = unshard(%primals_3, 'blocks.1.weight', reshard=gather)
%t_1: f32[4,4] = t(%unshard_2)
%mm_3: f32[3,4] = mm(%threshold_backward, %t_1)
%reduce_grad_1: f32[10] = reduce_grad(%mm_2, %primals_3, 'blocks.1.weight', reshard=gather)
%add: f32[10] = add(%reduce_grad, %reduce_grad_1)
%mul_4: f32[3,4] = mul(%mm_3, %relu)
%mul_5: f32[3,4] = mul(%mm_3, %unshard_1)
%sum_2: f32[3,1] = sum(%mul_4, [1], True)
%reduce_grad_2: f32[10] = reduce_grad(%sum_2, %primals_2, 'blocks.0.scale', reshard=gather)
%detach: f32[3,4] = detach(%relu)
%detach_3: f32[3,4] = detach(%detach)
%threshold_backward_1: f32[3,4] = threshold_backward(%mul_5, %detach_3, 0)
%mm_4: f32[4,4] = mm(%t_2, %threshold_backward_1)
%unshard: f32[4,4] = unshard(%primals_2, 'blocks.0.weight', reshard=gather)
%t_3: f32[4,4] = t(%unshard)
%mm_5: f32[3,4] = mm(%threshold_backward_1, %t_3)
%reduce_grad_3: f32[10] = reduce_grad(%mm_4, %primals_2, 'blocks.0.weight', reshard=gather)
%add_1: f32[10] = add(%reduce_grad_2, %reduce_grad_3)
return [%mm_5, %add_1, %add]""",
        )
        self.assertExpectedInline(
            body(found[f"backward/{stem('lower')}"]),
            """\
%primals_2: f32[10]
%primals_3: f32[10]
%relu: f32[3,4]
%relu_1: f32[3,4]
%t_2: f32[4,3]
%tangents_1: f32[3,4]
%mul_2: f32[3,4] = mul(%tangents_1, %relu_1)
%slice_tensor: f32[2] = slice(%primals_3, 0, 8, 10)  # blocks.1: gather
%all_gather_into_tensor_default: f32[4] = all_gather_into_tensor(%slice_tensor, 2, '0')  # blocks.1: gather
%wait_tensor_default: f32[4] = wait_tensor(%all_gather_into_tensor_default)  # blocks.1: gather
%view_default: f32[4,1] = view(%wait_tensor_default, [4, 1])  # blocks.1: gather
%slice_tensor_1: f32[3,1] = slice(%view_default, 0, 0, 3)  # blocks.1: gather
%mul_3: f32[3,4] = mul(%tangents_1, %slice_tensor_1)
%sum_1: f32[3,1] = sum(%mul_2, [1], True)
%constant_pad_nd_default: f32[4,1] = constant_pad_nd(%sum_1, [0, 0, 0, 1])  # blocks.1: reduce
%reshape_default: f32[2,2] = reshape(%constant_pad_nd_default, [2, 2])  # blocks.1: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # blocks.1: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, '0')  # blocks.1: reduce
%wait_tensor_default_1: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # blocks.1: reduce
%div_tensor: f32[2] = div(%wait_tensor_default_1, 2.0)  # blocks.1: reduce
%constant_pad_nd_default_1: f32[10] = constant_pad_nd(%div_tensor, [8, 0])  # blocks.1: reduce
%detach_1: f32[3,4] = detach(%relu_1)
%detach_2: f32[3,4] = detach(%detach_1)
%threshold_backward: f32[3,4] = threshold_backward(%mul_3, %detach_2, 0)
%slice_tensor_2: f32[2] = slice(%primals_2, 0, 8, 10)  # blocks.0: gather
%all_gather_into_tensor_default_1: f32[4] = all_gather_into_tensor(%slice_tensor_2, 2, '0')  # blocks.0: gather
%wait_tensor_default_2: f32[4] = wait_tensor(%all_gather_into_tensor_default_1)  # blocks.0: gather
%view_default_1: f32[4,1] = view(%wait_tensor_default_2, [4, 1])  # blocks.0: gather
%slice_tensor_3: f32[3,1] = slice(%view_default_1, 0, 0, 3)  # blocks.0: gather
%mul: f32[3,4] = mul(%relu, %slice_tensor_3)
%t: f32[4,3] = t(%mul)
%mm_2: f32[4,4] = mm(%t, %threshold_backward)
%slice_tensor_4: f32[8] = slice(%primals_3, 0, 0, 8)  # blocks.1: gather
%all_gather_into_tensor_default_2: f32[16] = all_gather_into_tensor(%slice_tensor_4, 2, '0')  # blocks.1: gather
%wait_tensor_default_3: f32[16] = wait_tensor(%all_gather_into_tensor_default_2)  # blocks.1: gather
%view_default_2: f32[4,4] = view(%wait_tensor_default_3, [4, 4])  # blocks.1: gather
%t_1: f32[4,4] = t(%view_default_2)
%mm_3: f32[3,4] = mm(%threshold_backward, %t_1)
%reshape_default_2: f32[2,8] = reshape(%mm_2, [2, 8])  # blocks.1: reduce
%reshape_default_3: f32[16] = reshape(%reshape_default_2, [16])  # blocks.1: reduce
%reduce_scatter_tensor_default_1: f32[8] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, '0')  # blocks.1: reduce
%wait_tensor_default_4: f32[8] = wait_tensor(%reduce_scatter_tensor_default_1)  # blocks.1: reduce
%div_tensor_1: f32[8] = div(%wait_tensor_default_4, 2.0)  # blocks.1: reduce
%constant_pad_nd_default_2: f32[10] = constant_pad_nd(%div_tensor_1, [0, 2])  # blocks.1: reduce
%add: f32[10] = add(%constant_pad_nd_default_1, %constant_pad_nd_default_2)
mark_grads_(%add, %primals_3, [0, 8])
%mul_4: f32[3,4] = mul(%mm_3, %relu)
%mul_5: f32[3,4] = mul(%mm_3, %slice_tensor_3)
%sum_2: f32[3,1] = sum(%mul_4, [1], True)
%constant_pad_nd_default_3: f32[4,1] = constant_pad_nd(%sum_2, [0, 0, 0, 1])  # blocks.0: reduce
%reshape_default_4: f32[2,2] = reshape(%constant_pad_nd_default_3, [2, 2])  # blocks.0: reduce
%reshape_default_5: f32[4] = reshape(%reshape_default_4, [4])  # blocks.0: reduce
%reduce_scatter_tensor_default_2: f32[2] = reduce_scatter_tensor(%reshape_default_5, 'sum', 2, '0')  # blocks.0: reduce
%wait_tensor_default_5: f32[2] = wait_tensor(%reduce_scatter_tensor_default_2)  # blocks.0: reduce
%div_tensor_2: f32[2] = div(%wait_tensor_default_5, 2.0)  # blocks.0: reduce
%constant_pad_nd_default_4: f32[10] = constant_pad_nd(%div_tensor_2, [8, 0])  # blocks.0: reduce
%detach: f32[3,4] = detach(%relu)
%detach_3: f32[3,4] = detach(%detach)
%threshold_backward_1: f32[3,4] = threshold_backward(%mul_5, %detach_3, 0)
%mm_4: f32[4,4] = mm(%t_2, %threshold_backward_1)
%slice_tensor_5: f32[8] = slice(%primals_2, 0, 0, 8)  # blocks.0: gather
%all_gather_into_tensor_default_3: f32[16] = all_gather_into_tensor(%slice_tensor_5, 2, '0')  # blocks.0: gather
%wait_tensor_default_6: f32[16] = wait_tensor(%all_gather_into_tensor_default_3)  # blocks.0: gather
%view_default_3: f32[4,4] = view(%wait_tensor_default_6, [4, 4])  # blocks.0: gather
%t_3: f32[4,4] = t(%view_default_3)
%mm_5: f32[3,4] = mm(%threshold_backward_1, %t_3)
%reshape_default_6: f32[2,8] = reshape(%mm_4, [2, 8])  # blocks.0: reduce
%reshape_default_7: f32[16] = reshape(%reshape_default_6, [16])  # blocks.0: reduce
%reduce_scatter_tensor_default_3: f32[8] = reduce_scatter_tensor(%reshape_default_7, 'sum', 2, '0')  # blocks.0: reduce
%wait_tensor_default_7: f32[8] = wait_tensor(%reduce_scatter_tensor_default_3)  # blocks.0: reduce
%div_tensor_3: f32[8] = div(%wait_tensor_default_7, 2.0)  # blocks.0: reduce
%constant_pad_nd_default_5: f32[10] = constant_pad_nd(%div_tensor_3, [0, 2])  # blocks.0: reduce
%add_1: f32[10] = add(%constant_pad_nd_default_4, %constant_pad_nd_default_5)
mark_grads_(%add_1, %primals_2, [0, 8])
return [%mm_5, %add_1, %add]""",
        )
        self.assertExpectedInline(
            body(found[f"backward/{stem('bucket_reduce_scatter')}"]),
            """\
%primals_2: f32[10]
%primals_3: f32[10]
%relu: f32[3,4]
%relu_1: f32[3,4]
%t_2: f32[4,3]
%tangents_1: f32[3,4]
%mul_2: f32[3,4] = mul(%tangents_1, %relu_1)
%all_gather_into_tensor_default_4: f32[20] = all_gather_into_tensor(%primals_3, 2, '0')  # blocks.1: gather
%wait_tensor_default_8: f32[20] = wait_tensor(%all_gather_into_tensor_default_4)  # blocks.1: gather
%view_default_6: f32[2,10] = view(%wait_tensor_default_8, [2, 10])  # blocks.1: gather
%slice_tensor_7: f32[2,2] = slice(%view_default_6, 1, 8, 10)  # blocks.1: gather
%clone_default_1: f32[2,2] = clone(%slice_tensor_7, memory_format=torch.contiguous_format)  # blocks.1: gather
%view_default_7: f32[4,1] = view(%clone_default_1, [4, 1])  # blocks.1: gather
%slice_tensor_8: f32[3,1] = slice(%view_default_7, 0, 0, 3)  # blocks.1: gather
%mul_3: f32[3,4] = mul(%tangents_1, %slice_tensor_8)
%sum_1: f32[3,1] = sum(%mul_2, [1], True)
%detach_1: f32[3,4] = detach(%relu_1)
%detach_2: f32[3,4] = detach(%detach_1)
%threshold_backward: f32[3,4] = threshold_backward(%mul_3, %detach_2, 0)
%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  # blocks.0: gather
%wait_tensor_default_9: f32[20] = wait_tensor(%all_gather_into_tensor_default_5)  # blocks.0: gather
%view_default_10: f32[2,10] = view(%wait_tensor_default_9, [2, 10])  # blocks.0: gather
%slice_tensor_10: f32[2,2] = slice(%view_default_10, 1, 8, 10)  # blocks.0: gather
%clone_default_3: f32[2,2] = clone(%slice_tensor_10, memory_format=torch.contiguous_format)  # blocks.0: gather
%view_default_11: f32[4,1] = view(%clone_default_3, [4, 1])  # blocks.0: gather
%slice_tensor_11: f32[3,1] = slice(%view_default_11, 0, 0, 3)  # blocks.0: gather
%mul: f32[3,4] = mul(%relu, %slice_tensor_11)
%t: f32[4,3] = t(%mul)
%mm_2: f32[4,4] = mm(%t, %threshold_backward)
%view_default_4: f32[2,10] = view(%wait_tensor_default_8, [2, 10])  # blocks.1: gather
%slice_tensor_6: f32[2,8] = slice(%view_default_4, 1, 0, 8)  # blocks.1: gather
%clone_default: f32[2,8] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # blocks.1: gather
%view_default_5: f32[4,4] = view(%clone_default, [4, 4])  # blocks.1: gather
%t_1: f32[4,4] = t(%view_default_5)
%mm_3: f32[3,4] = mm(%threshold_backward, %t_1)
%reshape_default_8: f32[2,8] = reshape(%mm_2, [2, 8])  # blocks.1: reduce
%constant_pad_nd_default_6: f32[4,1] = constant_pad_nd(%sum_1, [0, 0, 0, 1])  # blocks.1: reduce
%reshape_default_9: f32[2,2] = reshape(%constant_pad_nd_default_6, [2, 2])  # blocks.1: reduce
%cat_default: f32[2,10] = cat([%reshape_default_8, %reshape_default_9], 1)  # blocks.1: reduce
%reshape_default_10: f32[20] = reshape(%cat_default, [20])  # blocks.1: reduce
%reduce_scatter_tensor_default_4: f32[10] = reduce_scatter_tensor(%reshape_default_10, 'sum', 2, '0')  # blocks.1: reduce
%wait_tensor_default_10: f32[10] = wait_tensor(%reduce_scatter_tensor_default_4)  # blocks.1: reduce
%div_tensor_4: f32[10] = div(%wait_tensor_default_10, 2.0)  # blocks.1: reduce
mark_grads_(%div_tensor_4, %primals_3, [0, 8])
%mul_4: f32[3,4] = mul(%mm_3, %relu)
%mul_5: f32[3,4] = mul(%mm_3, %slice_tensor_11)
%sum_2: f32[3,1] = sum(%mul_4, [1], True)
%detach: f32[3,4] = detach(%relu)
%detach_3: f32[3,4] = detach(%detach)
%threshold_backward_1: f32[3,4] = threshold_backward(%mul_5, %detach_3, 0)
%mm_4: f32[4,4] = mm(%t_2, %threshold_backward_1)
%view_default_8: f32[2,10] = view(%wait_tensor_default_9, [2, 10])  # blocks.0: gather
%slice_tensor_9: f32[2,8] = slice(%view_default_8, 1, 0, 8)  # blocks.0: gather
%clone_default_2: f32[2,8] = clone(%slice_tensor_9, memory_format=torch.contiguous_format)  # blocks.0: gather
%view_default_9: f32[4,4] = view(%clone_default_2, [4, 4])  # blocks.0: gather
%t_3: f32[4,4] = t(%view_default_9)
%mm_5: f32[3,4] = mm(%threshold_backward_1, %t_3)
%reshape_default_11: f32[2,8] = reshape(%mm_4, [2, 8])  # blocks.0: reduce
%constant_pad_nd_default_7: f32[4,1] = constant_pad_nd(%sum_2, [0, 0, 0, 1])  # blocks.0: reduce
%reshape_default_12: f32[2,2] = reshape(%constant_pad_nd_default_7, [2, 2])  # blocks.0: reduce
%cat_default_1: f32[2,10] = cat([%reshape_default_11, %reshape_default_12], 1)  # blocks.0: reduce
%reshape_default_13: f32[20] = reshape(%cat_default_1, [20])  # blocks.0: reduce
%reduce_scatter_tensor_default_5: f32[10] = reduce_scatter_tensor(%reshape_default_13, 'sum', 2, '0')  # blocks.0: reduce
%wait_tensor_default_11: f32[10] = wait_tensor(%reduce_scatter_tensor_default_5)  # blocks.0: reduce
%div_tensor_5: f32[10] = div(%wait_tensor_default_11, 2.0)  # blocks.0: reduce
mark_grads_(%div_tensor_5, %primals_2, [0, 8])
return [%mm_5, %div_tensor_5, %div_tensor_4]""",
        )
        self.assertExpectedInline(
            changes(
                found[f"backward/{stem('bucket_reduce_scatter')}"],
                found[f"backward/{stem('delay_wait')}"],
            ),
            """\
@@ -8,2 +8,3 @@
 %all_gather_into_tensor_default_4: f32[20] = all_gather_into_tensor(%primals_3, 2, '0')  # blocks.1: gather
+%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  # blocks.0: gather
 %wait_tensor_default_8: f32[20] = wait_tensor(%all_gather_into_tensor_default_4)  # blocks.1: gather
@@ -19,3 +20,2 @@
 %threshold_backward: f32[3,4] = threshold_backward(%mul_3, %detach_2, 0)
-%all_gather_into_tensor_default_5: f32[20] = all_gather_into_tensor(%primals_2, 2, '0')  # blocks.0: gather
 %wait_tensor_default_9: f32[20] = wait_tensor(%all_gather_into_tensor_default_5)  # blocks.0: gather
@@ -28,3 +28,2 @@
 %t: f32[4,3] = t(%mul)
-%mm_2: f32[4,4] = mm(%t, %threshold_backward)
 %view_default_4: f32[2,10] = view(%wait_tensor_default_8, [2, 10])  # blocks.1: gather
@@ -35,2 +34,4 @@
 %mm_3: f32[3,4] = mm(%threshold_backward, %t_1)
+%mul_5: f32[3,4] = mul(%mm_3, %slice_tensor_11)
+%mm_2: f32[4,4] = mm(%t, %threshold_backward)
 %reshape_default_8: f32[2,8] = reshape(%mm_2, [2, 8])  # blocks.1: reduce
@@ -41,7 +42,3 @@
 %reduce_scatter_tensor_default_4: f32[10] = reduce_scatter_tensor(%reshape_default_10, 'sum', 2, '0')  # blocks.1: reduce
-%wait_tensor_default_10: f32[10] = wait_tensor(%reduce_scatter_tensor_default_4)  # blocks.1: reduce
-%div_tensor_4: f32[10] = div(%wait_tensor_default_10, 2.0)  # blocks.1: reduce
-mark_grads_(%div_tensor_4, %primals_3, [0, 8])
 %mul_4: f32[3,4] = mul(%mm_3, %relu)
-%mul_5: f32[3,4] = mul(%mm_3, %slice_tensor_11)
 %sum_2: f32[3,1] = sum(%mul_4, [1], True)
@@ -62,2 +59,5 @@
 %reshape_default_13: f32[20] = reshape(%cat_default_1, [20])  # blocks.0: reduce
+%wait_tensor_default_10: f32[10] = wait_tensor(%reduce_scatter_tensor_default_4)  # blocks.1: reduce
+%div_tensor_4: f32[10] = div(%wait_tensor_default_10, 2.0)  # blocks.1: reduce
+mark_grads_(%div_tensor_4, %primals_3, [0, 8])
 %reduce_scatter_tensor_default_5: f32[10] = reduce_scatter_tensor(%reshape_default_13, 'sum', 2, '0')  # blocks.0: reduce""",
        )
        self.assertExpectedInline(
            changes(found[f"backward/{stem('delay_wait')}"], found[f"backward/{stem('free')}"]),
            """\
@@ -31,2 +31,3 @@
 %clone_default: f32[2,8] = clone(%slice_tensor_6, memory_format=torch.contiguous_format)  # blocks.1: gather
+free(%wait_tensor_default_8)
 %view_default_5: f32[4,4] = view(%clone_default, [4, 4])  # blocks.1: gather
@@ -51,2 +52,3 @@
 %clone_default_2: f32[2,8] = clone(%slice_tensor_9, memory_format=torch.contiguous_format)  # blocks.0: gather
+free(%wait_tensor_default_9)
 %view_default_9: f32[4,4] = view(%clone_default_2, [4, 4])  # blocks.0: gather""",
        )


class TestOwnPasses(GraphTest):
    """`compiled_fsdp.pipeline`: passes of a user's, and passes left out."""

    def setUp(self) -> None:
        self.enterContext(fake_ranks(2))

    def compiled(self) -> Any:
        model = Model()
        for block in model.blocks:
            fully_shard(block)
        return torch.compile(fully_shard(model), backend="compiled_fsdp_eager", fullgraph=True)

    def step(self) -> None:
        call = self.compiled()  # backward needs it
        call(torch.ones(3, 4, requires_grad=True)).sum().backward()

    def test_the_example_of_the_readme(self):
        readme = (ROOT / "passes" / "README.md").read_text()
        (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        names: dict[str, Any] = {"model": self.compiled(), "batch": torch.ones(3, 4)}
        with planned(bucket_bytes=0):
            exec(code, names)
        sent = {unit.split("#")[0]: n for unit, n in names["sent"].items()}
        flat, scale, reduced = 10 * 4, 2 * 4, 2 * 10 * 4
        self.assertEqual(
            sent,
            {"blocks.0": flat + scale + reduced, "blocks.1": flat + flat + reduced},
            "nobody asks for the gradient of the input: backward reads no weight of the first",
        )

    def test_a_pass_stands_where_it_is_told(self):
        seen: list[list[str]] = []

        def look(gm, plan):
            seen.append(ops(gm.graph))

        with planned(bucket_bytes=0), pipeline(look, after="name_groups"):
            with pipeline(look, before="lower"), pipeline(look, after="lower"):
                self.step()
            self.assertEqual([entry.name for entry in current(Stage.JOINT)][-1], "look")
        joint, forward, lowered, *_ = seen
        self.assertIn("reduce_grad", joint)
        self.assertIn("unshard", forward)
        self.assertNotIn("reduce_grad", forward)
        self.assertIn("all_gather_into_tensor", lowered)
        self.assertEqual(len(seen), 5)
        self.assertEqual(current(Stage.JOINT) + current(Stage.HALF), PIPELINE)

    def test_a_dump_with_a_pass_before_lower(self):
        """Its graphs are checked from `lower` on."""

        def look(gm, plan):
            pass

        with tempfile.TemporaryDirectory() as folder, pipeline(look, before="lower"):
            with dumped_to(folder):
                self.step()
            graphs = read_folder(Path(folder))[0].graphs
            self.assertEqual(
                [entry.name for entry in graphs[1].passes][:3], ["capture", "look", "lower"]
            )
            self.assertEqual(list(violations(read_folder(Path(folder)))), [])

    def test_print_graph(self):
        with redirect_stdout(io.StringIO()) as text, pipeline(print_graph, after="lower"):
            self.step()
        self.assertRegex(
            text.getvalue(), r"^# forward\n%primals_1: f32\[3,4\]\n(.*\n)+# backward\n"
        )

    def test_print_the_joint_graph(self):
        with redirect_stdout(io.StringIO()) as text, pipeline(print_graph, after="name_groups"):
            self.step()
        self.assertEqual(re.findall(r"^# .*$", text.getvalue(), re.MULTILINE), ["# joint"])

    def test_left_out(self):
        """The graph of a shorter pipeline, with the same numbers."""
        with tempfile.TemporaryDirectory() as folder, pipeline(without=("free", "delay_wait")):
            found = trace(self.compiled()._orig_mod, (torch.ones(3, 4),), Path(folder))
        last = max(name for name in found if name.startswith("forward"))
        self.assertRegex(last, r"/\d+_verify$")
        self.assertNotIn("free(", found[last])
        self.assertFalse([name for name in found if name.endswith("delay_wait")])

    def test_what_breaks_a_rule_is_found(self):
        def drop_waits(gm, plan):
            for wait in find(gm.graph, WAIT):
                wait.replace_all_uses_with(wait.args[0])
                gm.graph.erase_node(wait)

        with (
            pipeline(drop_waits, before="verify"),
            self.assertRaisesRegex(Exception, "Every collective is awaited exactly once"),
        ):
            self.step()

    def test_another_module_is_refused(self):
        def copied(gm, plan):
            return deepcopy(gm)

        with (
            pipeline(copied, after="lower"),
            self.assertRaisesRegex(Exception, "pass copied returned .*Rewrite gm.graph in place"),
        ):
            self.step()

    def test_wrong_arguments(self):
        def mine(gm, plan):
            return gm

        for own, options, said in (
            ([mine], {"after": "verify"}, "after verify nothing would be checked"),
            ([mine], {"after": "fuse"}, "there is no pass 'fuse'; there are "),
            ([mine], {}, "with 1 passes; passes of one's own need one of the two"),
            ([mine], {"before": "free", "after": "lower"}, "need one of the two"),
            ([], {"before": "free"}, "with 0 passes"),
            ([lambda gm, plan: gm], {"before": "free"}, "with a name of its own"),
            (["free"], {"before": "free"}, "'free' is no pass"),
            ([], {"without": "verify"}, "verify cannot be left out"),
            ([], {"without": "lower"}, "lower cannot be left out: without it every parameter"),
            ([], {"without": ("free", "watch_heads")}, "watch_heads cannot be left out: without"),
            ([], {"without": ["reshard", "unshard"]}, "there is no pass 'unshard'"),
        ):
            with self.assertRaisesRegex(ValueError, said), pipeline(*own, **options):
                pass
        self.assertEqual(current(Stage.JOINT) + current(Stage.HALF), PIPELINE)

    def test_key_of_caches(self):
        keys = [key()]
        with pipeline(without="free"):
            keys.append(key())
            with pipeline(without="delay_wait"):
                keys.append(key())
            with pipeline(print_graph, before="verify"):
                self.assertIsNone(key())
        self.assertEqual(len(set(keys)), 3)
        with pipeline(without="free"):
            ours = [part().uuid() for part in (JointPass, HalfPass)]
        self.assertEqual(len({*ours, JointPass().uuid(), HalfPass().uuid()}), 4)
        with pipeline(print_graph, before="verify"):
            self.assertEqual([part().uuid() for part in (JointPass, HalfPass)], [None, None])


class Returns(nn.Module):
    """The user reads one of two views of a weight, and wants the weight back as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        up, down = self.weight.chunk(2)
        return (x @ up.t()).relu() @ down, self.weight


class TestUserOutputs(GraphTest):
    def test_weight_is_returned(self):
        """No error from `verify`, no free of what the user gets, and backward gets its own; under
        every reshard class.
        """
        for reshard in (True, False, 2):
            with fake_ranks(4), tempfile.TemporaryDirectory() as folder:
                model = fully_shard(Returns(), reshard_after_forward=reshard)
                found = trace(model, (torch.ones(3, 4),), Path(folder))
                self.assertNotIn("free(", found[f"forward/{stem('verify')}"])
                with torch.no_grad():
                    torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(
                        torch.ones(3, 4)
                    )
