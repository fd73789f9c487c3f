"""What `explain` says is true to its reader: each test is something that misled one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from compiled_fsdp import dumped_to, explain, fully_shard
from compiled_fsdp.inspection.explanation import Explanation
from compiled_fsdp.wire import runs

pytestmark = pytest.mark.usefixtures("fake_world", "_nothing_ran")


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
            [c["kind"] for c in json.loads(path.read_text())["collectives"]]
            for path in sorted(tmp_path.glob("rank0/*_backward/timeline.json"))
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
