"""Runs files of `tests/jobs` where there is a GPU, or under the double of a driver that computes
nothing (`benchmarks/phantom`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from phantom import build

ROOT = Path(__file__).parents[2]
needs_cuda = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch's CUDA builds know a second kind of device"
)


def run_on_device(job: str, *words: str, timeout: float = 300.0) -> dict[str, Any]:
    """What a file of `tests/jobs` prints in its last line."""
    with tempfile.TemporaryDirectory() as folder:
        double = {} if torch.cuda.is_available() else build.build(Path(folder))
        given = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), given])
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "jobs" / job), *words],
            env={**os.environ, **double, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@cache
def device_rows(front: str) -> dict[str, dict[str, Any]]:
    """What "stock" and "ours" do, by row."""
    return run_on_device("device_rows.py", front)
