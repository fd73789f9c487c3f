"""Graphs whose parameters and gradients travel as codes: what `lower` and the bucket passes make of
them, what they cost, and mutations that `verify` refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from compiled_fsdp.passes.base import Context, run_pipeline
from compiled_fsdp.passes.bucket_all_gather import bucket_all_gather
from compiled_fsdp.passes.bucket_reduce_scatter import bucket_reduce_scatter
from compiled_fsdp.passes.lower import lower
from compiled_fsdp.passes.outline import outline
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.verify import check, verify
from kit.passes_harness import PLAN, GraphTest, Hand, aten, numel, unit

from compiled_fsdp import planned
from compiled_fsdp.dump.graph_json import of_text, to_text
from compiled_fsdp.dump.graph_record import Bucket
from compiled_fsdp.dump.settings import settings
from compiled_fsdp.ir.collectives import CONVERT
from compiled_fsdp.ir.graph import Builder, find, output
from compiled_fsdp.ir.meta import get_tag, set_context
from compiled_fsdp.ir.printer import provenance, show
from compiled_fsdp.ir.regions import find_regions
from compiled_fsdp.ir.schema import (
    ALL_TO_ALL,
    DECODE,
    DECODE_SUM,
    ENCODE,
    GATHER_AHEAD,
    REDUCE_LATER,
)
from compiled_fsdp.ir.subgraphs import INVOKE, called_by
from compiled_fsdp.planning.costs import traffic
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.invariant import GraphInvariantError

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compiled_fsdp.ir.spec import ParamSpec

INT8 = torch.int8
CODED = {"gather_quantized": INT8, "reduce_quantized": INT8, "reduce_algorithm": "all_to_all"}


def weight_and_bias() -> list[ParamSpec]:
    """512 elements of a weight on each of two ranks, as codes, and 16 of a bias, exact."""
    weight, bias = unit("u", {"w": (32, 32), "b": (32,)}, **CODED)
    return [weight, replace(bias, gather_quantized=None, reduce_quantized=None)]


def graph_of(*specs: ParamSpec) -> GraphModule:
    """A unit gathered, computed with and reduced."""
    hand = Hand()
    flat = hand.input("flat", numel(list(specs)))
    full = [hand.compute(hand.unshard(flat, spec)) for spec in specs]
    grads = [hand.reduce_grad(hand.compute(f), flat, s) for f, s in zip(full, specs, strict=True)]
    total = grads[0]
    for grad in grads[1:]:
        total = hand.add(total, grad)
    return hand.returns(*full, total)


class TestGraphs(GraphTest):
    def test_one_parameter(self):
        self.assertGraph(
            lower(graph_of(weight_and_bias()[0]), PLAN),
            """\
%flat: f32[512]
%view_default: f32[1,512] = view(%flat, [1, 512])  # u: gather
%encode_default: u8[1,520] = encode([%view_default], ['int8'])  # u: gather
%view_default_1: u8[520] = view(%encode_default, [520])  # u: gather
%all_gather_into_tensor_default: u8[1040] = all_gather_into_tensor(%view_default_1, 2, 'shard')  # u: gather
%wait_tensor_default: u8[1040] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default_2: u8[2,520] = view(%wait_tensor_default, [2, 520])  # u: gather
%slice_tensor: u8[2,520] = slice(%view_default_2, 1, 0, 520)  # u: gather
%decode_default: f32[2,512] = decode(%slice_tensor, 512, f32, 'int8')  # u: gather
%view_default_3: f32[32,32] = view(%decode_default, [32, 32])  # u: gather
%neg_default: f32[32,32] = neg(%view_default_3)
%neg_default_1: f32[32,32] = neg(%neg_default)
%reshape_default: f32[2,512] = reshape(%neg_default_1, [2, 512])  # u: reduce
%encode_default_1: u8[2,520] = encode([%reshape_default], ['int8'])  # u: reduce
%all_to_all_default: u8[2,520] = all_to_all([%encode_default_1], 2, 'shard')  # u: reduce
%wait_tensor_default_1: u8[2,520] = wait_tensor(%all_to_all_default)  # u: reduce
%slice_tensor_1: u8[2,520] = slice(%wait_tensor_default_1, 1, 0, 520)  # u: reduce
%decode_sum_default: f32[512] = decode_sum(%slice_tensor_1, 512, f32, 'int8')  # u: reduce
%div_tensor: f32[512] = div(%decode_sum_default, 2.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
return [%neg_default, %div_tensor]""",
        )

    def test_one_message_of_a_unit(self):
        """The exact parameter is in it, as bytes."""
        gm = lower(graph_of(*weight_and_bias()), PLAN)
        gm = bucket_reduce_scatter(bucket_all_gather(gm, PLAN), PLAN)
        (gather,), (reduction,) = (find_regions(gm.graph, kind) for kind in ("gather", "reduce"))
        self.assertExpectedInline(
            "\n".join(
                line for line in show(gm.graph).splitlines() if "code" in line or " = all_" in line
            ),
            """\
%encode_default_2: u8[1,584] = encode([%view_default_5, %view_default_6], ['int8', ''])  # u: gather
%view_default_7: u8[584] = view(%encode_default_2, [584])  # u: gather
%all_gather_into_tensor_default_2: u8[1168] = all_gather_into_tensor(%view_default_7, 2, 'shard')  # u: gather
%decode_default_1: f32[2,512] = decode(%slice_tensor_6, 512, f32, 'int8')  # u: gather
%view_default_9: f32[32,32] = view(%decode_default_1, [32, 32])  # u: gather
%decode_default_2: f32[2,16] = decode(%slice_tensor_7, 16, f32, '')  # u: gather
%view_default_11: f32[32] = view(%decode_default_2, [32])  # u: gather
%encode_default_3: u8[2,584] = encode([%reshape_default_2, %reshape_default_3], ['int8', ''])  # u: reduce
%all_to_all_default_2: u8[2,584] = all_to_all([%encode_default_3], 2, 'shard')  # u: reduce
%decode_sum_default_1: f32[512] = decode_sum(%slice_tensor_8, 512, f32, 'int8')  # u: reduce
%decode_sum_default_2: f32[16] = decode_sum(%slice_tensor_9, 16, f32, '')  # u: reduce
%cat_default: f32[528] = cat([%decode_sum_default_1, %decode_sum_default_2])  # u: reduce""",
        )
        self.assertEqual((gather.sent_bytes, reduction.sent_bytes), (584, 2 * 584))

    def test_exact_neighbours_alone_travel_as_before(self):
        """A near miss: nothing in the bucket is coded."""
        exact = [
            replace(s, gather_quantized=None, reduce_quantized=None) for s in weight_and_bias()
        ]
        gm = lower(graph_of(*exact), PLAN)
        gm = bucket_reduce_scatter(bucket_all_gather(gm, PLAN), PLAN)
        self.assertEqual(find(gm.graph, ENCODE, DECODE, DECODE_SUM), [])
        self.assertNotIn("u8", show(gm.graph))

    def test_one_rank_sends_nothing(self):
        (spec,) = unit("u", {"w": (32, 32)}, world=1, **CODED)
        self.assertEqual(find(lower(graph_of(spec), PLAN).graph, ENCODE, DECODE, DECODE_SUM), [])


class TestWhatItCosts(GraphTest):
    def setUp(self):
        self.gm = run_pipeline(graph_of(*weight_and_bias()), PLAN, HALF)

    def test_bytes_on_the_wire(self):
        """Half of what each collective carries, over two ranks; in prices, records and dumps."""
        regions = [find_regions(self.gm.graph, kind)[0] for kind in ("gather", "reduce")]
        for region in regions:
            self.assertEqual(traffic(region.starts[0])[0], 584)
            bucket = Bucket.of(region)
            self.assertEqual((bucket.num_bytes, bucket.sent, bucket.dtype), (1168, 584, "uint8"))
        self.assertIn("1168 bytes gathered", provenance(self.gm.graph, "lower", []))

    def test_dumps(self):
        """Graph and plan are read as they were written."""
        plan = Plan(gather_quantized=INT8, reduce_quantized=torch.float8_e4m3fn, exact=("head.*",))
        read, found, _ = of_text(to_text(self.gm.graph, "free", plan))
        self.assertEqual(found, plan)
        self.assertEqual(show(read.graph), show(self.gm.graph))
        with planned(gather_quantized=INT8, exact=("head.*",)):
            text = json.dumps(settings())
        self.assertIn('"gather_quantized": "int8", "reduce_quantized": null', text)

    def test_memory(self):
        """Beside what the user holds: bytes, and the parameters that they stand for."""
        hand = Hand()
        flat = hand.input("flat", 528)
        full = [hand.unshard(flat, spec) for spec in weight_and_bias()]
        y = hand(aten.mm.default, hand(aten.add.Tensor, *full), full[0])
        graph = run_pipeline(hand.returns(y), PLAN, HALF).graph
        found = profile(graph)
        at_mm = {(a.kind, a.owner): a.num_bytes for a in found.alive}
        self.assertEqual(at_mm[("gathered parameter", "w")], 4096)
        self.assertEqual(
            found.curve.during[[n.target for n in found.nodes].index(DECODE)], 1168 + 4096
        )


class TestVerify(GraphTest):
    def setUp(self):
        self.gm = run_pipeline(graph_of(*weight_and_bias()), PLAN, HALF[:-1])

    def captured(self) -> GraphModule:
        """With `Captured`, which only a run of the pipeline has,
        so the mutation is a pass of it.
        """
        return graph_of(*weight_and_bias())

    def refusal(self, mutate) -> str:
        """The text for a graph that a pass has changed before it is verified."""

        def mutation(gm: GraphModule, plan: object) -> GraphModule:
            mutate(gm)
            return gm

        at = [entry.name for entry in HALF].index("summarize")
        entry = replace(HALF[at], function=mutation, provides=None, requires=())
        with self.assertRaises(GraphInvariantError) as caught:
            run_pipeline(self.captured(), PLAN, (*HALF[:at], entry, *HALF[at:]))
        return str(caught.exception)

    def test_good(self):
        self.assertUnchanged(verify, self.gm, PLAN)
        check(self.gm, PLAN, "here")

    def test_sum_of_codes(self):
        """Codes of several ranks have scales of their own: their sum means nothing."""

        def add_codes(gm: GraphModule) -> None:
            node = find(gm.graph, DECODE_SUM)[0]
            run = Builder(node, node, get_tag(node))
            codes = run(aten.slice.Tensor, node.args[0], 1, 0, 512)
            summed = run(aten.sum.dim_IntList, run(aten.view.dtype, codes, INT8), [0])
            node.replace_all_uses_with(run(aten._to_copy.default, summed, dtype=torch.float32))
            gm.graph.erase_node(node)

        self.assertIn("is not what was captured", self.refusal(add_codes))

    def test_decoded_as_another_dtype(self):
        def as_fp8(gm: GraphModule) -> None:
            node = find(gm.graph, DECODE)[0]
            node.args = (*node.args[:3], "float8_e4m3fn")

        self.assertIn("is not what was captured", self.refusal(as_fp8))

    def test_coded_as_another_dtype(self):
        """By the sender: what arrives is taken for int8."""

        def as_fp8(gm: GraphModule) -> None:
            node = find(gm.graph, ENCODE)[0]
            node.args = (node.args[0], ["float8_e4m3fn", ""])

        self.assertIn("is not what was captured", self.refusal(as_fp8))

    def test_overlapped_as_another_dtype(self):
        """What the unit gathers ahead, or finishes, has other codes than what was captured."""
        self.captured = lambda: graph_of(*(replace(s, overlap="step") for s in weight_and_bias()))
        for op, at in ((GATHER_AHEAD, 8), (REDUCE_LATER, 3)):

            def as_fp8(gm: GraphModule, op=op, at=at) -> None:
                (node,) = find(gm.graph, op)
                self.assertEqual(node.args[at], ["int8", ""])
                node.args = (*node.args[:at], ["float8_e4m3fn", ""], *node.args[at + 1 :])

            self.assertIn("captured", self.refusal(as_fp8).split("\n")[0])

    def test_columns_of_another_parameter(self):
        def shifted(gm: GraphModule) -> None:
            (cut,) = find(gm.graph, DECODE)[1].all_input_nodes
            cut.args = (cut.args[0], 1, 512, 576)

        self.assertIn("is not what was captured", self.refusal(shifted))

    def test_the_owner_keeps_its_exact_gradient(self):
        """What is sent is not what is reduced: the exact rows instead of codes."""

        def exact_rows(gm: GraphModule) -> None:
            (node,) = find(gm.graph, ALL_TO_ALL)
            encoded: Node = node.args[0][0]
            node.args = ([encoded.args[0][0]], *node.args[1:])

        text = self.refusal(exact_rows)
        self.assertIn("its settings name ['all_to_all(1168 x torch.uint8, 2, shard)']", text)

    def test_output_is_there(self):
        self.assertEqual(output(self.gm.graph).op, "output")


def casts(changes: dict[str, Any], *, is_coded: bool = True) -> int:
    """Casts before the reduction of a gradient of a weight in bf16."""
    weight, bias = weight_and_bias()
    spec = replace(weight if is_coded else bias, dtype=torch.bfloat16, **changes)
    gm = lower(graph_of(spec, replace(weight, dtype=torch.bfloat16, offset=4096)), PLAN)
    (region, *_) = [r for r in find_regions(gm.graph, "reduce") if spec in r.tag.specs]
    return sum(node.target is CONVERT and node < region.starts[0] for node in region.nodes)


def test_codes_are_made_of_gradients_as_they_are() -> None:
    """Not of a wider copy, which has the same values; but of what a cast or a division changes."""
    assert casts({}) == 0
    assert casts({}, is_coded=False) == 1
    assert casts({"pre_divide": 2.0}) == 1
    assert casts({"reduce_dtype": torch.float16}) == 1
    assert casts({"is_accumulating": True}) == 1


def test_layers_that_are_decoded_are_called() -> None:
    """A parameter is decoded where it is computed with; that is no reason to compile each layer."""
    hand = Hand()
    x = hand.input("x", 32, 32)
    for i in range(6):
        (spec,) = unit(f"layers.{i}", {"w": (32, 32)}, **CODED)
        full = hand.unshard(hand.input(f"flat{i}", 512), spec)
        x = hand(aten.mm.default, x, full)
        for _ in range(8):
            x = hand.compute(x)
    gm = lower(hand.returns(x), PLAN)
    set_context(gm, Context(is_fused=True, inline=""))
    gm = outline(gm, PLAN)
    calls = find(gm.graph, INVOKE)
    assert len(calls) >= 3
    for call in calls:
        body = called_by(call)
        assert body is not None
        assert len(find(body, DECODE)) == 1
