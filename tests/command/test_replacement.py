"""`replace_stock` and `python -m compiled_fsdp run`: scripts written for torch's FSDP,
unchanged.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch.distributed.fsdp as stock
from torch.distributed.fsdp import fully_sharded_data_parallel

import compiled_fsdp
from compiled_fsdp import replace_stock
from compiled_fsdp.__main__ import main

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
from helper_of_mine import shard

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh, mp_policy=MixedPrecisionPolicy())
model(torch.ones(2, 4)).sum().backward()
print("imported:", *({"torch._inductor.lowering", "torch._inductor.scheduler"} & {*sys.modules}))
torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(torch.ones(2, 4)).sum().backward()
wrapped = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
print(__name__, sys.argv[1:], type(model).__mro__[1].__module__.split(".")[0], type(wrapped).__module__.split(".")[0])
dist.destroy_process_group()
raise SystemExit(3)
"""  # noqa: E501
HELPER = """
from torch.distributed.fsdp import fully_shard


def shard(model, **options):
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_mine.py").write_text(HELPER)
    (tmp_path / "train_it.py").write_text(SCRIPT)
    return tmp_path / "train_it.py"


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = os.environ | alone | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    whole = [sys.executable, "-m", "compiled_fsdp", *command]
    return subprocess.run(
        whole, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_for_torch_runs_with_ours(script: Path, is_module: bool) -> None:
    """Its arguments, its name, what lies beside it, and its exit status are its own. Until it
    compiles it need not wait for Inductor to be imported.
    """
    named = ("-m", script.stem) if is_module else (str(script),)
    done = run("run", *named, "--steps", "3", "-m", cwd=script.parent)
    assert done.returncode == 3, done.stderr
    assert "__main__ ['--steps', '3', '-m'] compiled_fsdp compiled_fsdp" in done.stdout
    assert "imported:\n" in done.stdout
    assert "compiled_fsdp: in place of torch's: fully_shard, " in done.stderr


def test_no_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "missing.py"]) == 2
    assert (
        capsys.readouterr().err
        == "python -m compiled_fsdp run: there is no file 'missing.py'. For a module, say -m\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"compiled_fsdp {compiled_fsdp.__version__}\n"


def test_names_that_a_library_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("library_with_torchs_names")
    theirs = stock.fully_shard, stock.FullyShardedDataParallel
    library.shard, library.FSDP = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library.__name__, library)
    with replace_stock() as found:
        assert library.shard is compiled_fsdp.fully_shard  # type: ignore[attr-defined]
        assert library.FSDP is compiled_fsdp.FullyShardedDataParallel  # type: ignore[attr-defined]
        assert stock.fully_shard is compiled_fsdp.fully_shard
        assert (
            fully_sharded_data_parallel.FullyShardedDataParallel
            is compiled_fsdp.FullyShardedDataParallel
        )
        assert "shard, FSDP of library_with_torchs_names" in str(found)
        with replace_stock() as again:
            assert not again.replaced
    assert (library.shard, library.FSDP) == theirs  # type: ignore[attr-defined]
    assert (stock.fully_shard, stock.FullyShardedDataParallel) == theirs
    assert not found.replaced


def test_what_ours_is_made_of_stays() -> None:
    """A second replacement would otherwise find our own names of torch's class."""
    before = {
        name: vars(module).copy()
        for name, module in sys.modules.items()
        if name.startswith("compiled_fsdp")
    }
    with replace_stock():
        for name, names in before.items():
            now = vars(sys.modules[name])
            assert all(
                now[key] is value
                for key, value in names.items()
                if key in now and not key.startswith("__")
            )
