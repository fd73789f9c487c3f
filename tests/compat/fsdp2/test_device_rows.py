"""Rows that need a second kind of device beside the CPU."""

from __future__ import annotations

import pytest
from kit.device import device_rows, needs_cuda
from kit.oracle import rows


@needs_cuda
@pytest.mark.timeout(400)
@rows("1.27", "4c.10", "6.11", "15.15")
def test_devices() -> None:
    """Tensors that the first call is given, of the model or of one of its units, go to the device;
    what a forward gives to units inside stays where it is.
    """
    found = device_rows("fsdp2")
    for row in ("1.27", "4c.10", "6.11", "15.15"):
        assert found["ours"][row] == found["stock"][row], row
    (eagerly, warned), *compiled = found["ours"]["6.11"]
    gpu = "cuda:0"
    assert (eagerly, warned) == ([gpu, [[gpu, gpu, ""], [gpu, "", "cpu"]], gpu, gpu], [])
    assert compiled == [[[gpu, [], gpu, gpu], []]] * 2
    assert found["ours"]["1.27"] == "ValueError"
    assert found["ours"]["4c.10"][0][:2] == [gpu, [gpu]]
