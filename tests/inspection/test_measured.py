"""A profile laid over a dump: the graph that ran, the step that it ran in, and nothing longer than
what contains it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from kit.reported import data_of
from torch import nn
from torch.profiler import ProfilerAction, profile

from compiled_fsdp import dumped_to, explain, fully_shard
from compiled_fsdp.inspection.check import load
from compiled_fsdp.inspection.report.headline import headline
from compiled_fsdp.report import add_profile, write_report
from compiled_fsdp.wire import runs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("fake_world")


class Job:
    """A script that trains and evaluates; what it compiles is dumped."""

    def __init__(self, dump: Path) -> None:
        torch._dynamo.reset()
        self.dump = dump
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        self.model = fully_shard(model)
        self.run = torch.compile(model, backend="compiled_fsdp_eager")
        self.optimizer = torch.optim.AdamW(model.parameters())

    def forward_backward(self, *, is_last: bool = True) -> None:
        self.model.set_requires_gradient_sync(is_last)
        with dumped_to(self.dump):
            self.run(torch.ones(4, 8)).sum().backward()

    def step(self, accumulate: int = 1) -> None:
        for n in range(accumulate):
            self.forward_backward(is_last=n == accumulate - 1)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        with dumped_to(self.dump):
            self.run(torch.ones(4, 8))
        self.model.train()

    def measured(self, found: profile) -> dict[str, Any]:
        return json.loads(add_profile(self.dump, found).read_text())

    def halves(self) -> list[str]:
        return sorted(path.parent.name for path in self.dump.glob("rank0/*/timeline.json.gz"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(runs, "_runs", {})
    return Job(tmp_path / "dump")


class TestTheGraphThatRan:
    def test_an_evaluation_is_another_graph(self, job: Job) -> None:
        """Both forwards start the same collectives; the one without gradients came last."""
        for _ in range(2):
            job.step()
            job.evaluate()
        with profile() as found:
            job.step()
            job.evaluate()
        training, backward, evaluation = job.halves()
        assert set(job.measured(found)["graphs"]) == {training, backward, evaluation}
        with profile() as found:
            job.step()
        assert set(job.measured(found)["graphs"]) == {training, backward}
        with profile() as found:
            job.evaluate()
        assert set(job.measured(found)["graphs"]) == {evaluation}

    def test_a_forward_belongs_to_its_backward(self, job: Job) -> None:
        """Accumulation compiles the same forward twice, once for each kind of backward."""
        for _ in range(2):
            job.step(accumulate=2)
        with profile() as found:
            job.step(accumulate=2)
        measured = job.measured(found)
        assert list(measured["graphs"]) == job.halves()
        parts = [(kind, name) for _, _, kind, name in measured["step"]["parts"]]
        assert [p for p in parts if p[0] in ("forward", "backward")] == [
            (name.partition("_")[2], name) for name in job.halves()
        ]

    def test_without_digests(self, job: Job, tmp_path: Path) -> None:
        """A profile that does not say which graphs ran is matched by what follows what."""
        for _ in range(2):
            job.step()
            job.evaluate()
        with profile() as found:
            job.step()
            job.evaluate()
        path = tmp_path / "profile.json"
        found.export_chrome_trace(str(path))
        path.write_text(path.read_text().replace("compiled_fsdp graph ", "anything "))
        measured = json.loads(add_profile(job.dump, path).read_text())
        assert list(measured["graphs"]) == job.halves()
        assert [kind for _, _, kind, _ in measured["step"]["parts"]].count("forward") == 1


class TestTheStep:
    def test_what_it_consists_of(self, job: Job) -> None:
        for _ in range(2):
            job.step()
        with profile() as found:
            job.step()
            job.step()
        step = job.measured(found)["step"]
        kinds = {kind for _, _, kind, _ in step["parts"]}
        assert kinds == {"autograd", "forward", "backward", "clip", "optimizer"}
        assert step["notes"] == []
        rows = [row[:2] for name in ("parts", "waits", "starts") for row in step[name]]
        assert all(0 <= begin <= end <= step["total"] for begin, end in rows)

    def test_modules_compute(self, job: Job) -> None:
        """Heavy kernels by the order of their ops, as in the graph."""
        for _ in range(2):
            job.step()
        with profile() as found:
            job.step()
        measured = job.measured(found)
        for name in job.halves():
            timeline = load(job.dump / "rank0" / name / "timeline.json.gz", "testing")
            heavy = [row[2:] for row in timeline["plain"]["compute"] if "mm" in row[2]]
            rows = measured["graphs"][name]["compute"]
            assert [row[2:] for row in rows if "mm" in row[2]] == heavy
            assert {row[3] for row in rows} > {"0", "1", "2"} - {"" if heavy else "0"}

    def test_a_part_of_one_says_so(self, job: Job, tmp_path: Path) -> None:
        for _ in range(2):
            job.step()
        with profile() as found:
            job.forward_backward()
        notes = ["the profile covers part of a step: it has no optimizer's step"]
        assert job.measured(found)["step"]["notes"] == notes
        assert explain(job.run, profile=found).step.notes == notes
        write_report(job.dump, tmp_path / "page.html")
        assert notes[0] in str(data_of(tmp_path / "page.html"))

    def test_a_compilation_in_it_is_named(self, job: Job) -> None:
        """A first step is mostly compilation, which waits for other ranks and runs ops on fake
        tensors: none of that is communication.
        """
        with profile() as found:
            job.step()
        measured = job.measured(found)
        step = measured["step"]
        assert 0 < step["compiling"] < step["total"]
        assert step["waiting"] + step["starting"] <= step["total"] - step["compiling"]
        (note,) = step["notes"]
        assert "of the profiled step are compilation" in note
        assert list(measured["graphs"]) == job.halves()
        assert all(run["total"] <= step["total"] for run in measured["graphs"].values())
        told = explain(job.run, profile=found)
        assert told.step.profiled_exposed <= told.step.profiled_seconds
        assert f"({note})" in str(told)

    def test_a_calm_step_is_preferred(self, job: Job) -> None:
        """Of a profile from the first step on, one that compiles nothing."""
        with profile() as found:
            for _ in range(3):
                job.step()
        measured = job.measured(found)
        assert measured["step"]["compiling"] == 0
        assert measured["step"]["notes"] == []
        assert "wait for communication" in str(explain(job.run, profile=found))

    def test_steps_that_the_profiler_counts(self, job: Job) -> None:
        for _ in range(2):
            job.step()
        job.evaluate()
        with profile(schedule=lambda _: ProfilerAction.RECORD) as found:
            for _ in range(2):
                job.step()
                job.evaluate()
                found.step()
        parts = job.measured(found)["step"]["parts"]
        assert [kind for _, _, kind, _ in parts].count("forward") == 2  # a step, and an evaluation


class TestHeadline:
    """What the page says first."""

    STEP: ClassVar[dict[str, Any]] = {
        "total": 0.0892,
        "waiting": 0.0491,
        "starting": 0.0001,
        "compiling": 0.0,
        "largest": ["reduction of layers.0", 0.0089],
    }

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            (
                {},
                "55 % of the step waits for communication (49.1 ms of 89.2 ms); largest: the "
                "reduction of layers.0, 8.9 ms.",
            ),
            (
                {"largest": ["a collective outside the graphs", 0.0079]},
                "largest: a collective outside the graphs, 7.9 ms.",
            ),
            (
                {"waiting": 1e-4},
                "Less than 1 % of the step waits for communication: there is nothing to gain.",
            ),
            (
                {"starting": 0.05},
                "8.9 ms. Starting collectives takes more, 56 % (50.0 ms): the training thread "
                "copies, or shares its core with those that send.",
            ),
            (
                {"compiling": 0.0446},
                "50 % of the profiled step is compilation, so it says little of others: profile a "
                "later step.",
            ),
        ],
    )
    def test_of_a_measured_step(self, changes: dict[str, Any], says: str) -> None:
        assert headline({**self.STEP, **changes}).endswith(says)

    def test_without_a_profile(self) -> None:
        assert headline(None).startswith("Predicted, not measured.")

    def test_it_is_on_the_page(self, job: Job, tmp_path: Path) -> None:
        for _ in range(2):
            job.step()
        with profile() as found:
            job.step()
        job.measured(found)
        write_report(job.dump, tmp_path / "page.html")
        assert "the step waits for communication" in str(data_of(tmp_path / "page.html"))
