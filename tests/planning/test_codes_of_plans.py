"""What a plan may say of codes on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from compiled_fsdp import Plan, fully_shard, set_plan
from compiled_fsdp.frontend.state import get_state
from compiled_fsdp.planning.plan import current_plan
from compiled_fsdp.units.unit import Unit

INT8 = torch.int8


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"gather_quantized": torch.int4},
            r"Plan: gather_quantized=torch.int4; should be one of \(torch.int8, "
            r"torch.float8_e4m3fn\), or None \(exact\)",
        ),
        ({"reduce_quantized": "int8"}, r"Plan: reduce_quantized='int8'; should be one of"),
        (
            {"exact": "head"},
            r"Plan: exact='head'; should be a tuple of names of parameters, for example "
            r'\("head.\*",\)',
        ),
        (
            {"reduce_quantized": INT8, "reductions": "reduce_scatter"},
            r"Plan: reductions='reduce_scatter' with reduce_quantized=torch.int8; codes cannot be "
            r"added on the way.*Leave out one of the two",
        ),
    ],
)
def test_errors(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Plan(**fields)


def test_written_down() -> None:
    plan = Plan(gather_quantized=INT8, exact=("head.*",))
    assert eval(repr(plan), {"Plan": Plan, "torch": torch}) == plan


@pytest.mark.usefixtures("fake_world")
def test_a_unit_that_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan stays as it was, for the units that had followed too."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    first, second = (get_state(fully_shard(layer)).unit for layer in model)
    publish = Unit.publish

    def raising(unit: Unit) -> None:
        if unit is second and unit.settings.gather_quantized is not None:
            raise RuntimeError("no room")
        publish(unit)

    monkeypatch.setattr(Unit, "publish", raising)
    before = current_plan()
    with pytest.raises(RuntimeError, match="no room"):
        set_plan(replace(before, gather_quantized=INT8))
    assert current_plan() == before
    for unit in (first, second):
        assert unit.settings.gather_quantized is None
        assert all(param.spec.gather_quantized is None for param in unit.params)
