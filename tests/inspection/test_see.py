"""What can be seen from outside: our log, torch's structured trace, ranges in profiles."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch._logging._internal
from kit.stems import HALF_NAMES, JOINT_NAMES, stem
from torch import nn
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter, trace_log
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import fully_shard
from compiled_fsdp.wire import ranges

if TYPE_CHECKING:
    from pathlib import Path

    from kit.pool import Pool

BACKEND = "compiled_fsdp_eager"


def build() -> nn.Module:
    """Two units of two parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


# -- the log


@pytest.fixture
def logger():
    found = logging.getLogger("compiled_fsdp")
    before = found.level
    yield found
    found.setLevel(before)


@pytest.mark.usefixtures("fake_world", "no_progress")
def test_a_line_a_pass(logger, caplog):
    logger.setLevel(logging.INFO)
    with mock.patch("compiled_fsdp.dump.writer._number", 0):
        step(torch.compile(build(), backend=BACKEND))
    lines = [record.getMessage() for record in caplog.records if record.name == "compiled_fsdp"]
    assert lines[:15] == [
        "000_joint keep_grad_dtype: no change",
        "000_joint number_batches: no change",
        "000_joint dedup_unshard: no change",
        "000_joint join_grads: no change",
        "000_joint choose_collectives: no change",
        "000_joint reshard: no change",
        "000_joint mark_recomputed: no change",
        "000_joint mark_offloaded: no change",
        "000_joint mark_states: no change",
        "000_joint note_heads: no change",
        "000_joint read_at_once: no change",
        "000_joint name_groups: no change",
        "001_forward lower: nodes 12 -> 24",
        "001_forward bucket_all_gather: nodes 24 -> 28, all-gathers 4 -> 2",
        "001_forward bucket_reduce_scatter: no change",
    ]
    assert "001_forward prefetch_all_gather: 1 of 4 starts and waits moved past matmuls" in lines
    assert "001_forward free: nodes 28 -> 30, frees 0 -> 2" in lines
    assert lines[-1] == "002_backward verify: no change"
    assert len(lines) == len(JOINT_NAMES) + 2 * len(HALF_NAMES)


@pytest.mark.usefixtures("fake_world")
def test_graphs_at_debug(logger, caplog):
    logger.setLevel(logging.DEBUG)
    step(torch.compile(build(), backend=BACKEND))
    texts = [
        r.getMessage()
        for r in caplog.records
        if r.name == "compiled_fsdp" and r.levelno == logging.DEBUG
    ]
    assert any(
        "after lower\n%primals_1: " in text and "all_gather_into_tensor(" in text for text in texts
    )


@pytest.mark.usefixtures("fake_world", "no_progress")
def test_no_line_by_default(caplog):
    with mock.patch("compiled_fsdp.dump.writer.show") as show:
        step(torch.compile(build(), backend=BACKEND))
    assert [r for r in caplog.records if r.name == "compiled_fsdp"] == []
    show.assert_not_called()


def test_torch_knows_our_log(logger):
    """`TORCH_LOGS` and `set_logs` go through the same registry."""
    try:
        torch._logging.set_logs(modules={"compiled_fsdp": logging.DEBUG})
        assert logger.level == logging.DEBUG
        assert torch._logging._internal.log_registry.is_log("compiled_fsdp")
        state = torch._logging._internal._parse_log_settings("+compiled_fsdp,-dynamo")
        assert dict(state.get_log_level_pairs())["compiled_fsdp"] == logging.DEBUG
    finally:
        torch._logging.set_logs()
    assert logger.level == logging.NOTSET


# -- the trace


@pytest.fixture
def traced(tmp_path):
    """As with TORCH_TRACE: the folder that torch writes to."""
    handler = LazyTraceHandler(str(tmp_path))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    trace_log.addHandler(handler)
    yield tmp_path
    trace_log.removeHandler(handler)
    handler.close()


def artifacts(folder: Path) -> list[tuple[str, dict[str, object], str]]:
    """(name, the whole head, payload) of each artifact in the one file there."""
    (path,) = folder.iterdir()
    found = []
    for entry in re.split(r"\n(?=[VI]\d{4} )", path.read_text()):
        first, *payload = entry.split("\n")
        head = json.loads(first.split("] ", 1)[1])
        if "artifact" in head:
            found.append(
                (
                    head["artifact"]["name"],
                    head,
                    "\n".join(line.removeprefix("\t") for line in payload),
                )
            )
    return found


@pytest.mark.usefixtures("fake_world")
def test_artifacts_in_torchs_trace(traced):
    """The texts of a dump, filed under the compilation that they belong to, and no folder."""
    with mock.patch("compiled_fsdp.dump.writer._number", 0):
        step(torch.compile(build(), backend=BACKEND))
    found = artifacts(traced)
    ours = {
        name: (head, payload) for name, head, payload in found if name.startswith("compiled_fsdp_")
    }
    names = [name.removeprefix("compiled_fsdp_") for name in ours]
    assert names[:3] == [
        "000_joint_00_capture.txt",
        "000_joint_01_keep_grad_dtype.txt",
        "000_joint_02_number_batches.txt",
    ]
    assert {
        f"001_forward_{stem('free')}.txt",
        "001_forward_memory.txt",
        "002_backward_03_bucket_reduce_scatter.diff",
    } <= {*names}
    head, payload = ours[f"compiled_fsdp_001_forward_{stem('free')}.txt"]
    assert (head["frame_id"], head["frame_compile_id"], head["artifact"]["encoding"]) == (
        0,
        0,
        "string",
    )
    assert payload.startswith(
        "# made by free; holds: GRADS_KEPT, NUMBERED, DEDUPED, JOINED, CHOSEN, DECIDED, MARKED, "
        "MARKED_AWAY, STATES_MARKED, HEADS_NOTED, READ_AT_ONCE, GROUPS_NAMED, LOWERED"
    )
    assert "free(%wait_tensor" in payload
    assert all("rank" in head for head, _ in ours.values())


@pytest.mark.usefixtures("fake_world")
def test_the_schedule_that_tlparse_reads(traced):
    """Name and form as Inductor writes them."""
    step(torch.compile(build(), backend=BACKEND))
    schedules = [
        (head, json.loads(text))
        for name, head, text in artifacts(traced)
        if name == "inductor_collective_schedule"
    ]
    gather = "torch.ops._c10d_functional.all_gather_into_tensor.default"
    reduce = "torch.ops._c10d_functional.reduce_scatter_tensor.default"
    assert [payload for _, payload in schedules] == [[gather, gather], [gather, reduce, reduce]]
    assert all(head["artifact"]["encoding"] == "json" for head, _ in schedules)


# -- ranges


def names_of(run) -> list[str]:
    with torch.profiler.profile() as profile:
        run()
    events = sorted(
        (e for e in profile.events() if e.name.startswith("compiled_fsdp::")),
        key=lambda e: e.time_range.start,
    )
    return [e.name.removeprefix("compiled_fsdp::") for e in events]


@pytest.mark.usefixtures("fake_world")
def test_ranges_of_a_graph():
    """Each start and each wait: what, in which phase, of which unit, and its parameters."""
    model = torch.compile(build(), backend=BACKEND)
    step(model)
    assert names_of(lambda: step(model)) == [
        "all_gather forward 0 (weight, bias)",
        "all_gather forward 1 (weight, bias)",
        "wait all_gather forward 0 (weight, bias)",
        "wait all_gather forward 1 (weight, bias)",
        "all_gather backward 1 (weight)",
        "wait all_gather backward 1 (weight)",
        "reduce_scatter backward 1 (weight, bias)",
        "wait reduce_scatter backward 1 (weight, bias)",
        "reduce_scatter backward 0 (weight, bias)",
        "wait reduce_scatter backward 0 (weight, bias)",
    ]


@pytest.mark.usefixtures("fake_world")
def test_ranges_of_the_eager_runtime():
    model = build()
    step(model)
    names = names_of(lambda: step(model))
    for phase, unit in (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)):
        assert names.count(f"all_gather {phase} {unit} (weight, bias)") == 1
        assert names.count(f"wait all_gather {phase} {unit} (weight, bias)") == 1
    for unit in (0, 1):
        assert names.count(f"reduce_scatter backward {unit} (weight, bias)") == 1
        assert names.count(f"wait reduce_scatter backward {unit} (weight, bias)") == 1


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_range_without_a_profiler(is_compiled):
    model = torch.compile(build(), backend=BACKEND) if is_compiled else build()
    step(model)
    with mock.patch("torch.profiler.record_function") as record:
        step(model)
    record.assert_not_called()


def test_long_names_are_cut():
    assert ranges.title("all_gather_into_tensor", "forward", "a (a.b, a.c.d, a.e, f, g)") == (
        "compiled_fsdp::all_gather forward a (b, c.d, e, f, ...)"
    )


def ranges_on_gloo(backend: str) -> list[list[str]]:
    torch.manual_seed(0)
    found = []
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
        call = torch.compile(model, backend=backend)
        step(call)
        found.append(names_of(lambda call=call: step(call)))
    return found


@pytest.mark.parametrize("backend", ["inductor", BACKEND])
def test_ranges_over_gloo(two: Pool, backend: str) -> None:
    """Generated code too: our own ops know what they carry, whoever calls them."""
    for sharded, replicated in two.run(ranges_on_gloo, backend):
        assert sharded == [
            "all_gather forward Linear (weight, bias)",
            "wait all_gather forward Linear (weight, bias)",
            "all_to_all backward Linear (weight, bias)",
            "wait all_to_all backward Linear (weight, bias)",
        ]
        assert replicated == ["all_reduce backward Linear (weight, bias)"]
