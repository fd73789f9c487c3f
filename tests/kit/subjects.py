"""Correct graphs for the mutation test of `verify`: of both front ends, under several settings and
plans.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from compiled_fsdp.passes.base import Context, run_pipeline
from compiled_fsdp.passes.pipeline import HALF
from compiled_fsdp.passes.verify import check
from kit.passes_harness import fake_ranks
from kit.simulation import Simulation
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import compiled_fsdp.compiler.backend as backend_module
from compiled_fsdp import FullyShardedDataParallel, fully_shard
from compiled_fsdp.ir.meta import get_captured, set_captured
from compiled_fsdp.planning.plan import Plan
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.verification.invariant import GraphInvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.fx import Graph, GraphModule

    from compiled_fsdp.verification.meaning import Captured


@dataclass(frozen=True)
class Subject:
    """A correct graph: as captured, and the plan; how its groups lie in a world."""

    name: str
    captured: GraphModule
    plan: Plan
    world: int
    groups: dict[str, list[tuple[int, ...]]]
    context: Context

    def compiled(
        self, change: Callable[[GraphModule, Plan], GraphModule] | None = None
    ) -> GraphModule:
        """The final graph, changed just before `verify` would look at it; the captured meaning
        stays with it.
        """
        final, meaning = self._final
        gm = copy.deepcopy(final)
        if change is not None:
            set_captured(gm, meaning)
            gm = change(gm, self.plan)
            gm.graph.lint()
        return gm

    @cached_property
    def _final(self) -> tuple[GraphModule, Captured | None]:
        """Made once for all mutants."""
        kept: list[Captured | None] = []
        passes = [entry for entry in HALF if entry.name != "verify"]
        gm = run_pipeline(
            copy.deepcopy(self.captured),
            self.plan,
            passes,
            lambda gm, _: kept.append(get_captured(gm)),
            self.context,
        )
        return gm, kept[-1]

    @cached_property
    def executed(self) -> tuple[Any, Counter[str]]:
        """What the correct graph gives every rank, and communicates."""
        return self.execute(self.compiled().graph)

    def caught(self, change: Callable[[GraphModule, Plan], GraphModule]) -> str | None:
        """The rule that the changed graph breaks, if `verify` sees one."""

        def then_verify(gm: GraphModule, plan: Plan) -> GraphModule:
            check(change(gm, plan), plan, "a mutation")
            return gm

        try:
            self.compiled(then_verify)
        except GraphInvariantError as error:
            return error.invariant
        return None

    def inputs(self) -> list[dict[str, Tensor]]:
        """Random values for every rank, without zeros and of small integers: sums are exact in any
        order.
        """
        found = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(rank)
            values = {}
            for node in self.captured.graph.nodes:
                if node.op == "placeholder":
                    val = node.meta["val"]
                    values[node.name] = (torch.rand(val.shape, generator=generator) + 0.5).to(
                        val.dtype
                    )
            found.append(values)
        return found

    def execute(self, *graphs: Graph) -> tuple[Any, Counter[str]]:
        """What every rank gets, and what was communicated; one graph for all ranks, or one for
        each.
        """
        wire = Simulation(self.world, self.groups)
        each = list(graphs) if len(graphs) > 1 else [*graphs] * self.world
        return wire.run(each, self.inputs()), wire.moved


class Net(torch.nn.Module):
    """Three units of two parameters and one; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            (torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 5))
        )
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "keep": {"reshard_after_forward": False},
    "hsdp": {"mesh": 2},
}
# Who executes the graph, over which backend; of all settings, these under each.
CONTEXTS = {
    "": Context(),
    " over gloo": Context(is_gloo=lambda group, device: True),
    " under Inductor": Context(is_fused=True, is_gloo=lambda group, device: True),
}
UNDER_EACH = ("fp32", "hsdp")
PLANS = (Plan(1, 1, 1, 0), Plan(2, 1, 2, 0), Plan(0, 0, 0, 0), Plan(1, 1, 1))

# Of `FullyShardedDataParallel`: flat parameters, whose views the model reads.
FLAT_SETTINGS: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": True},
    "flat bf16": {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        "use_orig_params": False,
    },
    "flat retained": {
        "mixed_precision": MixedPrecision(None, torch.float16),
        "use_orig_params": True,
    },
    "flat whole": {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": False},
    "flat hybrid": {
        "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2,
        "use_orig_params": True,
    },
}
FLAT_PLANS = (PLANS[0], PLANS[3])


@cache
def subjects() -> list[Subject]:
    """Forward and backward of every setting, under every plan."""
    found = []
    for name, settings in (SETTINGS | FLAT_SETTINGS).items():
        is_flat = name in FLAT_SETTINGS
        world = 4 if "mesh" in settings or "hybrid" in name else 2
        with fake_ranks(world), captures() as captured:
            mesh = init_device_mesh("cpu", (world,))
            if world == 4:
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = wrapped(mesh, settings) if is_flat else sharded(mesh, settings)
            call = torch.compile(
                model, backend="compiled_fsdp_eager", fullgraph=True, dynamic=False
            )  # whatever ran before
            if name == "flat retained":
                with model.no_sync():
                    step(call)
            step(call)
            groups = _groups(mesh)
        for i, gm in enumerate(captured):
            kind = ("forward", "backward")[i % 2] + ("" if i < 2 else " again")
            found += [
                Subject(f"{name} {kind}{where} {p}", gm, p, world, groups, context)
                for where, context in CONTEXTS.items()
                if not where or name in UNDER_EACH
                for p in (FLAT_PLANS if is_flat else PLANS)
            ]
    return found


def sharded(mesh: Any, settings: dict[str, Any]) -> Any:
    """The model under `fully_shard`."""
    model, arguments = Net(), {**settings, "mesh": mesh}
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def wrapped(mesh: Any, settings: dict[str, Any]) -> Any:
    """The model under `FullyShardedDataParallel`."""
    policy = ModuleWrapPolicy({torch.nn.Linear})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # every NO_SHARD instance warns
        return FullyShardedDataParallel(
            Net(), auto_wrap_policy=policy, device_id="cpu", device_mesh=mesh, **settings
        )


def step(call: Any) -> None:
    """One step, which compiles."""
    call(torch.ones(3, 4)).float().sum().backward()


@contextmanager
def captures() -> Iterator[list[GraphModule]]:
    """The half graphs that are compiled inside, as the passes for halves get them."""
    captured: list[GraphModule] = []
    original = backend_module.run_half

    def run_half(gm: GraphModule) -> GraphModule:
        captured.append(copy.deepcopy(gm))
        return original(gm)

    backend_module.run_half = run_half
    try:
        yield captured
    finally:
        backend_module.run_half = original


def _groups(mesh: Any) -> dict[str, list[tuple[int, ...]]]:
    if mesh.ndim == 1:
        return {mesh.get_group().group_name: [(0, 1)]}
    names = [common_name(mesh.get_group(axis).group_name) for axis in (0, 1)]
    return dict(zip(names, ([(0, 2), (1, 3)], [(0, 1), (2, 3)]), strict=True))
