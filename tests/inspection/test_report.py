"""The report from a dump: what its JSON says is what planner and memory model say, pages are
closed, garbled files are named.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from gpt import SIZES
from kit.passes_harness import fake_ranks, trace
from kit.reported import EVIL, Model
from options import parse
from step_report import StepReport
from text import load_text
from torch import nn
from torch.fx import Graph
from trainer import Trainer, variants
from usage import UsageError

from compiled_fsdp import Costs, Link, fully_shard, planned
from compiled_fsdp.command.cli import main
from compiled_fsdp.dump import writer
from compiled_fsdp.inspection.check import read
from compiled_fsdp.inspection.profiles import WAIT
from compiled_fsdp.inspection.report.measured import AGREE, CARRIED
from compiled_fsdp.inspection.report.page import unpacked
from compiled_fsdp.planning.memory import profile_step
from compiled_fsdp.planning.planner import predict
from compiled_fsdp.report import DumpError, add_profile, write_report, write_trace

if TYPE_CHECKING:
    from kit.pool import Pool

HALVES = ("001_forward", "002_backward")
COSTS = Costs(1e9, 1e9, 1e-5, (("0", Link(1e-3, 1e7)),))


@pytest.fixture
def spoilt(dump: Path, tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return Path(shutil.copytree(dump, tmp_path / "copy"))


def graphs_of(dump: Path, rank: int = 0) -> list[Path]:
    return sorted(path.parent for path in (dump / f"rank{rank}").glob("*/timeline.json.gz"))


def load(path: Path) -> Any:
    return json.loads(read(path, "testing"))


class Page(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.scripts and self.cdata_elem == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return unpacked(self.scripts[0])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Graph]]:
    folder, graphs = tmp_path_factory.mktemp("records"), []
    write = writer.write_records

    def also(graph: Graph, *rest: Any) -> None:
        write(graph, *rest)
        graphs.append(deepcopy(graph))  # what is compiled begins with the comparison between ranks

    with pytest.MonkeyPatch.context() as patch, fake_ranks(2), planned(costs=COSTS):
        patch.setattr("compiled_fsdp.dump.writer.write_records", also)
        patch.setattr("compiled_fsdp.dump.writer._number", 0)
        trace(
            fully_shard(nn.Sequential(*(fully_shard(nn.Linear(64, 64)) for _ in range(3)))),
            (torch.ones(8, 64),),
            folder,
        )
    return folder / "rank0", graphs


class TestRecords:
    """`timeline.json.gz` and `memory.json.gz` beside the functions that they come from."""

    @pytest.mark.parametrize(
        ("half", "executor"), [(h, e) for h in (0, 1) for e in ("plain", "fused")]
    )
    def test_the_timeline_is_the_planner_s(
        self, traced: tuple[Path, list[Graph]], half: int, executor: str
    ) -> None:
        folder, graphs = traced
        found = load(folder / HALVES[half] / "timeline.json.gz")
        line = predict(graphs[half], COSTS.fused(executor == "fused"))
        run = found[executor]
        assert (found["kind"], found["executor"], found["costs"]["is_assumed"]) == (
            line.title,
            "plain",
            False,
        )
        assert run["total"] == line.total
        assert [c["node"] for c in found["collectives"]] == [n.name for n in line.carried]
        assert [(t["begin"], t["end"]) for t in run["times"]] == list(line.carried.values())
        assert [t["exposed"] for t in run["times"]] == [line.exposed[n] for n in line.carried]
        assert sum(t["exposed"] for t in run["times"]) > 0
        # What computes and what stands still make up the whole.
        busy = sum(end - begin for begin, end, _, _ in run["compute"])
        thread = sum(t["exposed"] + t["issuing"] for t in run["times"])
        assert busy + thread == pytest.approx(line.total)

    def test_collectives_are_named(self, traced: tuple[Path, list[Graph]]) -> None:
        """Each unit of a 64 x 64 weight and a bias: 4,160 elements of 4 bytes, half of them from
        the other rank.
        """
        found = load(traced[0] / HALVES[0] / "timeline.json.gz")
        first = found["collectives"][0]
        assert [c["units"] for c in found["collectives"]] == [["0"], ["1"], ["2"]]
        assert first["parameters"][0] == {
            "name": "0.weight",
            "unit": "0",
            "shape": [64, 64],
            "bytes": 4 * 64 * 64,
        }
        assert (first["kind"], first["bytes"], first["sent"], first["dtype"]) == (
            "gather",
            4 * 4160,
            2 * 4160,
            "float32",
        )
        assert found["groups"] == {first["group"]: [0, 1]}
        assert found["waits"] == [0, 1, 2]
        assert {module for _, _, _, module in found["plain"]["compute"]} == {"0", "1", "2"}

    @pytest.mark.parametrize("executor", ["plain", "fused"])
    def test_memory_is_that_of_the_step(
        self, traced: tuple[Path, list[Graph]], executor: str
    ) -> None:
        folder, graphs = traced
        forward, backward = (load(folder / half / "memory.json.gz") for half in HALVES)
        step = profile_step(*graphs, is_fused=executor == "fused")
        assert backward["after"] == HALVES[0]
        for found, expected in ((forward, step.forward), (backward, step.backward)):
            profile = found[executor]
            assert tuple(profile["during"]) == expected.curve.during
            assert (profile["peak"], profile["where"]) == (expected.peak, expected.curve.where)
            assert [sum(at) for at in zip(*profile["kinds"].values(), strict=True)] == profile[
                "during"
            ]
            where = profile["where"]
            alive = sorted(s[2] for s in profile["storages"] if s[3] <= where <= s[4])
            assert alive == sorted(a.num_bytes for a in expected.alive)

    def test_what_is_saved_says_where_it_comes_from(self, traced: tuple[Path, list[Graph]]) -> None:
        owners = {s[1] for s in load(traced[0] / HALVES[1] / "memory.json.gz")["plain"]["storages"]}
        assert any(re.fullmatch(r"addmm.* in [01]", owner) for owner in owners), owners

    def test_a_backward_without_its_forward(self, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch, fake_ranks(2):
            patch.setattr("compiled_fsdp.dump.memory._is_half", lambda *_: False)
            trace(fully_shard(nn.Linear(4, 4)), (torch.ones(2, 4),), tmp_path)
        (backward,) = tmp_path.glob("rank0/*_backward/memory.json.gz")
        assert load(backward)["after"] is None
        assert load(backward.with_name("timeline.json.gz"))["costs"]["is_assumed"]
        write_report(tmp_path, tmp_path / "page.html")


class TestPage:
    def test_it_is_closed(self, dump: Path, tmp_path: Path) -> None:
        """Two scripts, one style, nothing that points outside, and a policy that forbids to load
        anything.
        """
        write_report(dump, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        page = Page(text)
        assert [attrs for tag, attrs in page.tags if tag == "script"] == [
            {"type": "text/plain", "id": "data"},
            {},
        ]
        assert not [
            attrs
            for _, attrs in page.tags
            if {"src", "href", "srcset", "action", "data"} & attrs.keys()
        ]
        assert not {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "base"}
        assert set(re.findall(r"\w+://[\w./]+", text)) == {
            "http://www.w3.org/2000/svg"
        }  # a name, never fetched
        assert "innerHTML" not in text
        (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
        assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

    def test_names_are_data(self, dump: Path, tmp_path: Path) -> None:
        write_report(dump, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        assert "<img" not in text
        page = Page(text)
        units = [c["units"] for c in page.data["ranks"][0]["graphs"][0]["timeline"]["collectives"]]
        assert units == [["first"], [EVIL], ["last"]]
        assert Model().get_submodule("first") is not None

    def test_control_characters_are_shown(self, spoilt: Path, tmp_path: Path) -> None:
        (spoilt / "rank0" / "measured.json").unlink()
        path = graphs_of(spoilt)[0] / "timeline.json.gz"
        path.write_text(
            read(path, "testing").replace('"units": ["first"]', '"units": ["\\u202efirst\\u001b"]')
        )
        write_report(spoilt, tmp_path / "page.html")
        collective = Page((tmp_path / "page.html").read_text()).data["ranks"][0]["graphs"][0][
            "timeline"
        ]["collectives"][0]
        assert collective["units"] == ["\\u202efirst\\x1b"]

    def test_all_ranks_graphs_and_passes_are_there(self, dump: Path, tmp_path: Path) -> None:
        write_report(dump, tmp_path / "page.html")
        ranks = Page((tmp_path / "page.html").read_text()).data["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        forward, backward = ranks[0]["graphs"]
        assert [p["name"].split("_", 1)[1] for p in forward["passes"]][:3] == [
            "capture",
            "lower",
            "bucket_all_gather",
        ]
        assert "+%all_gather_into_tensor" in forward["passes"][1]["diff"]
        assert forward["passes"][1]["provenance"].startswith("made by lower; holds: ")
        assert backward["text"].splitlines()[-1].startswith("return [")
        assert [name.split("_")[1] for name, _ in ranks[0]["joint"]] == ["joint"]

    def test_measured_is_beside_predicted(self, dump: Path) -> None:
        """A real profile: every collective of both graphs is found, in order, inside the run."""
        for rank in (0, 1):
            measured = load(dump / f"rank{rank}" / "measured.json")["graphs"]
            for path in graphs_of(dump, rank):
                run, line = measured[path.name], load(path / "timeline.json.gz")
                assert len(run["times"]) == len(line["collectives"])
                issued = [t["issued"] for t in run["times"]]
                assert issued == sorted(issued)
                assert run["has_arrivals"]
                for times in run["times"]:
                    assert 0 <= times["issued"] <= times["awaited"] <= run["total"]
                    assert times["begin"] < times["end"]
                busy = sum(t["issuing"] + t["exposed"] for t in run["times"])
                assert busy + sum(e - b for b, e, *_ in run["compute"]) == pytest.approx(
                    run["total"], rel=1e-6
                )


class TestTrace:
    def test_events(self, dump: Path, tmp_path: Path) -> None:
        write_trace(dump, tmp_path / "trace.json")
        events = load(tmp_path / "trace.json")["traceEvents"]
        named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert named == {f"rank {r}, {s}" for r in (0, 1) for s in ("predicted", "measured")}
        for pid in range(4):
            wire = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, 2)]
            assert [e["name"] for e in wire[:3]] == [
                "gather first",
                f"gather {EVIL}",
                "gather last",
            ]
            assert {e["name"].split()[0] for e in wire} == {"gather", "reduce"}
            assert wire[0]["args"]["parameters"][0] == "first.0.weight"
        assert all(e["ts"] >= 0 and e.get("dur", 0) >= 0 for e in events if e["ph"] != "M")
        bytes_alive = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == 0]
        peaks = [load(path / "memory.json.gz")["plain"]["peak"] for path in graphs_of(dump)]
        assert max(bytes_alive) == max(peaks)

    def test_backward_follows_forward(self, dump: Path, tmp_path: Path) -> None:
        write_trace(dump, tmp_path / "trace.json")
        events = load(tmp_path / "trace.json")["traceEvents"]
        forward, backward = (
            next(e for e in events if e["ph"] == "X" and e["name"] == path.name)
            for path in graphs_of(dump)
        )
        assert backward["ts"] == pytest.approx(forward["ts"] + forward["dur"])


# -- profiles written by hand


def event(name: str, ts: float, dur: float, tid: object = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 0}


def forward_run(at: float, slow: float = 1.0) -> list[dict[str, Any]]:
    """Three all-gathers, the second started before the first is awaited; microseconds, `slow` times
    as many.
    """
    steps = [
        (AGREE, 0, 1),
        ("_c10d_functional::all_gather_into_tensor", 10, 5),
        ("c10d::_allgather_base_", 11, 3),  # inside the one before
        ("fsdp::all_gather", 20, 5),
        (WAIT, 30, 40),
        ("aten::mm", 70, 10),
        (WAIT, 80, 2),
        ("_c10d_functional::all_gather_into_tensor_out", 90, 5),
        (WAIT, 95, 5),
    ]
    return [event("## Call CompiledFxGraph ##", at - 1, 112 * slow)] + [
        event(name, at + ts * slow, dur * slow) for name, ts, dur in steps
    ]


def write_profile(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    return path


class TestProfile:
    def test_by_order(self, spoilt: Path, tmp_path: Path) -> None:
        """The last of two runs counts; seconds from its beginning; a wait belongs to what the graph
        awaits there.
        """
        name = graphs_of(spoilt)[0].name
        profile = write_profile(tmp_path / "p.json", forward_run(1000, slow=7) + forward_run(9000))
        found = load(add_profile(spoilt, profile))["graphs"]
        assert list(found) == [name]
        run = found[name]
        assert not run["has_arrivals"]
        micro = [
            {k: v if v is None else round(v * 1e6, 3) for k, v in t.items()} for t in run["times"]
        ]
        assert micro[0] == {
            "issued": 10,
            "issuing": 5,
            "begin": 10,
            "end": 70,
            "awaited": 30,
            "exposed": 40,
        }
        assert [t["awaited"] for t in micro] == [30, 80, 95]
        assert round(run["total"] * 1e6, 3) == 111
        between = [[round(v * 1e6, 3) for v in stretch[:2]] for stretch in run["compute"]]
        assert between == [[0, 10], [15, 20], [25, 30], [70, 80], [82, 90], [100, 111]]

    def test_arrivals(self, spoilt: Path, tmp_path: Path) -> None:
        """Those of exchanges alone are known: with one among others, all count as under way until
        awaited.
        """
        events = [
            dict(
                e,
                name=e["name"].replace(
                    "_c10d_functional::all_gather_into_tensor_out", "fsdp::all_gather"
                ),
            )
            for e in forward_run(0)
        ]
        events = [
            dict(
                e,
                name=e["name"].replace(
                    "_c10d_functional::all_gather_into_tensor", "fsdp::all_gather"
                ),
            )
            for e in events
        ]
        events += [event(CARRIED, 10 * n + 12, 7, "wire") for n in range(3)]
        path = write_profile(tmp_path / "p.json", events)
        packed = tmp_path / "p.json.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        (run,) = load(add_profile(spoilt, packed, 1))["graphs"].values()
        assert run["has_arrivals"]
        assert [round(t["end"] * 1e6, 3) for t in run["times"]] == [
            19,
            29,
            95,
        ]  # no earlier than its own start is over

    def test_of_another_model(self, spoilt: Path, tmp_path: Path) -> None:
        events = [e for e in forward_run(0) if e["name"] != "fsdp::all_gather"]
        with pytest.raises(
            DumpError,
            match=r"p.json has 1 runs of graphs \(fsdp::agree\), none of those that were dumped: 0",
        ):
            add_profile(spoilt, write_profile(tmp_path / "p.json", events))
        with pytest.raises(
            DumpError,
            match=r"add_profile: rank is 7; .* has dumps of ranks \[0, 1\]: give one of them",
        ):
            add_profile(spoilt, tmp_path / "p.json", 7)

    def test_by_the_tool(self, spoilt: Path, tmp_path: Path) -> None:
        """`python -m compiled_fsdp report` with a profile of rank 1, and the trace beside the
        page.
        """
        (spoilt / "rank0" / "measured.json").unlink()
        (spoilt / "rank1" / "measured.json").unlink()
        profile = write_profile(tmp_path / "p.json", forward_run(0))
        page, out = tmp_path / "page.html", tmp_path / "trace.json"
        arguments = [
            "report",
            spoilt,
            "--out",
            page,
            "--profile",
            profile,
            "--of-rank",
            "1",
            "--trace",
            out,
        ]
        assert main([*map(str, arguments)]) == 0
        ranks = Page(page.read_text()).data["ranks"]
        assert [[g["measured"] is not None for g in rank["graphs"]] for rank in ranks] == [
            [False, False],
            [True, False],
        ]
        assert {e["pid"] for e in load(out)["traceEvents"]} == {0, 2, 3}
        profile.write_text("{")
        assert main([*map(str, arguments)]) != 0

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", r"p.json is no JSON: Expecting property name.*cut off or garbled"),
            ("[1]", r"p.json: the top is '\[1\]', should be an object"),
            (
                '{"traceEvents": [{"ph": "X", "name": "a", "ts": "1", "dur": 2}]}',
                r"traceEvents\[0\].ts is '1', should be a number",
            ),
            (
                '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1}]}',
                r"traceEvents\[0\] has no 'dur'",
            ),
            ("\x1f\x8b", r"p.json (is no JSON|cannot be read)"),
        ],
    )
    def test_garbled(self, dump: Path, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "p.json"
        path.write_bytes(text.encode("latin1"))
        with pytest.raises(DumpError, match=says):
            add_profile(dump, path)


SPOILED = {
    "cut off": (lambda t: t[:100], "timeline.json.gz", r"is no JSON: .*cut off or garbled"),
    "no object": (lambda t: "[]", "timeline.json.gz", r"the top is '\[\]', should be an object"),
    "of another version": (
        lambda t: t.replace('"format": 3', '"format": 9'),
        "memory.json.gz",
        r"format is 9, should be 3",
    ),
    "not a number": (
        lambda t: t.replace('"sent": ', '"sent": NaN, "was": ', 1),
        "timeline.json.gz",
        r"NaN is no number",
    ),
    "text for bytes": (
        lambda t: t.replace('"sent": ', '"sent": "x", "was": ', 1),
        "timeline.json.gz",
        r"collectives\[0\].sent is 'x'",
    ),
    "unequal lists": (
        lambda t: t.replace('"nodes": ["', '"nodes": ["more", "', 1),
        "memory.json.gz",
        r"during and nodes have",
    ),
    "missing": (
        lambda t: t.replace('"waits"', '"was"'),
        "timeline.json.gz",
        r"the top has no 'waits'",
    ),
    "another executor": (
        lambda t: t.replace('"plain", "costs"', '"slow", "costs"'),
        "timeline.json.gz",
        r"executor is 'slow'",
    ),
    "out of range": (
        lambda t: t.replace('"waits": [0', '"waits": [77'),
        "timeline.json.gz",
        r"waits names collectives out of 0 to 2",
    ),
    "infinite": (
        lambda t: t.replace('"peak": ', '"peak": 1e999, "was": '),
        "memory.json.gz",
        r"plain.peak is 'inf', should be an integer",
    ),
}


class TestGarbled:
    @pytest.mark.parametrize("case", SPOILED)
    def test_files_are_named(self, spoilt: Path, tmp_path: Path, case: str) -> None:
        spoil, name, says = SPOILED[case]
        path = graphs_of(spoilt)[0] / name
        before = read(path, "testing")
        path.write_text(spoil(before))
        assert path.read_text() != before
        with pytest.raises(
            DumpError, match=rf"reading the dump: .*{path.parent.name}/{name}:? .*{says}|{says}"
        ) as caught:
            write_report(spoilt, tmp_path / "page.html")
        assert str(path) in str(caught.value)
        assert not (tmp_path / "page.html").exists()

    def test_bytes_for_text(self, spoilt: Path, tmp_path: Path) -> None:
        path = next(graphs_of(spoilt)[0].glob("01_*.txt"))
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(DumpError, match=r"01_lower.txt cannot be read as text"):
            write_report(spoilt, tmp_path / "page.html")

    def test_a_measured_run_of_another_graph(self, spoilt: Path, tmp_path: Path) -> None:
        path = spoilt / "rank0" / "measured.json"
        found = load(path)
        next(iter(found["graphs"].values()))["times"].pop()
        path.write_text(json.dumps(found))
        with pytest.raises(
            DumpError,
            match=r"measured.json: graphs.\d+_forward and the collectives have 2 and 3 entries",
        ):
            write_report(spoilt, tmp_path / "page.html")

    def test_a_graph_that_was_dumped_again(self, spoilt: Path, tmp_path: Path) -> None:
        path = graphs_of(spoilt)[0] / "timeline.json.gz"
        path.write_text(read(path, "testing").replace('"overhead": ', '"overhead": 1'))
        with pytest.raises(
            DumpError,
            match=r"measured.json: \d+_forward was measured before it was dumped again.*write it "
            "again",
        ):
            write_report(spoilt, tmp_path / "page.html")

    def test_no_dump(self, tmp_path: Path) -> None:
        with pytest.raises(
            DumpError,
            match=r"none is no folder; give one that dumped_to or COMPILED_FSDP_DUMP wrote",
        ):
            write_report(tmp_path / "none", tmp_path / "page.html")
        with pytest.raises(
            DumpError,
            match=r"holds no graph \(rank0/001_forward/00_capture.txt\): compile a sharded model",
        ):
            write_report(tmp_path, tmp_path / "page.html")


def main_job(folder: str) -> None:
    """What `train.py --report` does around a run of one step."""
    options = parse(
        [
            "--size",
            "tiny",
            "--backend",
            "compiled_fsdp_eager",
            "--steps",
            "1",
            "--report",
            "--out",
            folder,
        ]
    )
    small = {"tiny": replace(SIZES["tiny"], num_layers=1, hidden=64)}
    with mock.patch.dict(SIZES, small):
        trainer = Trainer(options, variants(options)[-1], load_text(None))
    report = StepReport(trainer)
    with planned():  # the costs that it measures are gone afterwards
        with report.dumped():
            trainer.step(0)
        report.write()


class TestMainJob:
    def test_report(self, two: Pool, tmp_path: Path) -> None:
        """Page and trace of both ranks, predicted from costs that they measured."""
        two.run(main_job, str(tmp_path))
        ranks = Page((tmp_path / "report.html").read_text()).data["ranks"]
        assert len(ranks) == 2
        for graph in (graph for rank in ranks for graph in rank["graphs"]):
            assert graph["measured"]["total"] > 0
            assert not graph["timeline"]["costs"]["is_assumed"]
            assert graph["timeline"]["costs"] == ranks[0]["graphs"][0]["timeline"]["costs"]
        assert {e["pid"] for e in load(tmp_path / "trace.json")["traceEvents"]} == {0, 1, 2, 3}

    @pytest.mark.parametrize("arguments", [["--impl", "stock"], ["--backend", "eager"]])
    def test_without_graphs_of_ours(self, arguments: list[str]) -> None:
        with pytest.raises(
            UsageError,
            match=r"--report shows our compiled graphs, and --impl .* makes none; leave it out",
        ):
            parse(["--report", *arguments])
