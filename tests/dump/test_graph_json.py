"""Graphs as JSON and back: they print, compare and verify as before, and nothing in the text is
run.
"""

from __future__ import annotations

import json
import operator
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_fsdp.passes.verify import check
from kit.passes_harness import PLAN, Hand, aten, fake_ranks, getitem, trace, unit
from torch import nn

from compiled_fsdp import MixedPrecisionPolicy, fully_shard, planned
from compiled_fsdp.dump import graph_json
from compiled_fsdp.dump.graph_json import FormatError, of_text, to_text
from compiled_fsdp.inspection.dump_folder import read, read_folder
from compiled_fsdp.ir.descriptors import saved_for_backward
from compiled_fsdp.ir.graph import value
from compiled_fsdp.ir.meta import set_captured
from compiled_fsdp.ir.opaque import Opaque
from compiled_fsdp.ir.printer import collectives, show
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.memory import profile
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.verification.meaning import Captured

COSTS = Costs(
    1e12, 1e10, 1e-6, (("0", Link(1e-5, 1e9, 1e-6, 2e9, 3e9, 1e-7, 1e-12)),), is_fused=False
)


class Attention(nn.Module):
    """Views, a tuple, an attention with several results, a mask from indices, a size that
    changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(self.embed(ids))).unsqueeze(1).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) * float("inf")


@pytest.fixture(scope="module")
def dumped():
    """The dump of a model in bf16 with a dynamic batch size, on a fake group of two."""
    with fake_ranks(2), tempfile.TemporaryDirectory() as name:
        model = Attention()
        for child in (model.qkv, model.norm):
            fully_shard(child, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
        fully_shard(model)
        ids = torch.ones(2, 4, dtype=torch.int64)
        torch._dynamo.mark_dynamic(ids, 1)  # an error if planning or dumping fixed the size
        with planned(prefetch=None, backward_prefetch=None, reduces_in_flight=None, costs=COSTS):
            trace(model, (ids,), Path(name))
        yield Path(name)


def test_a_graph_comes_back_as_it_was(dumped):
    """After every pass: the printed graph, what is compared of it, and that it is written the same
    again.
    """
    for rank in read_folder(dumped):
        for entry in (entry for graph in rank.graphs for entry in graph.passes):
            assert show(entry.gm.graph) == entry.text.split("\n", 1)[1].rstrip(), entry.where
            written = to_text(entry.gm.graph, entry.source.name, entry.plan)
            assert written == read(entry.json_path)


def test_invariants_hold_of_what_was_read(dumped):
    for graph in (graph for rank in read_folder(dumped) for graph in rank.graphs if graph.is_half):
        captured = Captured(graph.passes[0].gm.graph)
        for entry in graph.passes[1:]:
            set_captured(entry.gm, captured)
            check(entry.gm, entry.plan, entry.name)


def hand_made() -> tuple[Hand, Any]:
    (spec,) = unit("u#1", {"w": (4, 2)})
    hand = Hand()
    w = hand.unshard(hand.input("flat", 4), spec)
    first = hand(getitem, hand(aten.split.Tensor, w, 2), 0)
    half = hand(torch.ops.prims.convert_element_type.default, first, torch.bfloat16)
    copy = hand(aten.clone.default, half, memory_format=torch.contiguous_format)
    return hand, hand.returns(copy, None, first)


def test_values_share_storages_as_they_did():
    """The memory model counts storages: views are no bytes of their own."""
    _, gm = hand_made()
    again, plan, name = of_text(to_text(gm.graph, "lower", PLAN))
    assert (plan, name) == (PLAN, "lower")
    nodes = {node.name: node for node in again.graph.nodes}
    assert nodes["getitem"].target is operator.getitem
    storages = [
        value(nodes[n]).untyped_storage()._cdata
        for n in ("unshard_default", "getitem", "clone_default")
    ]
    assert storages[0] == storages[1] != storages[2]
    assert profile(again.graph).peak == profile(gm.graph).peak
    assert collectives(again.graph) == collectives(gm.graph)
    assert saved_for_backward(next(n for n in again.graph.nodes if n.op == "output"))


def test_plan_and_costs_come_back():
    costs = replace(COSTS, kernels=(("mm float32[8, 4] float32[4, 2]", 0.5),))
    plan = Plan(
        regions=("Block", "Other"),
        prefetch=None,
        memory_budget=0.5,
        costs=costs,
        kept=(("u#1", "w"),),
        dropped=(("u#2", "v"),),
    )
    _, gm = hand_made()
    assert of_text(to_text(gm.graph, "lower", plan))[1] == plan


def test_other_ops_are_known_by_name_only():
    """An op of somebody else's library is not looked up; it prints, and nothing can be run."""
    _, gm = hand_made()
    text = to_text(gm.graph, "capture", PLAN).replace("aten.split.Tensor", "os.system.default")
    again, *_ = of_text(text)
    node = next(n for n in again.graph.nodes if n.name == "split_tensor")
    assert isinstance(node.target, Opaque)
    assert node.target is Opaque.named("os.system.default")
    assert "os.system.default(" in show(again.graph)
    with pytest.raises(
        TypeError, match=r"^os\.system\.default: a graph that was built from JSON cannot be run$"
    ):
        node.target()
    assert not callable(again)


def test_no_code_is_made_of_names(tmp_path):
    """The module that torch would make of a graph runs the text of its placeholders."""
    there = tmp_path / "there"
    attack = f"flat=__import__('pathlib').Path({str(there)!r}).touch()"
    text = damaged(lambda v: at(v, "flat").__setitem__(2, attack))
    again, *_ = of_text(text)
    show(again.graph)
    profile(again.graph)
    assert not there.exists()
    with pytest.raises(FormatError, match=r"^node .* has a name that no graph has$"):
        of_text(damaged(lambda v: at(v, "flat").__setitem__(0, attack)))


def damaged(change) -> str:
    _, gm = hand_made()
    values = json.loads(to_text(gm.graph, "capture", PLAN))
    change(values)
    return json.dumps(values)


def at(values, name):
    return next(node for node in values["nodes"] if node[0] == name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda v: v.pop("format"),
            r'no graph of format 2: the key "format" is missing or another',
        ),
        (
            lambda v: v.update(format=1),
            r'no graph of format 2: the key "format" is missing or another',
        ),
        (lambda v: v.pop("nodes"), r"KeyError: 'nodes'"),
        (lambda v: v["nodes"].pop(), r"the graph has no output: the text is cut off"),
        (lambda v: v["nodes"].pop(1), r"%unshard_default is read before it is computed"),
        (lambda v: v["nodes"].insert(1, v["nodes"][0]), r"two nodes are called 'flat'"),
        (
            lambda v: at(v, "split_tensor").__setitem__(2, "aten.split.Nothing"),
            r"AttributeError: .*Nothing.*",
        ),
        (
            lambda v: at(v, "split_tensor").__setitem__(1, "call_module"),
            r"node 'split_tensor' is a 'call_module'",
        ),
        (lambda v: at(v, "split_tensor").__setitem__(2, "aten.__class__.x"), r".*"),
        (lambda v: at(v, "flat")[5].__setitem__(0, "save"), r"'save' is no dtype"),
        (lambda v: at(v, "flat")[5].__setitem__(1, [1 << 60]), r".*is no tensor"),
        (lambda v: at(v, "flat")[5].__setitem__(1, [-4]), r".*is no tensor"),
        (lambda v: v["plan"].update(prefetch=-1), r"ValueError: Plan: prefetch=-1; .*"),
        (lambda v: v["plan"].update(other=1), r"TypeError: .*other.*"),
        (
            lambda v: at(v, "clone_default").__setitem__(4, {"x": {"call": "f"}}),
            r"KeyError: 'call'",
        ),
    ],
)
def test_damaged_texts_are_refused(change, words):
    with pytest.raises(FormatError, match=f"^{words}$"):
        of_text(damaged(change))


def test_cut_off_text_is_refused():
    _, gm = hand_made()
    text = to_text(gm.graph, "capture", PLAN)
    for end in (0, 10, len(text) // 2, len(text) - 4):
        with pytest.raises(FormatError):
            of_text(text[:end])


def test_nothing_unpickles():
    source = Path(graph_json.__file__).read_text()
    assert "import pickle" not in source
    assert "torch.load" not in source
    assert "eval(" not in source
