"""The default backend across processes, and by its own name: a warm cache must hold what our passes made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pool import Pool

import compiled_fsdp

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import json, sys
from collections import Counter
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
import compiled_fsdp

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
for module in (model[0], model[2], model):
    compiled_fsdp.fully_shard(module)
call = torch.compile(model, fullgraph=True)
compiled_fsdp.set_plan(compiled_fsdp.Plan(prefetch=int(sys.argv[1]), bucket_bytes=0))
call(torch.ones(4, 8)).sum().backward()
with torch.profiler.profile() as profiler:
    call(torch.ones(4, 8)).sum().backward()
ours = ("fsdp::", "_c10d_functional::")
found = dict(counters["inductor"]) | dict(counters["aot_autograd"])
print(json.dumps([found, Counter(e.name for e in profiler.events() if e.name.startswith(ours))]))
"""


def run(folder: Path, prefetch: int) -> tuple[dict[str, int], dict[str, int]]:
    """Compile in a process of its own; cache counters, and how often each op of interest ran in the second step."""
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", PROGRAM, str(prefetch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counters, ops = json.loads(done.stdout.splitlines()[-1])
    return counters, ops


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A cache of one plan's graphs, and the ops of the run that filled it."""
    folder = tmp_path_factory.mktemp("inductor")
    return folder, run(folder, 2)[1]


def test_a_warm_cache_gives_the_graph_that_our_passes_made(filled: tuple[Path, dict[str, int]]) -> None:
    folder, cold = filled
    counters, warm = run(folder, 2)
    assert counters.get("autograd_cache_hit", 0) >= 1, counters
    assert counters.get("autograd_cache_miss", 0) == 0, counters
    assert warm == cold
    gathers = warm["_c10d_functional::all_gather_into_tensor"]
    assert gathers == 3, "two units in forward; in backward the second, since nobody asks for the gradient of the input"
    assert warm["fsdp::mark_grads_"] == 2
    assert "fsdp::unshard" not in warm


def test_another_plan_does_not_meet_the_cache(filled: tuple[Path, dict[str, int]]) -> None:
    counters, _ = run(filled[0], 0)
    assert counters.get("autograd_cache_hit", 0) == 0, counters


def test_the_backend_by_name_is_the_default_one(two: Pool) -> None:
    two.run(same_as_default)


def same_as_default() -> None:
    def step(backend: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        for module in (*model, model):
            compiled_fsdp.fully_shard(module)
        call = torch.compile(model, backend=backend, fullgraph=True)
        call(torch.ones(2, 6)).sum().backward()
        with torch.profiler.profile() as profiler:
            call(torch.ones(2, 6)).sum().backward()
        names = [e.name for e in profiler.events() if e.name.startswith("fsdp::")]
        return [p.grad.to_local() for p in model.parameters()], {name: names.count(name) for name in names}

    ours, default = step("compiled_fsdp"), step("inductor")
    assert ours[1] == default[1]
    assert ours[1]["fsdp::all_gather"] == 3
    assert all(torch.equal(a, b) for a, b in zip(ours[0], default[0], strict=True))
