"""`simulate --machine`: a step predicted for a machine that is not here, and `--sweep` over it."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import compiled_fsdp
from compiled_fsdp.command import cli, sweep
from compiled_fsdp.command.asked import AskedError, axis_of, plan_of
from compiled_fsdp.command.machines import machine_named
from compiled_fsdp.command.sweep import choose, table
from compiled_fsdp.planning.plan import current_plan, forced

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, BATCH = 64, 3, 8
dist.init_process_group("nccl")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
before = [p.to_local().clone() for p in model.parameters()]
call = torch.compile(model, backend=os.environ.get("BACKEND", "inductor"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
for step in range(10):
    out = call(torch.ones(BATCH, WIDTH))
    assert not out.any()  # nothing was computed
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert step < 2, "the second step is the last"
"""
REST = {"parameters": 2, "frozen": 3, "optimizer": 4}
WORLD = ("simulate", "--world", "4", "--gpus-per-node", "1", "--replace")
NUMEL = 3 * (64 * 64 + 64)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    torch._dynamo.reset()
    before = current_plan()
    yield str(path)
    torch._dynamo.reset()
    assert current_plan() == before


def _predicted(script: str, folder: Path, *options: str) -> dict:
    out = folder / "found.json"
    assert cli.main([*WORLD, "--machine", "h100", "--json", str(out), *options, script]) == 0
    return json.loads(out.read_text())


def test_a_step_is_predicted_and_not_computed(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    found = _predicted(
        script,
        tmp_path,
        "--network",
        "1e6",
        "--latency",
        "1",
        "--tokens",
        "32",
        "--report",
        str(page),
    )
    text = capsys.readouterr().out
    assert "PREDICTED, nothing was measured: NVIDIA H100 SXM, at 1 of its published peaks" in text
    assert "numbers from: NVIDIA H100 Tensor Core GPU data sheet" in text
    assert "not modelled: kernels that share" in text
    assert "of 80 GB: fits" in text
    assert page.stat().st_size > 10_000
    # forward, and in backward weights and inputs, of which the first layer needs none
    assert found["flops"] == (3 + 3 + 2) * 2 * 8 * 64 * 64
    assert found["used"] == found["flops"] / found["step_s"] / 989.4e12
    # gathered in forward, all or all but the last again in backward, and reduced; 3/4 is sent
    once = NUMEL * 4 * 3 / 4
    assert 2 * once <= found["sent_bytes"] <= 3 * once
    count = found["wire_s"] - found["sent_bytes"] / 1e6
    assert count == pytest.approx(round(count))  # a second for each collective
    assert 2 <= round(count) <= 9
    assert found["exposed_s"] == pytest.approx(found["wire_s"], rel=1e-3)  # computing takes none
    rest = NUMEL * 4 // 4
    assert found["memory"]["parameters"] == rest
    assert found["optimizer_s"] == pytest.approx(7 * rest / 3.35e12, rel=1e-2)  # and step counts
    assert found["peak"] >= 3 * rest + max(found["memory"]["by_kind"].values())


# Micro-batches; what they leave is asked for between two of them.
ACCUMULATED = """
    for batch in range(3):
        model.set_requires_gradient_sync(batch == 2)
        call(torch.ones(BATCH, WIDTH)).sum().backward()
"""


def test_gradients_that_wait_are_part_of_the_peak(script: str, tmp_path: Path) -> None:
    """Those of micro-batches without synchronization are as large as the unsharded parameters, and
    lie beside every later graph.
    """
    alone = _predicted(script, tmp_path)
    path, text = Path(script), Path(script).read_text()
    begin = text.index("    out = call")
    path.write_text(text[:begin] + ACCUMULATED + text[text.index("    assert all(") :])
    torch._dynamo.reset()
    found = _predicted(script, tmp_path)
    assert found["memory"]["by_kind"]["gradients of before"] == NUMEL * 4
    assert found["peak"] >= alone["peak"] + NUMEL * 4
    assert "gradients of before" not in alone["memory"]["by_kind"]


def test_a_whole_step(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its one graph holds the updates; the same is computed, gathered and reduced as in the loop,
    but for what backward reads of what forward has gathered last.
    """
    loop = _predicted(script, tmp_path)
    torch._dynamo.reset()
    text = Path(script).read_text()
    head, _, _ = text.partition("call = ")
    Path(script).write_text(
        head
        + "from compiled_fsdp import compile_step\n"
        + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
        + "step = compile_step(model, optimizer, lambda model, x: model(x).sum())\n"
        + "while True:\n    step(torch.ones(BATCH, WIDTH))\n"
    )
    whole = _predicted(script, tmp_path)
    assert "one graph, the optimizer's updates in it" in capsys.readouterr().out
    assert whole["flops"] == loop["flops"]
    assert whole["optimizer_s"] == 0 < loop["optimizer_s"]
    assert whole["memory"]["optimizer"] == loop["memory"]["optimizer"] > 2 * NUMEL
    assert loop["sent_bytes"] - NUMEL * 4 * 3 / 4 <= whole["sent_bytes"] <= loop["sent_bytes"]
    assert whole["step_s"] > whole["exposed_s"] + 7 * (NUMEL // 4 * 4) / 3.35e12


def test_activations_on_the_host(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned as for the device, though the script runs on the CPU; each is copied both ways, at
    the speed of the machine's host.
    """
    text = Path(script).read_text()
    Path(script).write_text(
        text.replace("LAYERS, BATCH = 64, 3, 8", "LAYERS, BATCH = 1024, 4, 4096")
    )
    before = _predicted(script, tmp_path, "--plan", "memory_budget=0.0")
    assert "copies to it" not in capsys.readouterr().out
    torch._dynamo.reset()
    found = _predicted(script, tmp_path, "--plan", "memory_budget=0.0,offload=budget")
    assert "copies to it" in capsys.readouterr().out
    assert found["peak"] < before["peak"]
    number = round(found["to_host_s"] / (5e-6 + 4096 * 1024 * 4 / 64e9))
    assert 1 <= number <= 3  # inputs of layers but the first, where there is time for both ways
    assert found["to_host_s"] == pytest.approx(number * (5e-6 + 4096 * 1024 * 4 / 64e9))
    assert found["from_host_s"] == pytest.approx(found["to_host_s"])
    for each in (before, found):  # collectives alone are on the wire
        messages = (each["wire_s"] - each["sent_bytes"] / 50e9) / 2e-5
        assert messages == pytest.approx(round(messages))


def test_optimizer_state_on_the_host(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peak counts each byte of state once, and none that rests on the host."""
    text = Path(script).read_text().replace("LAYERS, BATCH = 64, 3, 8", "LAYERS, BATCH = 512, 6, 8")
    head, _, _ = text.partition("call = ")
    Path(script).write_text(
        head
        + "from compiled_fsdp import compile_step\n"
        + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
        + "step = compile_step(model, optimizer, lambda model, x: model(x).sum())\n"
        + "while True:\n    step(torch.ones(BATCH, WIDTH))\n"
    )
    found = {}
    for budget in ("1.0", "0.0"):
        for state in ("", ",optimizer_state=budget"):
            torch._dynamo.reset()
            plan = f"memory_budget={budget}{state}"
            found[budget, bool(state)] = _predicted(script, tmp_path, "--plan", plan)
            said = "rest on the host between updates" in capsys.readouterr().out
            assert said == (budget == "0.0" and bool(state))
    size = found["0.0", True]["memory"]["optimizer"]
    assert size == found["0.0", False]["memory"]["optimizer"]
    assert found["1.0", True]["peak"] == pytest.approx(found["1.0", False]["peak"], rel=1e-3)
    least = found["0.0", False]["peak"]
    assert least - size <= found["0.0", True]["peak"] <= least - size / 3
    assert found["0.0", True]["to_host_s"] > 0 == found["0.0", False]["to_host_s"]


def test_half_the_efficiency_is_twice_the_time(script: str, tmp_path: Path) -> None:
    options = ("--latency", "0")
    whole = _predicted(script, tmp_path, *options)
    torch._dynamo.reset()
    half = _predicted(script, tmp_path, *options, "--efficiency", "0.5")
    assert half["wire_s"] == pytest.approx(2 * whole["wire_s"])
    assert half["optimizer_s"] == pytest.approx(2 * whole["optimizer_s"])
    launches = 8 * 5e-6  # of matmuls, which no efficiency changes
    assert half["step_s"] - launches == pytest.approx(2 * (whole["step_s"] - launches), rel=0.5)


def test_a_machine_of_one_s_own(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = asdict(machine_named("mi300x")) | {"name": "mine", "memory_bytes": 1e5}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(small))
    assert cli.main([*WORLD, "--machine", str(path), script]) == 0
    text = capsys.readouterr().out
    assert "PREDICTED, nothing was measured: mine" in text
    assert "of 0.0001 GB: DOES NOT FIT" in text


@pytest.mark.parametrize("name", ["b200", "h100", "h200", "mi300x"])
def test_machines_name_their_sources(name: str) -> None:
    machine = machine_named(name)
    assert "data sheet" in machine.source
    assert machine.flops["float32"] < machine.flops["tf32"] < machine.flops["bfloat16"]
    assert machine.network_bandwidth < machine.link_bandwidth < machine.memory_bandwidth
    gigabytes, terabytes = machine.memory_bytes / 1e9, machine.memory_bandwidth / 1e12
    assert f"{gigabytes:g} GB" in machine.source
    assert f"{terabytes:g} TB/s" in machine.source
    assert f"{machine.flops['float32'] / 1e12:g}" in machine.source


def test_rates_are_by_dtype() -> None:
    machine = machine_named("h100")
    costs = machine.costs(0.5)
    graph = torch.fx.Graph()
    for dtype, rate in (
        (torch.bfloat16, 989.4e12),
        (torch.float32, 66.9e12),
        (torch.float64, 66.9e12),
        (torch.float8_e5m2, 1978.9e12),
    ):
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(2, 2, dtype=dtype, device="meta")
        node = graph.call_function(torch.ops.aten.mm.default, (x, x))
        assert costs.rate(node) == pytest.approx(rate / 2)
    # scales, and what attention sums up, are wider than what is multiplied
    narrow, scale = (graph.placeholder(name) for name in ("a", "s"))
    narrow.meta["val"] = torch.empty(2, 2, dtype=torch.float8_e4m3fn, device="meta")
    scale.meta["val"] = torch.empty((), device="meta")
    scaled = graph.call_function(torch.ops.aten._scaled_mm.default, (narrow, narrow, scale, scale))
    assert costs.rate(scaled) == pytest.approx(1978.9e12 / 2)
    old = replace(machine, flops={"bfloat16": 2e12, "float32": 1e12})
    assert old.costs(1.0).rate(scaled) == 2e12
    assert machine.peak_flops == 989.4e12  # what MFU is of
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    x = graph.placeholder("y")
    x.meta["val"] = torch.empty(2, 2, device="meta")
    try:
        node = graph.call_function(torch.ops.aten.mm.default, (x, x))
        assert costs.rate(node) == pytest.approx(494.7e12 / 2)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_sweep(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In processes of their own: a field of the plan that the script does not set, and a variable
    that it reads.
    """
    out = tmp_path / "rows.json"
    options = ["--machine", "h100", "--sweep", "bucket_bytes=0,10**7"]
    assert cli.main([*WORLD, *options, script]) == 2
    assert "bucket_bytes='10**7'; should be a number of bytes" in capfd.readouterr().err
    options = ["--machine", "h100", "--sweep", "bucket_bytes=0,10000000", "--json", str(out)]
    options += ["--sweep", "env:BACKEND=compiled_fsdp_eager"]
    assert cli.main([*WORLD, *options, script]) == 0
    alone, together = json.loads(out.read_text())["rows"]
    assert alone["chosen"] == {"bucket_bytes": "0", "env:BACKEND": "compiled_fsdp_eager"}
    assert together["step_s"] < alone["step_s"]  # fewer latencies
    text = capfd.readouterr().out
    assert "compiled_fsdp.set_plan(compiled_fsdp.Plan(bucket_bytes=10000000))" in text
    assert "BACKEND=compiled_fsdp_eager\n" in text


def test_the_best_is_the_fastest_that_fits() -> None:
    def row(name: str, step_s: float | None, peak: int | None) -> dict:
        return {
            "chosen": {"x": name},
            "step_s": step_s,
            "exposed_s": 0.0,
            "peak": peak,
            "error": "no",
        }

    rows = [
        row("a", 3.0, 10),
        row("b", 1.0, 30),
        row("c", 2.0, 20),
        row("d", None, 1),
        row("e", 0.5, None),
    ]
    assert choose(rows, None) is rows[4]
    assert choose(rows, 25) is rows[2]
    assert choose(rows, 5) is None
    lines = table(rows, rows[2], 25, is_predicted=True).splitlines()
    assert lines[1] == "PREDICTED, nothing was measured"
    assert [line.endswith("best") for line in lines[3:]] == [False, False, True, False, False]
    assert lines[4].endswith("too large")
    assert lines[6].endswith("failed: no")
    assert lines[7].endswith("not known  too large")


def test_what_a_combination_may_take() -> None:
    """What is asked for, or else the memory of the machine that is predicted."""
    asked = argparse.Namespace(memory_limit=None, machine=None)
    assert sweep.limit_of(asked) is None
    asked.machine = "h100"
    assert sweep.limit_of(asked) == 80e9
    asked.memory_limit = 1e9
    assert sweep.limit_of(asked) == 1e9


@pytest.mark.parametrize(
    ("found", "peak"),
    [
        ({"memory": {"peak": 5, "device_peak": None, **REST}}, 14),
        ({"memory": {"peak": None, "device_peak": 9, **REST}}, 9),
        ({"memory": {"peak": None, "device_peak": None}, "peak": 7}, 7),
        ({"memory": {"peak": None, "device_peak": None}}, None),
    ],
    ids=["of the CPU", "of a device", "predicted", "not known"],
)
def test_peaks_that_are_compared(found: dict, peak: int | None) -> None:
    assert sweep._peak(found) == peak


@pytest.mark.parametrize(
    ("code", "written", "why"),
    [
        (1, "Traceback\n  raise\nValueError: no\n  more\n\n", "ValueError: no"),
        (-signal.SIGSEGV, "w.py:1: UserWarning: no\n  warnings.warn(", "ended by SIGSEGV"),
        (3, "", "exit status 3"),
    ],
)
def test_why_a_combination_failed(code: int, written: str, why: str) -> None:
    assert sweep._why(subprocess.CompletedProcess([], code, "", written)) == why


def test_what_is_asked() -> None:
    assert axis_of("env:SHARD=8, 64") == ("env:SHARD", ["8", "64"])
    with pytest.raises(AskedError, match="'costs' is no field that can be set here"):
        axis_of("costs=1")


def test_fields_that_only_go_together() -> None:
    together = {"recompute": "budget", "memory_budget": 0.0}
    assert plan_of("recompute=budget,memory_budget=0.0") == together
    with pytest.raises(AskedError, match="recompute='budget' with memory_budget=None"):
        plan_of("recompute=budget")
    with pytest.raises(AskedError, match="memory_budget=-1; should be"):
        plan_of("memory_budget=-1")


def test_a_sweep_of_what_does_not_go_together_runs_nothing(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--plan", "recompute=budget", "--sweep", "memory_budget=0.0,None")
    assert cli.main([*WORLD, "--machine", "h100", *options, script]) != 0
    said = capsys.readouterr()
    assert "recompute='budget' with memory_budget=None" in said.err
    assert "1: memory_budget" not in said.out


def test_forced_fields_win() -> None:
    before = current_plan()
    with forced(prefetch=3.0):
        compiled_fsdp.set_plan(compiled_fsdp.Plan(prefetch=1.0, bucket_bytes=0))
        assert (current_plan().prefetch, current_plan().bucket_bytes) == (3.0, 0)
        with compiled_fsdp.planned(prefetch=0.0):
            assert current_plan().prefetch == 3.0
    assert current_plan() == before


def _changed(script: str, old: str, new: str) -> None:
    path, text = Path(script), Path(script).read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_frozen_shards_are_at_rest(script: str, tmp_path: Path) -> None:
    """Such as those under adapters: no optimizer has them, and they take memory."""
    alone = _predicted(script, tmp_path)
    _changed(script, "for layer in model:", "model[0].requires_grad_(False)\nfor layer in model:")
    _changed(script, "AdamW(model.parameters()", "AdamW([*model[1:].parameters()]")
    _changed(script, "for p in model.parameters())", "for p in model[1:].parameters())")
    torch._dynamo.reset()
    found = _predicted(script, tmp_path)
    layer = (64 * 64 + 64) * 4 // 4
    assert (alone["memory"]["frozen"], found["memory"]["frozen"]) == (0, layer)
    rest = sum(found["memory"][name] for name in ("parameters", "optimizer", "frozen"))
    assert found["peak"] >= rest + max(found["memory"]["by_kind"].values())


@pytest.mark.parametrize("originals", [False, True])
def test_frozen_shards_of_fsdp1(script: str, tmp_path: Path, originals: bool) -> None:
    """A layer is; of originals, those that share a flat parameter with others are, too."""
    text = Path(script).read_text()
    begin, end = text.index("for layer in model:"), text.index("before = [")
    wrapped = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "model[0].requires_grad_(False)\n"
        f"{'model[1].bias.requires_grad_(False)' if originals else ''}\n"
        f"options = dict(use_orig_params={originals}, device_id=torch.device('cpu'))\n"
        "model = FSDP(nn.Sequential(*(FSDP(layer, **options) for layer in model)), **options)\n"
    )
    Path(script).write_text(text[:begin] + wrapped + text[end:])
    _changed(script, "p.to_local().clone()", "p")
    trained = "[p for p in model.parameters() if p.requires_grad]"
    _changed(script, "AdamW(model.parameters()", f"AdamW({trained}")
    _changed(script, "for p in model.parameters())", f"for p in {trained} if p.numel())")
    found = _predicted(script, tmp_path)
    layer = (64 * 64 + 64) * 4 // 4
    assert found["memory"]["frozen"] == layer  # the bias is wholly another rank's
    assert found["memory"]["parameters"] == 2 * layer


def test_what_rests_on_the_host_is_not_in_the_peak(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards and states, and no optimizer's time is predicted for them; it is said."""
    alone = _predicted(script, tmp_path)
    _changed(script, "import fully_shard", "import CPUOffloadPolicy, fully_shard")
    _changed(script, "layer, mesh=mesh", "layer, mesh=mesh, offload_policy=CPUOffloadPolicy(False)")
    torch._dynamo.reset()
    found = _predicted(script, tmp_path)
    memory = found["memory"]
    assert (alone["memory"]["hosted"], memory["hosted"]) == (0, memory["parameters"])
    assert memory["hosted_states"] == memory["optimizer"] == alone["memory"]["optimizer"]
    assert found["peak"] == alone["peak"] - memory["parameters"] - memory["optimizer"]
    assert (alone["optimizer_s"] > 0, found["optimizer_s"]) == (True, 0)
    assert "rest on the host (CPUOffloadPolicy)" in capsys.readouterr().out
    _changed(script, "for layer in model:", "model[0].requires_grad_(False)\nfor layer in model:")
    _changed(script, "AdamW(model.parameters()", "AdamW([*model[1:].parameters()]")
    _changed(script, "for p in model.parameters())", "for p in model[1:].parameters())")
    torch._dynamo.reset()
    frozen = _predicted(script, tmp_path)["memory"]
    assert frozen["hosted_frozen"] == frozen["frozen"] == memory["hosted"] / 3
    assert frozen["hosted"] == frozen["parameters"] == memory["hosted"] * 2 / 3


def test_an_all_reduce_sends_what_others_have(script: str, tmp_path: Path) -> None:
    """Twice the part of the others: between two replicas once what there is."""
    alone = _predicted(script, tmp_path, "--network", "1e6", "--latency", "0")
    _changed(script, "(dist.get_world_size(),)", '(2, 2), mesh_dim_names=("r", "s")')
    torch._dynamo.reset()
    found = _predicted(script, tmp_path, "--network", "1e6", "--latency", "0")
    once = NUMEL * 4
    gathers = alone["sent_bytes"] / (3 / 4) / once - 1  # how often everything is gathered
    assert found["sent_bytes"] == pytest.approx((gathers + 1) * once / 2 + once / 2)
    assert found["wire_s"] == pytest.approx(found["sent_bytes"] / 1e6)


def test_what_the_user_sends_is_sent(script: str, tmp_path: Path) -> None:
    """A collective of the script's own, in the graph."""
    _changed(
        script,
        "nn.Sequential(*(",
        "nn.Sequential(Sums(), *(",
    )
    _changed(
        script,
        "WIDTH, LAYERS, BATCH = 64, 3, 8\n",
        "WIDTH, LAYERS, BATCH = 64, 3, 8\n"
        "import torch.distributed._functional_collectives as fc\n"
        "class Sums(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return fc.all_reduce(x, 'sum', dist.group.WORLD)\n",
    )
    _changed(script, "for layer in model:", "for layer in model[1:]:")
    found = _predicted(script, tmp_path, "--network", "1e6", "--latency", "0")
    assert found["wire_s"] == pytest.approx(found["sent_bytes"] / 1e6)


def test_forwards_without_a_backward_are_said(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation between two steps is in the second one's time."""
    _changed(
        script,
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n"
        "    with torch.no_grad():\n"
        "        call(torch.ones(BATCH, WIDTH))\n",
    )
    _predicted(script, tmp_path)
    assert "1 of 2 forward graphs of the step ran without a backward" in capsys.readouterr().out


def test_a_failed_combination_names_its_error() -> None:
    """Also where torch puts the rank before each line, and says something behind it."""
    stderr = (
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File x\n"
        "[rank0]: ValueError: 8 is not 3 times something\n[rank0]:   \n"
        "[rank0]: Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n"
    )
    done = subprocess.CompletedProcess([], 1, "", stderr)
    assert sweep._why(done) == "ValueError: 8 is not 3 times something"


def test_a_name_is_swept_once(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--sweep", "prefetch=1", "--sweep", "prefetch=2", "--machine", "h100"]
    assert cli.main([*WORLD, *axes, script]) == 2
    assert "--sweep prefetch: it is given twice" in capsys.readouterr().err


PARTS = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
class Part(nn.Module):
    def forward(self, x):
        return fc.all_reduce(x, "sum", dist.group.WORLD)
model = nn.Sequential(nn.Linear(64, 64), Part())
fully_shard(model[0])
for part in model:
    part.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_graphs_without_sharded_parameters_count(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(PARTS)
    found = _predicted(script, tmp_path, "--network", "1e6", "--latency", "1")
    gather = reduce = (64 * 64 + 64) * 4 * 3 / 4
    one = 2 * 8 * 64 * 4 * 3 / 4
    assert found["sent_bytes"] - gather - reduce in (one, 2 * one)  # and again in backward
    assert found["wire_s"] >= 3
    assert "compiled graphs without sharded parameters" in capsys.readouterr().out
