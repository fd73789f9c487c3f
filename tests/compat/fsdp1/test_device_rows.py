"""Rows that need a second kind of device beside the CPU."""

from __future__ import annotations

import pytest
from kit.device import device_rows, needs_cuda
from kit.oracle_fsdp1 import rows


@needs_cuda
@pytest.mark.timeout(400)
@rows("1.5", "1.7", "1.10", "4.11", "16.11")
def test_devices() -> None:
    found = device_rows("fsdp1")
    for row in ("1.5", "1.7", "1.10", "4.11", "16.11"):
        assert found["ours"][row] == found["stock"][row], row
    (paths, _), (moved, _) = found["ours"]["1.10"]
    assert paths[0] == ["cpu"]
    assert moved == [["cuda:0"], "cuda:0"]
    assert found["ours"]["16.11"] == [[[["cpu", "cpu"]], "cuda:0", ["cpu"] * 4], []]
