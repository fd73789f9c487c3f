"""How long our passes take on a model far too large to run: Llama of 405 B parameters on 1,024
ranks, in one process.

Parameters and inputs are fake tensors, the process group is torch's fake one, and rank 0 traces as
it would for real: Dynamo, AOTAutograd, our joint passes, torch's partitioner, our passes on each
half. Nothing is executed. By the default plan and with everything decided from costs, each also
with a memory budget, which tries schedules on copies of the halves.

`plan_experts` does the same for DeepSeek-V3 of 671 B parameters on 2,048 ranks, 64 of which share
the experts of a layer, by the default plan and from costs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from compiled_fsdp.passes.base import Pass, run_pipeline
from compiled_fsdp.passes.pipeline import HALF, JOINT
from deepseek import DeepSeek, deepseek_v3, share_experts
from llama import Llama, llama_405b
from results import Panel, Report, Table, machine
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import Plan, fully_shard, set_plan
from compiled_fsdp.compiler.budget import fit_budget
from compiled_fsdp.compiler.partition import partition as partition_joint
from compiled_fsdp.compiler.splitting import fit_split
from compiled_fsdp.planning.consensus import note_costs
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


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned: its layers in all, a line of facts, and how it is built and sharded, over
    meshes that are made before tensors are fake.
    """

    name: str
    title: str
    depth: int
    words: str
    world: int
    length: int
    meshes: Callable[[], dict[str, DeviceMesh]]
    build: Callable[[int, dict[str, DeviceMesh]], torch.nn.Module]


def run(settings: Settings, screen: Screen) -> Report:
    """One process for each number of layers; in small, the first plan and the last."""
    return _run(LLAMA, list(PLANS)[:: 3 if settings.quick else 1], settings, screen)


def run_experts(settings: Settings, screen: Screen) -> Report:
    """The same, without budgets; the first three layers have no experts."""
    plans = ["by default", "from costs"][settings.quick :]
    return _run(DEEPSEEK, plans, settings, screen)


def _run(subject: Subject, plans: list[str], settings: Settings, screen: Screen) -> Report:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for number in dict.fromkeys(min(n, subject.depth) for n in settings.layers):
        for name, seen in found.items():
            screen.line(f"{subject.name}, {number} layers, {name}")
            command = [sys.executable, str(Path(__file__).resolve()), str(number), name]
            command.append(subject.name)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seen.append({"layers": number, **json.loads(done.stdout.splitlines()[-1])})
    return report(subject, found)


def report(subject: Subject, found: dict[str, list[dict[str, Any]]]) -> Report:
    """For each plan a row per pass, a column per depth; the picture shows our passes alone."""
    facts = [
        machine(),
        f"{subject.words}, {subject.world} ranks of a fake group, bf16 parameters and fp32 "
        f"reductions, one sequence of {subject.length} per rank; seconds of processor time, "
        "forward and backward.",
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
            f"{name}: all our passes at {layers[-1]} layers {totals[-1]:.1f} s (target at "
            f"{subject.depth}: under {GOAL_S}); per layer {per_layer[-1] / per_layer[0]:.2f} times "
            f"what it is at {layers[0]}."
        )
    notes.append(
        f"**{SPLIT}**: trials on copies of a half. **{BUDGET}**: a copy of the joint graph, "
        "partitioned by torch once; trials on copies of both halves."
    )
    panels = [Panel("Our passes, both halves and the joint graph", "seconds", bars)]
    return Report(subject.name, subject.title, tables, panels, notes)


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


def _all_ranks() -> dict[str, DeviceMesh]:
    return {"dp": init_device_mesh("cpu", (WORLD,))}


def _llama(num_layers: int, meshes: dict[str, DeviceMesh]) -> Llama:
    model = Llama(llama_405b(num_layers, LENGTH))
    for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
        fully_shard(unit, mesh=meshes["dp"], mp_policy=POLICY)
    return model


def _with_experts() -> dict[str, DeviceMesh]:
    shape = (DEEPSEEK.world // NUM_EXPERT_RANKS, NUM_EXPERT_RANKS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
    return {"dp": mesh._flatten("dp"), "efsdp": mesh["efsdp"], "ep": mesh["ep"]}


def _deepseek(num_layers: int, meshes: dict[str, DeviceMesh]) -> DeepSeek:
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    model = DeepSeek(deepseek_v3(num_layers, DEEPSEEK.length))
    for experts in share_experts(model, meshes["ep"]):
        fully_shard(experts, mesh=meshes["efsdp"], mp_policy=POLICY)
        experts.set_gradient_divide_factor(float(DEEPSEEK.world))  # type: ignore[operator]
    for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
        fully_shard(unit, mesh=meshes["dp"], mp_policy=POLICY)
    return model


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_EXPERT_RANKS = 64
LLAMA = Subject(
    "plan",
    "Time to plan",
    126,
    "Llama 3 405 B (width 16384, 128 heads, 8 key-value heads, hidden 53248, vocabulary 128256)",
    WORLD,
    LENGTH,
    _all_ranks,
    _llama,
)
DEEPSEEK = Subject(
    "plan_experts",
    "Time to plan a mixture of experts",
    61,
    "DeepSeek-V3 671 B (width 7168, 128 heads, 3 dense layers of hidden 18432, then 256 experts of "
    "hidden 2048, 8 for each token, and a shared one, as grouped matmuls; vocabulary 129280), "
    f"experts on {NUM_EXPERT_RANKS} ranks each",
    2048,
    4096,
    _with_experts,
    _deepseek,
)
SUBJECTS = {subject.name: subject for subject in (LLAMA, DEEPSEEK)}


def plan(num_layers: int, name: str, subject: Subject) -> dict[str, Any]:
    """Trace and plan the model at this depth, and say what took how long."""
    torch.set_num_threads(1)
    set_plan(PLANS[name])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=subject.world)
    halves: list[GraphModule] = []
    meshes = subject.meshes()
    with FakeTensorMode():
        model = subject.build(num_layers, meshes)
        tokens = torch.zeros(1, subject.length, dtype=torch.int64)
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
            note_costs(half.graph, current_plan())
            parts = fit_split(half, current_plan(), is_fused=True)
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
    sys.stdout.write(json.dumps(plan(int(sys.argv[1]), sys.argv[2], SUBJECTS[sys.argv[3]])) + "\n")
