"""The default backend across processes, and by its own name: a warm cache must hold what our passes
made.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from kit.pool import Pool, alone, use_scalar_kernels
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import compiled_fsdp
from compiled_fsdp.planning import consensus

OURS = ("fsdp::", "_c10d_functional::")
Found = list[tuple[dict[str, int], dict[str, int]]]


def run(folder: Path, *plans: str, rank: int = 0) -> Found:
    """Compile by some plans in a process of its own, "2-free" without that pass; cache counters,
    and how often each op of interest ran in the second step. Each rank has a cache of its own; the
    first one leaves what it has for all.
    """
    found: Found = alone(compile_by, str(folder), rank, plans)
    return found


def compile_by(folder: str, rank: int, plans: tuple[str, ...]) -> Found:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/rank{rank}"
    use_scalar_kernels()  # little C++ to compile: the folder is new, also for headers
    inductor_config.cpp_cache_precompile_headers = False
    artifacts = Path(folder, "artifacts")  # of all caches of torch, in one file
    if artifacts.exists():
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))  # few kernels
    compiled_fsdp.fully_shard(model[0], mesh=experts["efsdp"])
    for module in (model[1], model):
        compiled_fsdp.fully_shard(module, mesh=mesh)
    found = []
    for prefetch, *left_out in (name.split("-") for name in plans):
        torch._dynamo.reset()
        counters.clear()
        compiled_fsdp.set_plan(compiled_fsdp.Plan(prefetch=int(prefetch), bucket_bytes=0))
        call = torch.compile(model, fullgraph=True)
        with compiled_fsdp.pipeline(without=left_out):
            call(torch.ones(4, 8)).sum().backward()
        with torch.profiler.profile() as profiler:
            call(torch.ones(4, 8)).sum().backward()
        ops = Counter(e.name for e in profiler.events() if e.name.startswith(OURS))
        found.append((dict(counters["inductor"]) | dict(counters["aot_autograd"]), dict(ops)))
    if not artifacts.exists():
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        artifacts.write_bytes(saved[0])
    return found


def test_a_warm_cache_gives_the_graph_that_our_passes_made(tmp_path: Path) -> None:
    """And that another rank has filled, with replicas and a mesh of experts, where each has groups
    of its own: by `torch.compiler.save_cache_artifacts`. Another plan does not meet it,
    nor another pipeline.
    """
    ((_, cold),) = run(tmp_path, "2")
    plans = "2", "0", "2-bucket_all_gather"
    (counters, warm), (others, _), (shorter, _) = run(tmp_path, *plans, rank=3)
    assert counters.get("autograd_cache_hit", 0) >= 1, counters
    assert counters.get("autograd_cache_miss", 0) == 0, counters
    assert warm == cold
    gathers = warm["_c10d_functional::all_gather_into_tensor"]
    assert gathers == 3, (
        "two units in forward; in backward the second, since nobody asks for the gradient of the "
        "input"
    )
    assert warm["fsdp::mark_grads_"] == 2
    assert "fsdp::unshard" not in warm
    assert others.get("autograd_cache_hit", 0) == 0, others
    assert shorter.get("autograd_cache_hit", 0) == 0, shorter


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
        return [p.grad.to_local() for p in model.parameters()], {
            name: names.count(name) for name in names
        }

    ours, default = step("compiled_fsdp"), step("inductor")
    assert ours[1] == default[1]
    assert ours[1]["fsdp::all_gather"] == 3
    assert all(torch.equal(a, b) for a, b in zip(ours[0], default[0], strict=True))


def test_a_budget_with_one_warm_cache(two: Pool, tmp_path: Path) -> None:
    """Under a budget ranks decide together what they keep; then halves may come from a cache, on
    one rank and not on another.
    """
    (cold, warm), (cold_1, still_cold) = two.run(with_budget, str(tmp_path))
    assert cold == cold_1 == still_cold == 0
    assert warm == 2, "forward and backward"


def with_budget(folder: str) -> list[int]:
    """How many halves came from the cache, cold and then warm; rank 1 loses its cache in
    between.
    """
    rank, hits, grads = dist.get_rank(), [], []
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    for module in (*model, model):
        compiled_fsdp.fully_shard(module)
    for name in (f"{rank}", f"{rank} {rank}" if rank else "0"):
        torch._dynamo.reset()
        consensus._settled.clear()
        counters.clear()
        model.zero_grad()
        environ = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{name}"}
        with (
            mock.patch.dict(os.environ, environ),
            compiled_fsdp.planned(memory_budget=0.5, bucket_bytes=0),
        ):
            torch.compile(model, fullgraph=True)(torch.ones(2, 6)).square().sum().backward()
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
        assert not counters["aot_autograd"]["autograd_cache_hit"]
        grads.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    return hits
