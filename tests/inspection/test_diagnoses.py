"""What `explain` says is true to its reader: each test is something that misled one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from compiled_fsdp import dumped_to, explain, fully_shard
from compiled_fsdp.inspection.check import load
from compiled_fsdp.inspection.explanation import Explanation
from compiled_fsdp.wire import runs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("fake_world", "no_progress", "_nothing_ran")


@pytest.fixture
def _nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of other tests are none of this one's."""
    torch._dynamo.reset()
    monkeypatch.setattr(runs, "_runs", {})


class Model(nn.Module):
    """Three layers, each a unit, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def build() -> nn.Module:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="compiled_fsdp_eager")


def train(call: nn.Module) -> None:
    call(torch.ones(2, 4)).sum().backward()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "compiled_fsdp"]


class TestCollectives:
    def test_those_that_start_are_counted(self, tmp_path: Path) -> None:
        """A backward under `set_requires_gradient_sync(False)` reduces nothing, and neither the
        records nor the dump say so.
        """
        model = build()
        run = compiled(model)
        with dumped_to(tmp_path):
            model.set_requires_gradient_sync(False)
            train(run)
            model.set_requires_gradient_sync(True)
            train(run)
        found = explain(run)
        dumped = [
            [c["kind"] for c in load(path, "testing")["collectives"]]
            for path in sorted(tmp_path.glob("rank0/*_backward/timeline.json.gz"))
        ]
        backwards = [graph for graph in found.graphs if graph.kind == "backward"]
        assert [len(graph.reductions) for graph in backwards] == [0, 4]
        assert [kinds.count("reduce") for kinds in dumped] == [0, 4]
        assert [graph.retained for graph in backwards] == [
            ["Model", "layers.2", "layers.1", "layers.0"],
            [],
        ]
        assert "of 4 units kept for a later backward (set_requires_gradient_sync(False))" in str(
            found
        )
        numbers = {u.name: [s.graph for s in u.reductions] for u in found.units}
        assert set(map(tuple, numbers.values())) == {(2,)}
        assert Explanation.of_dict(json.loads(json.dumps(found.as_dict()))) == found

    def test_a_number_reads_as_a_number(self) -> None:
        """ "all-gathers 0 in graph 0" reads as none."""
        train(run := compiled(build()))
        text = str(explain(run))
        assert "    all-gathers #0 of graph 0" in text
        assert not re.search(r"all-gathers \d", text)


class TestWhereUnitsRan:
    def test_layers_that_are_compiled_by_themselves(self) -> None:
        model = build()
        for layer in model.layers:
            layer.compile(backend="compiled_fsdp_eager")
        train(model)
        found = {unit.name: unit for unit in explain(model).units}
        assert {found[f"layers.{n}"].where for n in range(3)} == {"in a graph"}
        assert (found["Model"].where, found["Model"].why) == (
            "eager",
            ["its forward is not compiled, that of other units is"],
        )

    def test_an_eager_evaluation(self) -> None:
        """Training runs in a graph, whatever an evaluation does."""
        train(run := compiled(model := build()))
        with torch.no_grad():
            model(torch.ones(2, 4))
        found = explain(run)
        assert {unit.where for unit in found.units} == {"in a graph"}
        assert (
            "  4 in a graph: layers.0 to layers.2, Model\n"
            "    layers.0 to layers.2, Model: its forward also ran eagerly without gradients, as "
            "when an evaluation calls the model that is not compiled\n" in str(found)
        )
        assert "Model of 4 units: 4 in a graph;" in found.summary()

    def test_training_in_both_ways(self) -> None:
        train(run := compiled(model := build()))
        train(model)
        (why,) = {(unit.where, *unit.why) for unit in explain(run).units}
        assert why == (
            "in a graph and eager",
            "its forward also ran with gradients outside the graphs, called by what is not "
            "compiled",
        )

    @pytest.mark.parametrize("call", [compiled, lambda model: model])
    def test_the_summary_waits_for_a_backward(
        self, call: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
    ) -> None:
        """To resume, `torch.distributed.checkpoint` steps the optimizer before anything ran."""
        run = call(model := build())
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        assert explain(run).step.count == 0
        assert said(caplog) == []
        for _ in range(2):
            train(run)
            optimizer.step()
        (summary,) = said(caplog)
        assert "not run yet" not in summary
        assert explain(run).step.count == 2
