"""The benchmarks run end to end in small, and what they compute from what was measured is right."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest import mock

import bench
import budget
import compile as compile_bench
import depth
import gpu
import gpu_memory
import pytest
import results
import side_by_side
import simulated
import step_time
import torch
from job import Job
from phantom import build
from results import Panel, Report, Table
from screen import Screen
from side_by_side import Comparison
from variants import SWEEP, VARIANTS, with_floors

if TYPE_CHECKING:
    from kit.pool import Pool


def seen(times: list[float], **changes: float) -> dict[str, object]:
    """What a run reports of one variant."""
    comm = {
        "total_s": 0.0,
        "exposed_s": 0.0,
        "num_collectives": 3.0,
        "sent_bytes": 0.0,
        "core_s": 0.5,
    }
    return {"times": times, "loss_difference": 0.0, **comm, **changes}


class TestBenchmarks(unittest.TestCase):
    def in_small(self, folder: str, names: list[str], sides: list[str]) -> None:
        """Real ranks, real losses compared, real passes on the 405 B shape; not Inductor, which
        takes minutes.
        """
        words = [*names, "--quick", "--variants", *sides, "--layers", "2", "--depths", "1"]
        self.assertEqual(bench.main([*words, "--out", folder]), 0)

    def row(self, folder: str, name: str, begin: str) -> str:
        """The line of a table that begins so."""
        lines = (Path(folder) / name).read_text().splitlines()
        (found,) = (line for line in lines if line.startswith(begin))
        return found

    @pytest.mark.timeout(600)
    def test_in_small(self):
        sides = ["ours_eager", "stock_eager"]
        with TemporaryDirectory() as folder:
            self.in_small(folder, ["latency"], sides)
            self.assertTrue((Path(folder) / "latency.png").read_bytes().startswith(b"\x89PNG"))
            for name in sides:
                row = self.row(folder, "latency.md", f"| {name} |")
                self.assertIn("0.0e+00", row, "eager losses are stock's, bit for bit")

    @pytest.mark.timeout(600)
    def test_others_in_small(self):
        """For memory each variant has processes of its own, so one is enough."""
        with TemporaryDirectory() as folder:
            names = ["memory", "page", "plan", "plan_experts", "ahead", "graphs"]
            self.in_small(folder, names, ["ours_eager"])
            self.assertIn("| bucket_all_gather |", (Path(folder) / "plan.md").read_text())
            graphs = (Path(folder) / "fsdp1_graphs.md").read_text()
            self.assertIn("| ours | 1 | 1 | 5 | 9 | 0 | runs |", graphs)
            self.assertTrue((Path(folder) / "memory.png").read_bytes().startswith(b"\x89PNG"))
            row = self.row(folder, "page.md", "| 1 |")
            self.assertRegex(row, r"^\| 1 \| \d\.\d\d MB \| \d+ \| 0\.\d\d MB \| 0\.\d\d MB \|")
            self.assertIn("| bucket_all_gather |", (Path(folder) / "plan_experts.md").read_text())
            self.assertRegex((Path(folder) / "ahead.md").read_text(), r"\| 1 \|.*\| 0 \|\n")
            self.in_small(folder, ["muon", "--rates", "none"], ["muon_eager", "stock_muon"])
            self.assertIn("| 0.0e+00 |", self.row(folder, "muon.md", "| muon_eager |"))

    def test_a_simulated_step_beside_a_measured_one(self):
        """The simulated side for real, on a wire that a step has to wait for;
        two hosts need root.
        """
        comparison = Comparison(Job(bench.wire.SIZES["tiny"], 2, 8), ("ours_eager",), 1, 2)
        raw = simulated.Raw(bandwidth=0.01e9 / 8, issue=1e-9)
        times = simulated.simulate_at(raw, comparison)["ours_eager"]
        self.assertEqual(len(times), 2)
        sent = 2 * 60_000 * 4 / 2  # at least: all parameters, gathered and reduced
        self.assertGreater(min(times), sent / (0.01 * 1e9 / 8))
        measured = {"variants": {"ours_eager": {"times": [min(times) / 2] * 2}}}
        simulated_ = {"ours_eager": times[:1] * 2}
        found = simulated.report([(0.01, raw, measured, simulated_)], comparison)
        ((row,),) = [table.rows for table in found.tables]
        self.assertEqual(row[0], "0.01 Gbit/s, ours_eager")
        self.assertEqual(row[-1], f"{2 * times[0] / min(times):.2f}")
        self.assertIn("(target: at most 10% at every rate)", found.notes[0])

    def test_ways_on_one_device(self):
        """Ratios are to the floor and to stock over the same wire; what has failed is said."""
        ways = {
            name: gpu.Way(name, wires=(1e9,)) for name in ("local", "stock", "ours", "ours_fp8")
        }
        found = [gpu.Found(way) for way in ways.values()]
        for each, seconds in zip(found, (0.1, 0.4, 0.2), strict=False):
            each.times[1e9] = [{"seconds": seconds, "host": 0.01}] * 3
            each.last = {"peak": 2**30, "reserved": 2**31, "at_rest": 0, "predicted_peak": 2**30}
        found[-1].error = "out of memory"
        made = gpu.report(found)
        (table,) = made.tables
        rows = {row[0]: row for row in table.rows}
        self.assertEqual(list(rows), ["local", "stock", "ours"])
        self.assertEqual(rows["ours"][3:9], ["2.00", "0.50", "10.0", "1.00", "2.00", "1.00"])
        self.assertIn("ours_fp8_1b_64: failed.", made.notes)
        # 1107 M parameters, gathered twice as bf16 but for the embedding, and reduced as fp32
        self.assertIn("The wire alone needs 8588.4 ms", table.facts[-1])

    def test_memory_of_a_device_that_is_not_there(self):
        """Ratios are to stock's peak; a prediction is compared with what at rest is there too."""
        answers = {
            "stock": {
                **{"peak": 2 << 30, "reserved": 3 << 30, "at_rest": 1 << 30},
                **{"traffic": 2_500_000_000, "launches": 9, "host": 0.0125},
            },
            "ours": {
                **{"peak": 1 << 30, "reserved": 1 << 30, "at_rest": 1 << 28},
                **{"predicted_peak": 3 << 28, "traffic": 0, "launches": 0, "host": 0.002},
            },
        }
        (table,) = gpu_memory.report({gpu.Way(n): each for n, each in answers.items()}).tables
        rows = {row[0]: row[1:] for row in table.rows}
        self.assertEqual(
            rows["stock"], ["2.00", "1.00", "3.00", "1.00", "", "", "2.5", "9", "12.5"]
        )
        self.assertEqual(
            rows["ours"], ["1.00", "0.50", "1.00", "0.25", "1.00", "1.000", "", "", "2.0"]
        )

    @pytest.mark.skipif(torch.version.cuda is None, reason="the library is for torch's CUDA builds")
    @pytest.mark.timeout(600)
    def test_a_device_that_computes_nothing(self):
        """The allocator's peak: at least all shards and AdamW's two, at most that and the step.

        Without cuBLAS's workspace, which takes more than the model. Inductor has gradients written
        into their one bucket: it is there from the first on, and not, as predicted, from the last.
        """
        without = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
        with TemporaryDirectory() as folder:
            variables = {**build.build(Path(folder)), **without}
            found = gpu_memory.peak(gpu.Way("ours_whole", size="tiny"), variables)
        self.assertGreater(found["at_rest"], 0)
        self.assertGreater(found["peak"], found["at_rest"])
        self.assertGreaterEqual(found["reserved"], found["peak"])
        total = found["predicted_peak"] + found["at_rest"]
        self.assertLess(found["peak"], 2 << 20)
        self.assertLess(abs(total - found["peak"]), 0.2 * found["peak"])
        self.assertGreater(found["traffic"], 0)
        self.assertGreater(found["host"], 0)
        self.assertGreaterEqual(found["kernels"].count("\n"), 5)

    @pytest.mark.skipif(torch.version.cuda is None, reason="the library is for torch's CUDA builds")
    @pytest.mark.timeout(600)
    def test_experts_on_a_device_that_computes_nothing(self):
        """Each rank gets as many tokens as it sends, though nothing there counts them."""
        with TemporaryDirectory() as folder:
            variables = build.build(Path(folder))
            found = gpu_memory.peak(gpu.Way("ours", size="tiny_experts"), variables)
        self.assertGreater(found["peak"], found["at_rest"])
        self.assertIn("_grouped_mm", found["kernels"])

    def test_batches(self):
        settings = bench.settings_of(bench.parse(["gpu", "--batches", "8b", "base"]))
        self.assertEqual(gpu.asked_for(settings.batches, gpu.BATCHES), ["8b", "base"])
        self.assertEqual(gpu.asked_for((), gpu.BATCHES), list(gpu.BATCHES))
        for run in (gpu.run, gpu_memory.run):
            with self.assertRaisesRegex(bench.HostsError, "--batches 7b: there are .*1?6b"):
                run(bench.Settings(batches=("7b",)), Screen(1))

    def test_a_way_that_ends_is_left_out(self):
        screen = Screen(1)
        ways = (gpu.Way("local", size="no size"),)
        with TemporaryDirectory() as folder:
            (found,) = gpu.measure([ways], screen, "cpu", Path(folder) / "gpu")
            self.assertIn("no size", (Path(folder) / "gpu" / "raw.json").read_text())
        self.assertIn("invalid choice: 'no size'", found.error)
        self.assertEqual(found.times, {})

    def test_a_comparison_survives_the_command_line(self):
        job = Job(bench.wire.SIZES["tiny"], batch=2, length=8)
        comparison = Comparison(job, ("ours", "stock_eager"), rounds=2, steps=3)
        self.assertEqual(Comparison.from_json(comparison.to_json()), comparison)

    def test_every_variant_that_trains_has_a_floor_that_does_not(self):
        for variant in VARIANTS.values():
            self.assertFalse(variant.floor and VARIANTS[variant.floor].trains)
        self.assertEqual(with_floors(["ours"]), ["ours", "local_compile"])

    def test_timed_steps_follow_each_other(self):
        """What a step leaves under way is not carried in a barrier, at the cost of nobody."""
        seen_: list[str] = []
        side = side_by_side.Side("ours", lambda index: seen_.append(f"step {index}"))
        with mock.patch.object(
            side_by_side.dist, "barrier", side_effect=lambda: seen_.append("barrier")
        ):
            side.time(2)
        self.assertEqual(seen_, ["barrier", "step 0", "step 1", "step 2"])
        self.assertEqual([len(side.times), len(side.core), len(side.sent)], [2, 2, 2])

    def test_losses_that_differ_stop_the_run(self):
        with mock.patch.object(side_by_side.dist, "all_reduce"):
            close = {"stock_eager": [5.0, 4.0], "ours": [5.001, 4.0], "local_eager": [1.0, 1.0]}
            gaps = side_by_side.compare_losses(close)
            self.assertEqual(set(gaps), {"stock_eager", "ours"})
            self.assertAlmostEqual(gaps["ours"], 0.001)
            for wrong in (4.01, float("nan")):
                with self.assertRaisesRegex(
                    RuntimeError, "comparing losses with stock_eager's.*'ours'"
                ):
                    side_by_side.compare_losses({"stock_eager": [5.0, 4.0], "ours": [5.0, wrong]})

    def test_a_step_is_compute_hidden_and_exposed(self):
        result = {
            "variants": {
                "ours": seen([1.5, 1.4, 1.6], total_s=0.9, exposed_s=0.2),
                "stock_eager": seen([3.0], total_s=9.0, exposed_s=1.0),
                "local_compile": seen([1.0]),
                "local_eager": seen([1.2]),
            }
        }
        split = step_time.parts(result)
        self.assertEqual(set(split), {"ours", "stock_eager"})
        for part, expected in {"compute": 0.3, "hidden": 0.7, "exposed": 0.5}.items():
            self.assertAlmostEqual(split["ours"][part], expected)
        # more communication than computation cannot hide behind it
        for part, expected in {"compute": 0.0, "hidden": 1.2, "exposed": 1.8}.items():
            self.assertAlmostEqual(split["stock_eager"][part], expected)
        row = step_time.table("", [], result).rows[1]
        self.assertEqual(row[:5], ["stock_eager", "3.000", "3.000 to 3.000", "1.00", "2.00"])

    def test_a_sweep_says_whether_time_falls_and_what_ddp_takes(self):
        """All budgets alike but for their time: 1.5 s down to 1.1, or with one that rises again."""
        for last, word in ((1.1, "falls monotonically"), (1.4, "does NOT fall monotonically")):
            times = dict(zip(SWEEP, (1.5, 1.4, 1.3, 1.2, last), strict=True)) | {
                budget.MOST: 1.0,
                budget.DDP: 1.25,
            }
            variants = {name: seen([seconds]) for name, seconds in times.items()}
            floors = {"local_compile": seen([0.9]), "local_compile_whole": seen([0.9])}
            result = {"variants": variants | floors, "gloo": {}, "cores": (0, 1)}
            peaks = {
                name: {"tensor_peak": 3e6 if name == budget.DDP else 2e6, "tensor_at_rest": 1e6}
                for name in times
            }
            job = Job(bench.wire.SIZES["tiny"], batch=2, length=8)
            found = budget.report(
                1.0, Comparison(job, tuple(result["variants"]), rounds=1, steps=1), result, peaks
            )
            self.assertIn(
                f"the step {word}: 1.500, 1.400, 1.300, 1.200, {last:.3f} s", " ".join(found.notes)
            )
            self.assertIn(
                "ours_at_ddp_peak: 0.67 of the peak of DDP, and 1.25 times as fast (target: at "
                "least 1.2).",
                found.notes,
            )

    def test_what_compiling_is_made_of(self):
        """Each phase less what is nested in it; the passes are timed as they are called."""
        ours: list[float] = []
        self.assertEqual(
            compile_bench.timed(lambda gm, *, is_fused: (gm, is_fused), ours)(1, is_fused=True),
            (1, True),
        )
        (seconds,) = ours
        records = {
            "bytecode_tracing": [2.0, 1.0],
            "GraphLowering.codegen": [5.0],
            "Scheduler.__init__": [4.0],
        }
        with mock.patch.object(
            compile_bench.torch._dynamo.utils, "compilation_time_metrics", records
        ):
            found = compile_bench.phases(20.0, seconds)
        self.assertEqual(
            (found["Dynamo"], found["code generation"], found["lowering, fusion"]), (3.0, 1.0, 4.0)
        )
        self.assertAlmostEqual(sum(found.values()), 20.0)

    def test_what_a_layer_takes(self):
        """The innermost function of a part counts;
        a layer's is what more layers take, over them.
        """
        spaces: dict[str, object] = {"sys": sys}
        for file, name, body in (
            ("_inductor/codecache.py", "write", "return sys._getframe()"),
            ("compiler/driver.py", "run_half", "return write()"),
            ("_inductor/compile_fx.py", "_recursive_post_grad_passes", "return run_half()"),
            ("elsewhere.py", "main", "return _recursive_post_grad_passes()"),
        ):
            exec(compile(f"def {name}():\n {body}", f"/torch/{file}", "exec"), spaces)
        frame = spaces["main"]()
        sampler = depth.Sampler()
        found = []
        while frame is not None and len(found) < 4:
            found.append(sampler.part(frame))
            frame = frame.f_back
        self.assertEqual(found[0], "the rest of Inductor")
        self.assertEqual(found[1:], ["our passes, halves", "Inductor's passes, halves", depth.REST])

        def start(seconds: float, kernels: int) -> dict[str, object]:
            parts = {"partition": seconds - 3, depth.CXX: 3.0}
            return {"seconds": seconds, "parts": parts, "kernels": kernels, "memory": 500.0}

        shown = depth.report((2, 4), ["ours"], {("ours", 2): start(5, 7), ("ours", 4): start(8, 9)})
        starts, layer = shown.tables
        self.assertEqual(starts.rows[1], ["ours", "4", "8.0", "1.60", "3.0", "9", "500"])
        self.assertEqual(
            layer.rows, [["partition", "1500"], ["C++ compiler", "0"], ["all", "1500"]]
        )
        self.assertIn("1.60 times as much", shown.notes[-1])

    def test_options(self):
        def settings(*words: str) -> bench.Settings:
            return bench.settings_of(bench.parse(list(words)))

        self.assertEqual(settings().rates, (0.5, 1.0, 2.0, 4.0, None))
        self.assertEqual(
            settings("wire", "--rates", "1", "none", "--rounds", "7").rates, (1.0, None)
        )
        self.assertEqual(settings("--quick", "--layers", "3").layers, (3,))
        self.assertEqual(settings("--quick").rounds, 1)
        self.assertEqual(
            bench.command_of("wire", ["wire", "plan", "--rates", "1"], ["wire", "plan"]),
            'make bench ARGS="wire --rates 1"',
        )
        with self.assertRaises(SystemExit), mock.patch("sys.stderr"):
            settings("wires")

    def test_one_that_this_machine_cannot_do_does_not_stop_the_others(self):
        def missing(settings: object, screen: object) -> Report:
            raise bench.HostsError("needs root")

        def failing(settings: object, screen: object) -> Report:
            raise subprocess.CalledProcessError(1, "rank")

        def working(settings: object, screen: object) -> Report:
            return Report("c", "C", [], [], ["done"])

        for first, expected in ((missing, bench.MISSING), (failing, bench.FAILED)):
            with TemporaryDirectory() as folder, mock.patch("sys.stderr") as stderr:
                with mock.patch.dict(bench.BENCHMARKS, {"wire": first, "plan": working}):
                    code = bench.main(["wire", "plan", "--out", folder])
                self.assertEqual(code, expected)
                self.assertIn("wire: ", stderr.write.call_args_list[0].args[0])
                self.assertEqual(
                    (Path(folder) / "c.md").read_text(), '# C\n\n`make bench ARGS="plan"`\n\ndone\n'
                )

    def test_a_report_in_markdown(self):
        table = Table("Two", ["One fact.", "Another."], ("what", "s"), [["a", "1"]])
        report = Report(
            "it",
            "It",
            [table],
            [Panel("p", "s", {"a": {"x": 1.0}, "b": {"y": 2.0}}, {"floor": 1.0})],
            ["A note."],
        )
        with TemporaryDirectory() as folder:
            paths = results.write(report, Path(folder), "make it")
            self.assertEqual([path.name for path in paths], ["it.md", "it.png"])
            self.assertEqual(
                paths[0].read_text(),
                "# It\n\n`make it`\n\n![It](it.png)\n\n## Two\n\nOne fact. Another.\n\n"
                "| what | s |\n|---|--:|\n| a | 1 |\n\nA note.\n",
            )


def exchanged(path: str) -> None:
    """As a host does; this process has its group already."""
    words = [simulated.__file__, simulated.RAW, "0.01", path]
    with (
        mock.patch.object(torch.distributed, "init_process_group"),
        mock.patch.object(torch.distributed, "destroy_process_group"),
        mock.patch("sys.argv", words),
    ):
        runpy.run_path(simulated.__file__, run_name="__main__")


def test_raw_exchanges(two: Pool, tmp_path: Path) -> None:
    """Between two processes, in the place of two hosts."""
    two.run(exchanged, str(tmp_path / "raw.json"))
    raw = simulated.Raw(**json.loads((tmp_path / "raw.json").read_text()))
    wire = raw.wire()
    assert (wire.bandwidth, wire.issue) == (raw.bandwidth, raw.issue)
    assert raw.bandwidth > 1e6
    assert 1e-11 < raw.issue < 1e-6, raw
