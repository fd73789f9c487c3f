"""A profile of a device, in the form in which torch exports one: the CPU launches and returns at
once, kernels run on streams, and a collective is the kernel that its start launched.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.reported import data_of
from torch import nn

from compiled_fsdp import dumped_to, fully_shard
from compiled_fsdp.inspection.check import load
from compiled_fsdp.inspection.profiles import WAIT
from compiled_fsdp.inspection.report.measured import AGREE
from compiled_fsdp.report import add_profile, write_report, write_trace
from compiled_fsdp.wire import ranges, runs

if TYPE_CHECKING:
    from pathlib import Path

COMPUTE, NCCL = 7, 20  # streams
STARTS = {"gather": "all_gather_into_tensor", "reduce": "reduce_scatter_tensor"}
KERNELS = {
    "gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_world: None) -> Path:
    """Two units, forward and backward."""
    monkeypatch.setattr(runs, "_runs", {})
    torch._dynamo.reset()
    model = nn.Sequential(*(fully_shard(nn.Linear(8, 8)) for _ in range(2)))
    run = torch.compile(fully_shard(model), backend="compiled_fsdp_eager")
    with dumped_to(tmp_path / "dump"):
        run(torch.ones(4, 8)).sum().backward()
    return tmp_path / "dump"


class Trace:
    """Writes events as torch does; the CPU is at `now`, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0.0
        self.number = 0

    def add(self, cat: str, name: str, begin: float, end: float, tid: int, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid}
            | {"ts": begin, "dur": end - begin, "args": args}
        )

    def op(self, name: str, kernel: str = "", stream: int = 0, at: tuple[float, float] = (0, 0)):
        """An op of 2 us, and the kernel that it launches."""
        self.add("cpu_op", name, self.now, self.now + 2, 1)
        if kernel:
            self.number += 1
            call = {"correlation": self.number}
            self.add("cuda_runtime", "cudaLaunchKernel", self.now + 1, self.now + 1.5, 1, **call)
            self.add("kernel", kernel, *at, stream, device=0, stream=stream, **call)
        self.now += 3

    def mark(self, graph: Path) -> None:
        name = f"{ranges.GRAPH}{ranges.digest((graph / 'record.json').read_text())}"
        self.add("cpu_op", AGREE, self.now, self.now + 5, 1)
        self.add("user_annotation", name, self.now + 1, self.now + 2, 1)
        self.now += 6

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"traceEvents": self.events, "baseTimeNanoseconds": 5 * 10**9}))
        return path


def collectives(graph: Path) -> list[str]:
    return [c["kind"] for c in load(graph / "timeline.json.gz", "testing")["collectives"]]


def recorded(dump: Path) -> Trace:
    """Each collective takes 40 us from where the one before ends, and a matmul of 30 us begins when
    it is there: all are exposed, save for what the matmul before hides.
    """
    trace, wire = Trace(), 1000.0
    for graph in sorted(p.parent for p in dump.glob("rank0/*/timeline.json.gz")):
        trace.mark(graph)
        around = ("autograd::engine::evaluate_function: CompiledFunctionBackward", trace.now - 6)
        for kind in collectives(graph):
            started = (wire, wire + 40)
            trace.op(f"_c10d_functional::{STARTS[kind]}", KERNELS[kind], NCCL, started)
            trace.op(WAIT)
            wire += 40
            trace.op("aten::mm", "sm90_xmma_gemm_f32f32", COMPUTE, (wire, wire + 30))
        if graph.name.endswith("backward"):
            trace.add("cpu_op", *around, trace.now, 1)
    wire += 30
    begin = trace.now
    trace.op("aten::_foreach_add", "multi_tensor_apply_kernel", COMPUTE, (wire, wire + 20))
    trace.add("user_annotation", "Optimizer.step#AdamW.step", begin - 1, trace.now, 1)
    trace.add("gpu_user_annotation", "Optimizer.step#AdamW.step", wire, wire + 20, COMPUTE)
    return trace


def measured(dump: Path, path: Path) -> dict[str, Any]:
    return json.loads(add_profile(dump, path).read_text())


def micro(value: float) -> float:
    return round(value * 1e6, 3)


def test_collectives_are_kernels(dump: Path, tmp_path: Path) -> None:
    found = measured(dump, recorded(dump).write(tmp_path / "p.json"))
    forward, backward = (found["graphs"][name] for name in sorted(found["graphs"]))
    times = [{k: micro(v) for k, v in t.items()} for t in forward["times"]]
    assert times[0] == {
        "issued": 0,
        "issuing": 0,
        "begin": 0,
        "end": 40,
        "awaited": 0,
        "exposed": 40,
    }
    # The second is under way while the matmul after the first runs, for 30 of its 40 us.
    assert (times[1]["begin"], times[1]["end"], times[1]["exposed"]) == (40, 80, 10)
    kernels = {(row[2], micro(row[1] - row[0])) for row in forward["compute"]}
    assert kernels == {("sm90_xmma_gemm_f32f32", 30)}
    assert all(micro(t["exposed"]) == 10 for t in backward["times"])


def test_the_step_is_that_of_the_device(dump: Path, tmp_path: Path) -> None:
    """From its first kernel to the last that the optimizer launched,
    long after the CPU was done.
    """
    count = sum(len(collectives(p.parent)) for p in dump.glob("rank0/*/timeline.json.gz"))
    step = measured(dump, recorded(dump).write(tmp_path / "p.json"))["step"]
    assert micro(step["total"]) == 40 * count + 30 + 20
    assert micro(step["waiting"]) == 40 + 10 * (count - 1)
    assert step["largest"][0].startswith("all-gather of ")
    assert micro(step["largest"][1]) == 40
    assert round(step["began"], 6) == 5.001
    parts = {kind: (micro(begin), micro(end)) for begin, end, kind, _ in step["parts"]}
    assert parts["optimizer"] == (40 * count + 30, 40 * count + 50)
    assert parts["forward"][0] == 0
    assert parts["backward"][1] == 40 * count + 30
    assert step["notes"] == []


def test_a_hidden_collective_is_not_exposed(dump: Path, tmp_path: Path) -> None:
    trace = recorded(dump)
    for event in trace.events:
        if event["name"].startswith("sm90"):
            event["dur"] = 45.0
    found = measured(dump, trace.write(tmp_path / "p.json"))
    exposed = [t["exposed"] > 0 for run in found["graphs"].values() for t in run["times"]]
    assert exposed == [True] + [False] * (len(exposed) - 1)


def test_it_is_drawn(dump: Path, tmp_path: Path) -> None:
    path = recorded(dump).write(tmp_path / "p.json")
    add_profile(dump, path)
    write_report(dump, tmp_path / "page.html")
    assert "of the step waits for communication" in str(data_of(tmp_path / "page.html"))
    write_trace(dump, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "sm90_xmma_gemm_f32f32" in {event["name"] for event in events}


def as_torch_records_it(trace: Trace) -> None:
    """What traces that torch recorded beside NCCL have and those above have not: times since the
    machine began, the collective's range three deep, launches by the driver, arrows from launches
    to kernels, frames of Python, waits of streams, and rows without a duration.
    """
    for event in list(trace.events):
        begin, end = event["ts"], event["ts"] + event["dur"]
        if event["name"].startswith("_c10d_functional::") and event["name"] != WAIT:
            for name in ("c10d::_allgather_base_", "record_param_comms"):
                trace.add("cpu_op", name, begin + 0.1, end - 0.1, 1)
            trace.add("user_annotation", "nccl:_all_gather_base", begin + 0.2, end - 0.2, 1)
            trace.add("gpu_user_annotation", "nccl:_all_gather_base", begin + 900, end + 940, NCCL)
        if event["cat"] == "cuda_runtime":
            event.update(cat="cuda_driver", name="cuLaunchKernelEx")
            arrow = {"id": event["args"]["correlation"], "cat": "ac2g", "name": "ac2g", "pid": 0}
            trace.events += [
                {"ph": "s", "ts": begin, "tid": 1, **arrow},
                {"ph": "f", "ts": begin + 1, "tid": COMPUTE, "bp": "e", **arrow},
            ]
    last = max(e["ts"] + e.get("dur", 0) for e in trace.events)
    trace.add("python_function", "train.py(12): <module>", -5e6, last + 5e6, 1)
    trace.add("cuda_sync", "Stream Wait Event", 0, last, COMPUTE, correlation=-1)
    trace.add("Trace", "PyTorch Profiler (0)", 0, last, 7)
    trace.events.append({"ph": "i", "s": "g", "name": "Record Window End", "ts": last, "pid": ""})
    trace.events.append(
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "python"}}
    )
    for event in trace.events:
        event["ts"] += 9_013_475_541_204.125


def test_it_is_read_as_torch_records_it(dump: Path, tmp_path: Path) -> None:
    plain = measured(dump, recorded(dump).write(tmp_path / "p.json"))
    trace = recorded(dump)
    as_torch_records_it(trace)
    found = measured(dump, trace.write(tmp_path / "q.json"))
    for name, graph in plain["graphs"].items():
        again = found["graphs"][name]
        assert len(again["times"]) == len(graph["times"])
        for one, other in zip(graph["times"], again["times"], strict=True):
            assert other == pytest.approx(one, abs=2e-8)
        assert again["total"] == pytest.approx(graph["total"], abs=2e-8)
    for key in ("total", "waiting", "starting"):
        assert found["step"][key] == pytest.approx(plain["step"][key], abs=2e-8)


def test_kernels_of_before_the_profile_count(dump: Path, tmp_path: Path) -> None:
    """The CPU is ahead of the device, so the first kernels of a profile have no launch in it: while
    one of these computes, no collective is exposed.
    """
    trace = recorded(dump)
    trace.add("kernel", "sm90_xmma_gemm_f32f32", 990, 1100, COMPUTE, correlation=-7)
    found = measured(dump, trace.write(tmp_path / "p.json"))
    forward = found["graphs"][min(found["graphs"])]
    assert [micro(t["exposed"]) for t in forward["times"]][:2] == [0, 0]


def test_a_copy_from_the_host_hides_no_collective(dump: Path, tmp_path: Path) -> None:
    trace = recorded(dump)
    trace.now += 1
    trace.op("aten::copy_", "Memcpy HtoD (Pinned -> Device)", COMPUTE, (990, 1100))
    found = measured(dump, trace.write(tmp_path / "p.json"))
    forward = found["graphs"][min(found["graphs"])]
    assert [micro(t["exposed"]) for t in forward["times"]][:2] == [40, 10]


def test_steps_that_overlap_on_the_device(dump: Path, tmp_path: Path) -> None:
    """A kernel of the step before that is done late, beside the first ones of this step: the step
    begins when that is done, or both together would take longer than they did.
    """
    trace = recorded(dump)
    end = max(e["ts"] + e["dur"] for e in trace.events)
    first = trace.now
    trace.add("user_annotation", "ProfilerStep#1", -50, first, 1)
    shift = first + 60
    for event in [dict(e) for e in trace.events if not e["name"].startswith("ProfilerStep")]:
        args = dict(event["args"])
        if "correlation" in args:
            args["correlation"] += 1000
        on_device = event["cat"] == "kernel"
        trace.events.append(
            {**event, "ts": event["ts"] + (end - 1100 if on_device else shift)} | {"args": args}
        )
    trace.add("user_annotation", "ProfilerStep#2", first, first + shift, 1)
    step = measured(dump, trace.write(tmp_path / "p.json"))["step"]
    device = [e for e in trace.events if e["cat"] == "kernel"]
    last = max(e["ts"] + e["dur"] for e in device)
    assert micro(step["total"]) == round(last - end, 3)
