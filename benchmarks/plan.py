"""How long our passes take on a model far too large to run: Llama of 405 B parameters on 1,024
ranks, in one process.

Parameters and inputs are fake tensors, the process group is torch's fake one, and rank 0 traces as
it would for real: Dynamo, AOTAutograd, our joint passes, torch's partitioner, our passes on each
half. Nothing is executed. By the default plan and with everything decided from costs, each also
with a memory budget, which tries schedules on copies of the halves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from compiled_fsdp.passes.base import Pass, run_pipeline
from compiled_fsdp.passes.pipeline import HALF, JOINT
from llama import Llama, llama_405b
from results import Panel, Report, Table, machine
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import Plan, fully_shard, set_plan
from compiled_fsdp.compiler.budget import fit_budget
from compiled_fsdp.compiler.partition import partition as partition_joint
from compiled_fsdp.compiler.splitting import fit_split
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.planning.plan import current_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from screen import Screen
    from settings import Settings
    from torch.fx import GraphModule

WORLD, LENGTH = 1024, 8192
GOAL_S = 60
TRACING, PARTITION = "Dynamo and AOTAutograd", "torch's partitioner"
BUDGET, SPLIT = "fit_budget", "fit_split"
FROM_COSTS = Plan(None, None, None, None, None, None, None, None, costs=assumed("cuda"))
PLANS = {
    "by default": Plan(),
    "by default, with a memory budget": Plan(memory_budget=0.5),
    "from costs": FROM_COSTS,
    "from costs, with a memory budget": replace(FROM_COSTS, memory_budget=0.5),
}


def run(settings: Settings, screen: Screen) -> Report:
    """One process for each number of layers; in small, the first plan and the last."""
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in list(PLANS)[:: 3 if settings.quick else 1]
    }
    for number in settings.layers:
        for name, seen in found.items():
            screen.line(f"plan, {number} layers, {name}")
            command = [sys.executable, str(Path(__file__).resolve()), str(number), name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seen.append({"layers": number, **json.loads(done.stdout.splitlines()[-1])})
    return report(found)


def report(found: dict[str, list[dict[str, Any]]]) -> Report:
    """For each plan a row per pass, a column per depth; the picture shows our passes alone."""
    facts = [
        machine(),
        "Llama 3 405 B (width 16384, 128 heads, 8 key-value heads, hidden 53248, vocabulary "
        f"128256), {WORLD} ranks of a fake group, bf16 parameters and fp32 reductions, one "
        f"sequence of {LENGTH} per rank; seconds of processor time, forward and backward.",
    ]
    tables, notes = [], []
    bars: dict[str, dict[str, float]] = {}
    for name, measured in found.items():
        if not measured:
            continue
        layers = [seen["layers"] for seen in measured]
        passes = [key for key in measured[0]["seconds"] if key not in (TRACING, PARTITION)]
        totals = [sum(seen["seconds"][key] for key in passes) for seen in measured]
        per_layer = [1e3 * total / number for total, number in zip(totals, layers, strict=True)]
        rows = [["nodes in both halves", *(f"{seen['nodes']:,}" for seen in measured)]]
        rows += [
            [key, *(f"{seen['seconds'][key]:.2f}" for seen in measured)]
            for key in measured[0]["seconds"]
        ]
        rows.append(["all our passes", *(f"{total:.2f}" for total in totals)])
        rows.append(["the same per layer, ms", *(f"{each:.0f}" for each in per_layer)])
        tables.append(
            Table(f"Seconds, {name}", facts, ["", *(f"{number} layers" for number in layers)], rows)
        )
        bars |= {
            f"{seen['layers']} layers, {name}": {key: seen["seconds"][key] for key in passes}
            for seen in measured
        }
        notes.append(
            f"{name}: all our passes at {layers[-1]} layers {totals[-1]:.1f} s (target at 126: "
            f"under {GOAL_S}); per layer {per_layer[-1] / per_layer[0]:.2f} times what it is at "
            f"{layers[0]}."
        )
    notes.append(
        f"**{SPLIT}**: trials on copies of a half. **{BUDGET}**: a copy of the joint graph, "
        "partitioned by torch once; trials on copies of both halves."
    )
    panels = [Panel("Our passes, both halves and the joint graph", "seconds", bars)]
    return Report("plan", "Time to plan", tables, panels, notes)


class Clock:
    """Processor seconds by name, from one `lap` to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def after_pass(self, _gm: GraphModule, entry: Pass) -> None:
        self.lap(entry.name)


def plan(num_layers: int, name: str) -> dict[str, Any]:
    """Trace and plan the model at this depth, and say what took how long."""
    torch.set_num_threads(1)
    set_plan(PLANS[name])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    halves: list[GraphModule] = []
    with FakeTensorMode():
        model = Llama(llama_405b(num_layers, LENGTH))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
        clock = Clock()
        backend = aot_autograd(
            fw_compiler=_do_not_run,
            bw_compiler=_do_not_run,
            partition_fn=_partitioner(clock, halves),
        )
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(tokens, tokens)
    dist.destroy_process_group()
    nodes = sum(len(half.graph.nodes) for half in halves)
    return {"seconds": clock.seconds, "nodes": nodes}


def _partitioner(clock: Clock, halves: list[GraphModule]) -> Callable[..., Any]:
    """Our passes around torch's partitioner, each timed; the halves with collectives are kept for
    counting.
    """

    def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, ...]:
        clock.lap(TRACING)
        chosen = fit_budget(joint, current_plan(), is_fused=True)
        clock.lap(BUDGET)
        joint = run_pipeline(joint, chosen, JOINT, clock.after_pass)
        split = partition_joint(joint, inputs, chosen, **options)
        clock.lap(PARTITION)
        for half in split:
            parts = fit_split(half, current_plan())
            clock.lap(SPLIT)
            halves.append(run_pipeline(half, parts, HALF, clock.after_pass))
        return split

    return partition


def _do_not_run(gm: GraphModule, _inputs: Any) -> Callable[..., Any]:
    """A compiler of graphs that return new tensors, fake where it runs, like those that they were
    traced with.
    """
    (returned,) = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args
    values = [n.meta["val"] if isinstance(n, torch.fx.Node) else n for n in returned]

    def runner(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return [_like(v) if isinstance(v, torch.Tensor) else v for v in values]

    runner._boxed_call = True  # type: ignore[attr-defined]
    return runner


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(plan(int(sys.argv[1]), sys.argv[2])) + "\n")
