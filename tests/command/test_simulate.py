"""`python -m compiled_fsdp simulate`: a script written for torchrun, as one rank of many."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compiled_fsdp import fully_shard
from compiled_fsdp.command import cli
from compiled_fsdp.command.simulate import as_rank
from compiled_fsdp.wire.world import Wire, World

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


COMPILED_DDP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
call = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    call(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_collectives_in_the_middle_of_what_is_compiled(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Buffers are broadcast by torch's library, in forward, where Dynamo is at work."""
    Path(script).write_text(COMPILED_DDP)
    assert cli.main([*WORLD, script]) == 0
    assert "broadcast       network      2.0" in capsys.readouterr().out


def test_symmetric_memory_is_accepted() -> None:
    """Nothing travels, so there is nothing to do."""
    wire = Wire("wire", 1e9)
    with as_rank(World(4, 1, wire, wire)):
        dist.init_process_group("nccl")
        model: Any = fully_shard(nn.Linear(8, 8))
        model.set_symm_mem_for_comm()
        model(torch.ones(2, 8)).sum().backward()
        assert model.weight.grad is not None


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_a_script_is_one_rank_of_many(
    script: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    options = [*WORLD, "--link", "1e10", "--latency", "1e-3", "--json", str(out)]
    options += ["--tokens", "512", "--peak-flops", "1e12"]
    page = tmp_path / "page.html"
    options += ["--replace", "--report", str(page)] if kind == "ours" else []
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
    gathered = sum(each["exposed_s"] for each in found["kinds"])
    assert gathered == pytest.approx(found["exposed_s"], rel=0.5)  # a mean, and a median of few
    memory = found["memory"]
    assert (memory["parameters"], memory["optimizer"]) == (numel, 0)  # 4 bytes, over 4 ranks
    # the input of a matmul is no parameter: the first layer has no gradient of its input
    assert found["flops"] == 5 * 2 * 2 * 64 * 64
    assert found["used"] == pytest.approx(found["flops"] / found["step_s"] / 1e12)
    assert memory["peak"] > numel * 4 / 2
    assert bool(memory["by_kind"]) == (kind == "ours")
    assert f"{512 / found['step_s']:.0f} /s  of all ranks, 512 in a step" in text


STRANGER = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda:0"))
dist.monitored_barrier()
rank, world = dist.get_rank(), dist.get_world_size()
if rank % 4 < 2:
    dist.all_reduce(torch.ones(2), group=dist.new_subgroups(2)[0])
everyones = [None] * world
dist.all_gather_object(everyones, {"rank": rank})
assert everyones == [{"rank": rank}] * world
part = torch.ones(2)
dist.scatter(part, [torch.full((2,), 7.0)] * world if rank == 0 else None, src=0)
assert part.tolist() == [7.0 * (rank == 0)] * 2
seed = [3 if rank == 0 else None]
dist.broadcast_object_list(seed, src=0)
assert seed == [3]
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
model = nn.Linear(16, 16)
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
other = torch.optim.SGD(model.parameters())
scaler = torch.amp.GradScaler("cpu")
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 3))
for _ in range(5):
    scaler.scale(model(torch.ones(2, 16)).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    other.step()
    warmup.step()
    optimizer.zero_grad()
    dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
raise RuntimeError("after its steps")
"""


def test_a_stranger_s_script(script: str, tmp_path: Path) -> None:
    """What real ranks would wait for; and an error in the end does not lose what was found."""
    Path(script).write_text(STRANGER)
    options = ["simulate", "--world", "8", "--network", "1e9", script, str(tmp_path / "saved")]
    with (
        pytest.warns(UserWarning, match="one simulated rank has a part only: nothing was written"),
        pytest.raises(RuntimeError, match="after its steps") as raised,
    ):
        cli.main(options)
    assert not (tmp_path / "saved").exists()
    if sys.version_info >= (3, 11):
        assert "2 steps timed, the first 3 left out" in raised.value.__notes__[0]


PROFILES = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
model = nn.Linear(16, 16)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
traced = []
with torch.profiler.profile(
    schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
    on_trace_ready=lambda profile: traced.append(len(profile.events())),
) as profile:
    for _ in range(5):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        profile.step()
assert traced and traced[0] > 0
"""


def test_the_script_s_own_profiler_goes_first(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which starts while ours is on."""
    before = torch.profiler.profile.prepare_trace
    Path(script).write_text(PROFILES)
    assert cli.main(["simulate", "--world", "8", "--network", "1e9", script]) == 0
    text = capsys.readouterr().out
    assert "note: the script profiles its first steps itself, so operations" in text
    assert torch.profiler.profile.prepare_trace is before


def test_objects_of_other_ranks_are_not_known(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(STRANGER)
    options = ["simulate", "--world", "8", "--rank", "5", "--network", "1e9", script, "nowhere"]
    assert cli.main(options) == 2
    assert (
        "simulated as rank 5, gets objects of rank 0 by broadcast_object_list, and nobody knows "
        "what they are: pass --rank 0" in capsys.readouterr().err
    )


@pytest.mark.parametrize("skip", [0, 3])
def test_a_long_script_is_ended(
    script: str, skip: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that goes on after every error, and cleans up behind itself."""
    text = SCRIPT.replace("    optimizer.step()\n", TRIES)
    assert text != SCRIPT
    Path(script).write_text(text)
    out = tmp_path / "found.json"
    options = ["--skip", str(skip), "--steps", "4", "--json", str(out)]
    assert cli.main([*WORLD, *options, script, "stock", "100000"]) == 0
    said = capsys.readouterr().out
    assert "4 steps timed, the first" in said
    assert "left out; then the script was ended (--steps)\n" in said
    assert "cleaned up" in said
    found = json.loads(out.read_text())
    assert (found["num_steps"], found["num_skipped"]) == (4, max(skip, 1))
    assert found["was_ended"]


TRIES = """\
    try:
        optimizer.step()
    except Exception as error:
        print("a bad batch", error)
    finally:
        if _ > 3:
            print("cleaned up")
"""


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
    for options, message in (
        (
            ["--report", "page.html"],
            "the page is about compiled graphs of ours, and the script has",
        ),
        (["--plan", "budget=1"], "'budget' is no field that can be set here; those are"),
        (["--steps", "0"], "--steps 0; should be how many steps to time, 1 or more"),
        (["--plan", "prefetch=-1"], "prefetch=-1; should be a number of units"),
        (["--plan", "prefetch"], "'prefetch' should be like memory_budget=0.5"),
        (
            ["--machine", "h1"],
            "there is no machine 'h1', and no such file: known are ['b200', 'h100",
        ),
        (["--machine", script], "should be JSON with the fields ['name', 'source', "),
        (["--machine", "h100"], "the script trains in none: compile the sharded model"),
    ):
        assert cli.main([*WORLD, *options, script, "stock", "4"]) == 2
        assert message in capsys.readouterr().err
    assert cli.main([*WORLD[:-2], script]) == 2
    assert "--network says how fast nodes reach each other" in capsys.readouterr().err


LOADS = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Linear(16, 16)
full = {name: value.clone() for name, value in model.state_dict().items()}
fully_shard(model)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, full, options=options)
dist.distributed_c10d._get_pg_default_device()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    dcp.save_state_dict({"model": model.state_dict()}, dcp.FileSystemWriter("nowhere"))
"""


def test_a_state_dict_is_broadcast(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For which torch asks a group what devices it is for."""
    Path(script).write_text(LOADS)
    assert cli.main(["simulate", "--world", "4", "--network", "1e9", "--replace", script]) == 0
    assert "2 steps timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--network", "nan"], "'network' has a bandwidth of nan"),
        (["--link", "0"], "'link' has a bandwidth of 0.0"),
        (["--gpus-per-node", "0"], "cannot have 0 on each node"),
        (["--skip", "-1"], "--skip -1; should be how many"),
        (["--tokens", "-5"], "--tokens -5; should be a number above 0"),
        (["--peak-flops", "0"], "--peak-flops 0; should be a number above 0"),
        (["--efficiency", "0", "--machine", "h100"], "--efficiency 0; should be a number above 0"),
        (["--efficiency", "7", "--machine", "h100"], "--efficiency 7; should be a part of"),
        (["--efficiency", "0.5"], "--efficiency: what is measured here has its own"),
        (["--memory-limit", "1e9"], "--memory-limit: it is about what a sweep may choose"),
        (["--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
        (["--report", "/nonexistent/x.html"], "there is no folder /nonexistent"),
    ],
)
def test_options_that_cannot_be(
    script: str, option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--world", "4", "--network", "1e9", *option, script]) == 2
    assert message in capsys.readouterr().err


def test_a_module_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, no stack; in a package that is not there either."""
    for name in ("no_such_module", "no_such.module"):
        assert cli.main(["simulate", "--world", "4", "--network", "1e9", "-m", name]) == 2
        assert capsys.readouterr().err == (
            f"python -m compiled_fsdp simulate: there is no module {name!r}, here or installed. "
            "For a file, leave -m out\n"
        )


@pytest.mark.parametrize("machine", [[], ["--machine", "h100"]])
def test_a_script_that_never_steps(
    script: str, machine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that starts its ranks itself."""
    Path(script).write_text("print('done')")
    assert cli.main(["simulate", "--world", "4", "--network", "1e9", *machine, script]) == 2
    assert "no torch optimizer has stepped in this process" in capsys.readouterr().err


STAY = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
for module in (*model, model):
    fully_shard(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=sys.argv[1] == "none")
"""


def test_gradients_that_stay_are_part_of_the_peak(script: str, tmp_path: Path) -> None:
    """`zero_grad(set_to_none=False)` leaves them where they are: they are above what is at rest."""
    Path(script).write_text(STAY)
    peaks = []
    for kept in ("none", "zeros"):
        found = tmp_path / f"{kept}.json"
        options = ("--world", "4", "--network", "1e9", "--replace", "--json", str(found))
        assert cli.main(["simulate", *options, script, kept]) == 0
        peaks.append(json.loads(found.read_text())["memory"]["peak"])
    gradients = 2 * (256 * 256 + 256) * 4 // 4
    # A reduced one is there beside the one that it is added to.
    assert peaks[0] <= peaks[1] <= peaks[0] + gradients
