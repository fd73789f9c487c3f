"""What a GPU would raise: every way to train, called on one, or on the double of a driver."""

from __future__ import annotations

import pytest
from kit.device import needs_cuda, run_on_device


@needs_cuda
@pytest.mark.timeout(600)
def test_ways() -> None:
    found = run_on_device("device_ways.py", timeout=550)
    assert len(found) > 50
    for name, where in found.items():
        wanted = {"cpu", "cuda"} if "offload" in name and "activations" not in name else {"cuda"}
        assert isinstance(where, list), f"{name}: {where}"
        assert {*where} == (wanted if name != "state" else {"cpu", "cuda"}), name
