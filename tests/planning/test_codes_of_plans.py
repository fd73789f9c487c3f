"""What a plan may say of codes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_fsdp import Plan

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
