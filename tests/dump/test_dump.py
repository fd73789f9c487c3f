"""The printed graph, and the folder of dumps."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
from compiled_fsdp.passes.lower import lower
from kit.passes_harness import PLAN, GraphTest, Hand, aten, fake_ranks, getitem, trace, unit
from kit.stems import stem
from torch import nn

from compiled_fsdp import dumped_to, fully_shard
from compiled_fsdp.compiler.inductor import Chain, HalfPass, JointPass
from compiled_fsdp.dump.writer import folder
from compiled_fsdp.inspection.dump_folder import read_folder
from compiled_fsdp.ir.printer import around, collectives, provenance, show
from compiled_fsdp.ir.schema import FREE

(W,) = unit("layers.0#7", {"layers.0.w": (4, 2)})


class TestPrinter(GraphTest):
    def test_each_kind_of_node(self):
        """Inputs, fsdp ops, collectives with their unit, effects, keyword arguments, dtypes,
        tuples, no value, output.
        """
        (spec,) = unit(
            "u#1", {"w": (4, 4)}, world=4, reshard="slice", post_size=2, post_group="post"
        )
        hand = Hand()
        flat, other = hand.input("flat", 4), hand.input("other", 4)
        ids, mask = hand.input("ids", 2, dtype=torch.int64), hand.input("mask", 2, dtype=torch.bool)
        w = hand.unshard(flat, spec)
        again = hand.unshard_slice(hand.keep_slice(w, spec), spec)
        hand.reduce_grad(again, flat, spec)
        first = hand(getitem, hand(aten.split.Tensor, w, 2), 0)
        copy = hand(aten.clone.default, first, memory_format=torch.contiguous_format)
        half = hand(torch.ops.prims.convert_element_type.default, copy, torch.bfloat16)
        hand(FREE, other)
        gm = hand.returns(half, None, ids, mask)
        self.assertGraph(
            gm,
            """\
%flat: f32[4]
%other: f32[4]
%ids: i64[2]
%mask: b8[2]
%unshard_default: f32[4,4] = unshard(%flat, 'w', reshard=slice)
%keep_slice_default: f32[8] = keep_slice(%unshard_default, 'w', reshard=slice)
%unshard_slice_default: f32[4,4] = unshard_slice(%keep_slice_default, 'w', reshard=slice)
%reduce_grad_default: f32[4] = reduce_grad(%unshard_slice_default, %flat, 'w', reshard=slice)
%split_tensor: tuple = split(%unshard_default, 2)
%getitem: f32[2,4] = getitem(%split_tensor, 0)
%clone_default: f32[2,4] = clone(%getitem, memory_format=torch.contiguous_format)
%convert_element_type_default: bf16[2,4] = convert_element_type(%clone_default, bf16)
free(%other)
return [%convert_element_type_default, None, %ids, %mask]""",
        )
        self.assertGraph(
            lower(gm, PLAN),
            """\
%flat: f32[4]
%other: f32[4]
%ids: i64[2]
%mask: b8[2]
%all_gather_into_tensor_default: f32[16] = all_gather_into_tensor(%flat, 4, 'shard')  # u: gather
%wait_tensor_default: f32[16] = wait_tensor(%all_gather_into_tensor_default)  # u: gather
%view_default: f32[4,4] = view(%wait_tensor_default, [4, 4])  # u: gather
%keep_slice_default: f32[8] = keep_slice(%view_default, 'w', reshard=slice)
%all_gather_into_tensor_default_1: f32[16] = all_gather_into_tensor(%keep_slice_default, 2, 'post')  # u: gather
%wait_tensor_default_1: f32[16] = wait_tensor(%all_gather_into_tensor_default_1)  # u: gather
%view_default_1: f32[4,4] = view(%wait_tensor_default_1, [4, 4])  # u: gather
%reshape_default: f32[4,4] = reshape(%view_default_1, [4, 4])  # u: reduce
%reshape_default_1: f32[16] = reshape(%reshape_default, [16])  # u: reduce
%reduce_scatter_tensor_default: f32[4] = reduce_scatter_tensor(%reshape_default_1, 'sum', 4, 'shard')  # u: reduce
%wait_tensor_default_2: f32[4] = wait_tensor(%reduce_scatter_tensor_default)  # u: reduce
%div_tensor: f32[4] = div(%wait_tensor_default_2, 4.0)  # u: reduce
mark_grads_(%div_tensor, %flat, [0])
%split_tensor: tuple = split(%view_default, 2)
%getitem: f32[2,4] = getitem(%split_tensor, 0)
%clone_default: f32[2,4] = clone(%getitem, memory_format=torch.contiguous_format)
%convert_element_type_default: bf16[2,4] = convert_element_type(%clone_default, bf16)
free(%other)
return [%convert_element_type_default, None, %ids, %mask]""",
        )

    def test_around(self):
        hand = Hand()
        nodes = [hand.input("x", 2)]
        for _ in range(6):
            nodes.append(hand.compute(nodes[-1]))
        hand.returns(nodes[-1])
        self.assertExpectedInline(
            around(nodes[3], num_nodes=2),
            """\
   %neg_default: f32[2] = neg(%x)
   %neg_default_1: f32[2] = neg(%neg_default)
-> %neg_default_2: f32[2] = neg(%neg_default_1)
   %neg_default_3: f32[2] = neg(%neg_default_2)
   %neg_default_4: f32[2] = neg(%neg_default_3)""",
        )

    def test_collectives(self):
        hand = Hand()
        gm = hand.returns(hand.compute(hand.unshard(hand.input("flat", 4), W)))
        self.assertExpectedInline(
            "\n".join(collectives(gm.graph)),
            """%unshard_default: f32[4,2] = unshard(%flat, 'layers.0.w', reshard=gather)""",
        )
        self.assertExpectedInline(
            "\n".join(collectives(lower(gm, PLAN).graph)),
            """\
%all_gather_into_tensor_default: f32[8] = all_gather_into_tensor(%flat, 2, 'shard')  # layers.0: gather
%wait_tensor_default: f32[8] = wait_tensor(%all_gather_into_tensor_default)  # layers.0: gather""",
        )

    def test_provenance(self):
        """Bytes are those of whole parameters in the compute dtype: 4 x 2 elements of 2 bytes."""
        (spec,) = unit("u", {"w": (4, 2)}, dtype=torch.bfloat16)
        hand = Hand()
        flat, d = hand.input("flat", 4), hand.input("d", 4, 2)
        gm = hand.returns(hand.unshard(flat, spec), hand.reduce_grad(d, flat, spec))
        self.assertExpectedInline(
            provenance(gm.graph, "capture", []),
            """# made by capture; holds: nothing yet; 0 gathers, 0 reductions; 0 bytes gathered, largest bucket 0""",
        )
        self.assertExpectedInline(
            provenance(lower(gm, PLAN).graph, "lower", ["DECIDED", "LOWERED"]),
            """# made by lower; holds: DECIDED, LOWERED; 1 gathers, 1 reductions; 16 bytes gathered, largest bucket 16""",
        )


class TestFolder(GraphTest):
    def test_groups_are_those_of_the_folder(self):
        """Not of a process group that was destroyed since."""
        found = []
        for world in (2, 4):
            with fake_ranks(world), tempfile.TemporaryDirectory() as name:
                trace(fully_shard(nn.Linear(4, 4)), (torch.ones(2, 4),), Path(name))
                found += [
                    json.loads(path.read_text())["groups"]
                    for path in Path(name).rglob("settings.json")
                ]
        self.assertEqual([[*groups.values()] for groups in found], [[[0, 1]], [[0, 1, 2, 3]]])

    def test_files(self):
        """One folder a graph, numbered in the order of compilation; one text a pass, and what it
        changed.
        """
        with (
            fake_ranks(2),
            tempfile.TemporaryDirectory() as name,
            mock.patch("compiled_fsdp.dump.writer._number", 0),
        ):
            trace(fully_shard(nn.Linear(4, 4)), (torch.ones(2, 4),), Path(name))
            found = sorted(str(p.relative_to(name)) for p in Path(name).rglob("*.*"))
            self.assertExpectedInline(
                "\n".join(found),
                """\
rank0/000_joint/00_capture.json.gz
rank0/000_joint/00_capture.txt
rank0/000_joint/01_keep_grad_dtype.txt
rank0/000_joint/02_number_batches.txt
rank0/000_joint/03_dedup_unshard.txt
rank0/000_joint/04_join_grads.txt
rank0/000_joint/05_choose_collectives.txt
rank0/000_joint/06_reshard.txt
rank0/000_joint/07_mark_recomputed.txt
rank0/000_joint/08_mark_offloaded.txt
rank0/000_joint/09_mark_states.txt
rank0/000_joint/10_note_heads.txt
rank0/000_joint/11_read_at_once.txt
rank0/000_joint/12_name_groups.txt
rank0/001_forward/00_capture.json.gz
rank0/001_forward/00_capture.txt
rank0/001_forward/01_lower.diff
rank0/001_forward/01_lower.json.gz
rank0/001_forward/01_lower.txt
rank0/001_forward/02_bucket_all_gather.diff
rank0/001_forward/02_bucket_all_gather.json.gz
rank0/001_forward/02_bucket_all_gather.txt
rank0/001_forward/03_bucket_reduce_scatter.txt
rank0/001_forward/04_separate_exchanges.txt
rank0/001_forward/05_overlap_exchanges.txt
rank0/001_forward/06_flatten_peak.txt
rank0/001_forward/07_prefetch_all_gather.txt
rank0/001_forward/08_give_way.txt
rank0/001_forward/09_delay_wait.txt
rank0/001_forward/10_leave_in_flight.txt
rank0/001_forward/11_step_in_backward.txt
rank0/001_forward/12_place_updates.txt
rank0/001_forward/13_read_strided.txt
rank0/001_forward/14_add_checksums.txt
rank0/001_forward/15_await_verdict.txt
rank0/001_forward/16_exchange_matrices.txt
rank0/001_forward/17_note_routing.txt
rank0/001_forward/18_free.diff
rank0/001_forward/18_free.json.gz
rank0/001_forward/18_free.txt
rank0/001_forward/19_gather_ahead.txt
rank0/001_forward/20_gather_next.txt
rank0/001_forward/21_copy_aside.txt
rank0/001_forward/22_hide_copies.txt
rank0/001_forward/23_fetch_states.txt
rank0/001_forward/24_summarize.txt
rank0/001_forward/25_watch_heads.txt
rank0/001_forward/26_agree.diff
rank0/001_forward/26_agree.json.gz
rank0/001_forward/26_agree.txt
rank0/001_forward/27_use_gloo.txt
rank0/001_forward/28_name_collectives.txt
rank0/001_forward/29_verify.txt
rank0/001_forward/memory.json.gz
rank0/001_forward/memory.txt
rank0/001_forward/record.json
rank0/001_forward/timeline.json.gz
rank0/002_backward/00_capture.json.gz
rank0/002_backward/00_capture.txt
rank0/002_backward/01_lower.diff
rank0/002_backward/01_lower.json.gz
rank0/002_backward/01_lower.txt
rank0/002_backward/02_bucket_all_gather.txt
rank0/002_backward/03_bucket_reduce_scatter.diff
rank0/002_backward/03_bucket_reduce_scatter.json.gz
rank0/002_backward/03_bucket_reduce_scatter.txt
rank0/002_backward/04_separate_exchanges.txt
rank0/002_backward/05_overlap_exchanges.txt
rank0/002_backward/06_flatten_peak.txt
rank0/002_backward/07_prefetch_all_gather.txt
rank0/002_backward/08_give_way.txt
rank0/002_backward/09_delay_wait.txt
rank0/002_backward/10_leave_in_flight.txt
rank0/002_backward/11_step_in_backward.txt
rank0/002_backward/12_place_updates.txt
rank0/002_backward/13_read_strided.txt
rank0/002_backward/14_add_checksums.txt
rank0/002_backward/15_await_verdict.txt
rank0/002_backward/16_exchange_matrices.txt
rank0/002_backward/17_note_routing.txt
rank0/002_backward/18_free.txt
rank0/002_backward/19_gather_ahead.txt
rank0/002_backward/20_gather_next.txt
rank0/002_backward/21_copy_aside.txt
rank0/002_backward/22_hide_copies.txt
rank0/002_backward/23_fetch_states.txt
rank0/002_backward/24_summarize.txt
rank0/002_backward/25_watch_heads.txt
rank0/002_backward/26_agree.diff
rank0/002_backward/26_agree.json.gz
rank0/002_backward/26_agree.txt
rank0/002_backward/27_use_gloo.txt
rank0/002_backward/28_name_collectives.txt
rank0/002_backward/29_verify.txt
rank0/002_backward/memory.json.gz
rank0/002_backward/memory.txt
rank0/002_backward/record.json
rank0/002_backward/timeline.json.gz
rank0/settings.json""",
            )
            backward = Path(name) / "rank0" / "002_backward"
            self.assertRegex(
                (backward / "memory.txt").read_text(),
                r"as it is, backward: peak 0.00 MB above rest at %cat_default",
            )
            first, _, graph = (backward / "01_lower.txt").read_text().partition("\n")
            self.assertEqual(
                first,
                "# made by lower; holds: GRADS_KEPT, NUMBERED, DEDUPED, JOINED, CHOSEN, DECIDED, MARKED, "
                "MARKED_AWAY, STATES_MARKED, HEADS_NOTED, READ_AT_ONCE, GROUPS_NAMED, LOWERED; 0 gathers, "
                "2 reductions; 0 bytes gathered, largest bucket 0",
            )
            self.assertExpectedInline(
                graph,
                """\
%primals_1: f32[2,4]
%primals_2: f32[10]
%tangents_1: f32[2,4]
%t_1: f32[4,2] = t(%tangents_1)
%mm: f32[4,4] = mm(%t_1, %primals_1)
%t_2: f32[4,4] = t(%mm)
%sum_1: f32[1,4] = sum(%tangents_1, [0], True)
%view: f32[4] = view(%sum_1, [4])
%t_3: f32[4,4] = t(%t_2)
%reshape_default: f32[2,2] = reshape(%view, [2, 2])  # Linear: reduce
%reshape_default_1: f32[4] = reshape(%reshape_default, [4])  # Linear: reduce
%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, '0')  # Linear: reduce
%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # Linear: reduce
%div_tensor: f32[2] = div(%wait_tensor_default, 2.0)  # Linear: reduce
%constant_pad_nd_default: f32[10] = constant_pad_nd(%div_tensor, [8, 0])  # Linear: reduce
%reshape_default_2: f32[2,8] = reshape(%t_3, [2, 8])  # Linear: reduce
%reshape_default_3: f32[16] = reshape(%reshape_default_2, [16])  # Linear: reduce
%reduce_scatter_tensor_default_1: f32[8] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, '0')  # Linear: reduce
%wait_tensor_default_1: f32[8] = wait_tensor(%reduce_scatter_tensor_default_1)  # Linear: reduce
%div_tensor_1: f32[8] = div(%wait_tensor_default_1, 2.0)  # Linear: reduce
%constant_pad_nd_default_1: f32[10] = constant_pad_nd(%div_tensor_1, [0, 2])  # Linear: reduce
%add: f32[10] = add(%constant_pad_nd_default, %constant_pad_nd_default_1)
mark_grads_(%add, %primals_2, [0, 8])
return [None, %add]
""",
            )
            self.assertExpectedInline(
                (backward / "03_bucket_reduce_scatter.diff").read_text(),
                """\
--- before
+++ after bucket_reduce_scatter
@@ -1,4 +1,2 @@
-%reduce_scatter_tensor_default: f32[2] = reduce_scatter_tensor(%reshape_default_1, 'sum', 2, '0')  # Linear: reduce
-%wait_tensor_default: f32[2] = wait_tensor(%reduce_scatter_tensor_default)  # Linear: reduce
-%reduce_scatter_tensor_default_1: f32[8] = reduce_scatter_tensor(%reshape_default_3, 'sum', 2, '0')  # Linear: reduce
-%wait_tensor_default_1: f32[8] = wait_tensor(%reduce_scatter_tensor_default_1)  # Linear: reduce
+%reduce_scatter_tensor_default_2: f32[10] = reduce_scatter_tensor(%reshape_default_6, 'sum', 2, '0')  # Linear: reduce
+%wait_tensor_default_2: f32[10] = wait_tensor(%reduce_scatter_tensor_default_2)  # Linear: reduce
""",
            )

    def test_a_large_graph_is_written_once(self):
        """Then what has changed, and readers get the whole; unless most of it has changed."""
        texts = []
        for large in (0, 1 << 16):
            with (
                fake_ranks(2),
                tempfile.TemporaryDirectory() as folder,
                mock.patch("compiled_fsdp.dump.writer.LARGE", large),
                mock.patch("compiled_fsdp.units.unit._unit_numbers", itertools.count()),
                mock.patch("compiled_fsdp.wire.runs._runs", {}),  # of units of these numbers
            ):
                trace(fully_shard(nn.Linear(4, 4)), (torch.ones(2, 4),), Path(folder))
                graphs = [graph for rank in read_folder(Path(folder)) for graph in rank.graphs]
                texts.append([dumped.text for graph in graphs for dumped in graph.passes])
                backward = Path(folder) / "rank0" / graphs[-1].name
                files = [
                    (backward / f"{stem(name)}.txt").read_text() for name in ("lower", "agree")
                ]
            is_whole = ["%primals_2: f32[10]\n" in text for text in files]
            self.assertEqual(is_whole, [True, large > 0])
            if not large:
                self.assertExpectedInline(
                    files[1].partition("\n")[2],
                    """\
# as after 03_bucket_reduce_scatter, but for:
@@ -3,0 +4,2 @@
+%new_empty_default: u8[1] = new_empty(%primals_1, [1], dtype=u8)
+agree(%new_empty_default, 'a backward graph of 1 collectives'..., ['0'], '{"kind":"backward","is_fused":false,"num'...)
""",
                )
        self.assertEqual(*texts)

    def test_of_one_run(self):
        """What an earlier process has left goes, and nobody else's files; what this process wrote
        before, stays.
        """
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            for path in ("rank0/007_backward/00_capture.txt", "rank3/000_joint/00_capture.txt"):
                (root / path).parent.mkdir(parents=True)
                (root / path).touch()
            mine = [root / path for path in ("rank0/notes.txt", "rank0/000_notes", "rank4/mine")]
            for path in mine:
                path.parent.mkdir(exist_ok=True)
                path.touch()
            for path in ("rank0/explain.json", "rank3/settings.json", "rank4/measured.json"):
                (root / path).touch()
            for world in (4, 2):
                begun = mock.patch("compiled_fsdp.dump.writer._begun", set())
                number = mock.patch("compiled_fsdp.dump.writer._number", 0)
                with fake_ranks(world), begun, number:
                    for _ in range(2):
                        trace(fully_shard(nn.Linear(4, 4)), (torch.ones(2, 4),), root)
                found = sorted(str(path.relative_to(root)) for path in root.glob("*/*"))
                kinds = ("joint", "forward", "backward")
                graphs = [f"rank0/{number:03d}_{kinds[number % 3]}" for number in range(6)]
                others = ["rank3/000_joint", "rank3/settings.json"] if world == 4 else []
                expected = [*graphs, "rank0/settings.json", *others]
                expected += [str(path.relative_to(root)) for path in mine]
                self.assertEqual(found, sorted(expected))

    def test_where(self):
        """The innermost `dumped_to`, else the environment variable, else nowhere."""
        with mock.patch.dict(os.environ):
            os.environ.pop("COMPILED_FSDP_DUMP", None)
            self.assertIsNone(folder())
            os.environ["COMPILED_FSDP_DUMP"] = "from_environment"
            self.assertEqual(folder(), Path("from_environment"))
            with dumped_to("outer"):
                with dumped_to("inner") as inner:
                    self.assertEqual(folder(), inner)
                self.assertEqual(folder(), Path("outer"))
            self.assertEqual(folder(), Path("from_environment"))

    def test_caches_are_bypassed(self):
        """A hook without uuid makes torch compile afresh; with one, its text holds all that the
        passes depend on.
        """
        with mock.patch.dict(os.environ):
            os.environ.pop("COMPILED_FSDP_DUMP", None)
            for hook in (JointPass(), HalfPass(), Chain((JointPass(),))):
                self.assertIn("Plan(prefetch=", hook.uuid())
                with dumped_to("somewhere"):
                    self.assertIsNone(hook.uuid())

    def test_nothing_is_written_by_default(self):
        with (
            fake_ranks(2),
            mock.patch("compiled_fsdp.dump.writer.Dump._write") as write,
            mock.patch.dict(os.environ),
        ):
            os.environ.pop("COMPILED_FSDP_DUMP", None)
            model = torch.compile(fully_shard(nn.Linear(4, 4)), backend="compiled_fsdp_eager")
            model(torch.ones(2, 4)).sum().backward()
            write.assert_not_called()


def test_control_characters_in_names_are_shown() -> None:
    """A module may be called anything; a dump is read in a terminal."""
    (w,) = unit("layer\x1b[31m\n#3", {"w": (4, 2)})
    hand = Hand()
    gm = lower(hand.returns(hand.compute(hand.unshard(hand.input("flat", 4), w))), PLAN)
    text = show(gm.graph)
    assert "\x1b" not in text
    assert "# layer\\x1b[31m\\n: gather" in text
