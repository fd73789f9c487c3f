"""What costs do to a prediction is shown as what it is, and costs that scatter are not believed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from torch import nn

from compiled_fsdp import Costs, Link, dumped_to, explain, fully_shard, planned
from compiled_fsdp.inspection.check import load
from compiled_fsdp.inspection.explanation import Step
from compiled_fsdp.inspection.explanation_text import _far_off
from compiled_fsdp.planning import calibrate
from compiled_fsdp.wire import runs

if TYPE_CHECKING:
    from pathlib import Path

# A link whose starts delay the thread by 16 ms, as one that was measured on a loaded machine did.
SLOW = Costs(1e9, 1e9, 1e-5, (("0", Link(1e-3, 1e7, start=16e-3)),))


@pytest.mark.usefixtures("fake_world")
def test_starting_a_collective_is_no_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_runs", {})
    torch._dynamo.reset()
    model = nn.Sequential(*(fully_shard(nn.Linear(8, 8)) for _ in range(3)))
    run = torch.compile(fully_shard(model), backend="compiled_fsdp_eager")
    with dumped_to(tmp_path), planned(costs=SLOW):
        run(torch.ones(4, 8)).sum().backward()
    for path in tmp_path.glob("rank0/*/timeline.json.gz"):
        found = load(path, "testing")
        for executor in ("plain", "fused"):
            line = found[executor]
            assert {round(t["issuing"], 6) for t in line["times"]} == {16e-3}
            assert sum(end - begin for begin, end, *_ in line["compute"]) < 1e-3
            starts = [(t["issued"], t["issued"] + t["issuing"]) for t in line["times"]]
            assert not any(
                begin < end_of and start < end - 1e-9
                for begin, end, *_ in line["compute"]
                for start, end_of in starts
            )


def test_a_prediction_far_from_its_measurement_is_flagged() -> None:
    def step(predicted: float, measured: float | None) -> Step:
        return Step(3, predicted, 0.0, 1, measured, None, None, None, [])

    assert _far_off(step(1.0, 1.9)) == _far_off(step(1.0, 0.6)) == _far_off(step(1.0, None)) == []
    (told,) = _far_off(step(1.0, 0.05))
    assert told.startswith("a step took 0.05 times what is predicted, which knows neither")


@pytest.mark.usefixtures("fake_world")
def test_it_is_in_the_text() -> None:
    model = fully_shard(nn.Linear(4, 4))
    found = explain(model)
    assert "times what is predicted" not in str(found)
    object.__setattr__(found, "step", Step(3, 1.0, 0.0, 1, 9.0, None, None, None, []))
    assert "(a step took 9 times what is predicted" in str(found)


class TestRepeatsThatScatter:
    def test_a_difference_smaller_than_its_uncertainty_is_none(self) -> None:
        assert calibrate.certain([0.9e-3, 1e-3, 1.1e-3, 1.2e-3, 9e-3]) == 1.1e-3
        assert calibrate.certain([0.0, 1e-3, 16e-3, 20e-3, 21e-3]) == 0.0
        assert calibrate.certain([-3e-3, -2e-3, -1e-3, 0.0, 0.0]) == 0.0

    @pytest.mark.parametrize(
        ("scatters", "flops", "warns"),
        [([1.1, 9.0], 1.0, False), ([9.0, 1.1], 2.0, False), ([9.0, 7.0, 8.0], 2.0, True)],
    )
    def test_everything_is_measured_again(
        self, scatters: list[float], flops: float, *, warns: bool
    ) -> None:
        """The calmest of three rounds counts, and a warning says so if none was calm."""
        rounds = [
            (scatter, [float(number), *range(2, 11)]) for number, scatter in enumerate(scatters, 1)
        ]
        info = mock.Mock(device=torch.device("cpu"))
        with (
            warnings.catch_warnings(record=True) as told,
            mock.patch.object(calibrate, "groups_of", return_value={"0": None}),
            mock.patch.object(calibrate, "_round", side_effect=rounds),
        ):
            costs = calibrate.calibrate([info])
        assert costs is not None
        assert costs.flops == flops
        texts = [str(warning.message) for warning in told]
        assert len(texts) == warns
        assert not warns or "repeats of the same differ by a factor of 7" in texts[0]

    def test_what_scatters_is_noticed(self) -> None:
        watch = calibrate.Stopwatch(torch.device("cpu"))
        for times in ([9.0, 1.0, 5.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0, 6.0, 9.0]):
            with mock.patch.object(watch, "once", side_effect=times):
                watch.seconds(print)
        assert watch.scatter == [1.0, 6.0]
