"""`python -m compiled_fsdp simulate`: a script written for torchrun, as one rank of many."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from compiled_fsdp.command import cli

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

kind, steps = sys.argv[1], int(sys.argv[2])
store, rank, world = next(dist.rendezvous("env://"))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (5, 8, "1")
others = dist.new_group([4, 5], backend="gloo")
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
for module in (*model, model):
    fully_shard(module, mesh=mesh)
ours = type(model).__mro__[1].__module__.startswith("compiled_fsdp")
assert ours == (kind == "ours")
call = torch.compile(model, backend="compiled_fsdp_eager") if ours else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(steps):
    call(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if kind == "raises":
    raise ValueError("of the script")
sys.exit(3 if kind == "exits" else 0)
"""
WORLD = ("simulate", "--world", "8", "--rank", "5", "--gpus-per-node", "4", "--network", "1e9")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    yield str(path)
    torch._dynamo.reset()
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_script_is_one_rank_of_many(
    script: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    options = [*WORLD, "--link", "1e10", "--latency", "1e-3", "--json", str(out)]
    options += ["--replace"] if kind == "ours" else []
    assert cli.main([*options, script, kind, "6"]) == 0
    text = capsys.readouterr().out
    assert "rank 5 of 8, 4 on each node; link 10 GB/s, 1000 us; network 1 GB/s, 1000 us" in text
    assert "3 steps timed, the first 3 left out" in text
    found = json.loads(out.read_text())
    assert (found["num_steps"], found["num_skipped"]) == (3, 3)
    sent = {(each["kind"], each["wire"]): each["sent_bytes"] for each in found["kinds"]}
    numel = 2 * (64 * 64 + 64)
    assert sent["reduce_scatter", "link"] == numel * 4 * 3 / 4
    assert sent["all_reduce", "network"] == 2 * numel * 4 / 4 / 2
    wire = sum(each["wire_s"] for each in found["kinds"])
    assert wire >= 1e-3 * sum(each["count"] for each in found["kinds"])
    assert 0 < found["exposed_s"] < found["slowest_s"]
    assert found["floor_s"] <= found["slowest_s"]


def test_what_the_script_says_goes_through(script: str) -> None:
    with pytest.raises(ValueError, match="of the script"):
        cli.main([*WORLD, script, "raises", "1"])
    with pytest.raises(SystemExit, match="3"):
        cli.main([*WORLD, script, "exits", "1"])


def test_what_cannot_be_simulated(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WORLD, script, "stock", "3"]) == 2
    assert (
        "ended after 3 steps of its optimizer. The first 3 are left out" in capsys.readouterr().err
    )
    assert cli.main([*WORLD[:-1], "0", script]) == 2
    assert "'network' has a bandwidth of 0.0 bytes/s" in capsys.readouterr().err
    assert cli.main([*WORLD, str(tmp_path / "none.py")]) == 2
    assert "simulate: there is no file" in capsys.readouterr().err
