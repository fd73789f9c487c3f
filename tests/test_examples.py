"""The scripts of `examples/`, in small: they run to their end, and what they train learns.

Those that need libraries of others run in `make test-clients`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS = {
    "plain_loop": [],
    "to_a_report": [],
    "hsdp_tensor_parallel": [],
    "transformers_dcp": ["transformers"],
    "accelerate_loop": ["transformers", "accelerate"],
    "lightning_fabric": ["lightning"],
    "lora": ["transformers", "peft"],
}
RANKS = {"hsdp_tensor_parallel": 4}
ARGS = {"plain_loop": "--out", "transformers_dcp": "--folder", "lora": "--out"}  # what it writes


def run(name: str, folder: Path, *args: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS.get(name, 2)), str(ROOT / "examples" / f"{name}.py")]
    command += ["--backend", "compiled_fsdp_eager", *args]
    command += [ARGS[name], str(folder / "out")] if name in ARGS else []
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_example_is_run() -> None:
    scripts = {path.stem: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert set(scripts) == set(NEEDS)
    too_long = {name for name, text in scripts.items() if text.count("\n") > 80}
    assert not too_long


@pytest.mark.parametrize("name", NEEDS)
def test_example(name: str, tmp_path: Path) -> None:
    missing = [library for library in NEEDS[name] if find_spec(library) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: run `make test-clients`")
    said = run(name, tmp_path, "--steps", "50" if name == "transformers_dcp" else "41")
    if name == "transformers_dcp":
        said += run(name, tmp_path, "--steps", "50")
    losses = [float(loss) for loss in re.findall(r"(?:loss|evaluated:) (\d+\.\d+)", said)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert "in a graph" in said
    assert " eager" not in said
    assert name != "to_a_report" or (tmp_path / "report.html").stat().st_size > 50_000
