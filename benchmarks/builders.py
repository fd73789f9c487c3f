"""The builders of `variants.py`: each takes a `Job`, and returns one step of its way to train.

The local ones communicate nothing: each is the floor of those that compute with the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepseek import DeepSeek, tiny_deepseek
from deepseek import share_experts as share_grouped_experts
from gpt import Block
from job import (
    NUM_BATCHES,
    Job,
    Step,
    compile_blocks,
    make_batches,
    make_model,
    part_of,
    shard,
    trainer,
    units_of,
)
from matrix_optimizers import by_dtensor, gathered, planned, step_of
from moe import Mixture, MoEConfig
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

NUM_RAW_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of forward and backward: what the planner expects once they are compiled, and what
    each step took.
    """

    predicted: Callable[[], float | None]
    seconds: list[float]


PREDICTIONS: dict[str, Prediction] = {}  # of the variants that were built, by name


def wrap(job: Job, cls: Callable[..., nn.Module]) -> nn.Module:
    """The model as FSDP1 of either library."""
    return cls(
        make_model(job),
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}),
        use_orig_params=True,
        forward_prefetch=True,
        device_id=torch.device("cpu"),
    )


def build_ours(job: Job, *, chunks: int = 1) -> Step:
    """chunks: of a mixture of experts, into how many the tokens of a block are cut."""
    from compiled_fsdp import fully_shard

    model = make_model(job)
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        mixture.chunks = chunks
    shard(model, fully_shard)
    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job)


def build_mixture(job: Job, *, is_sharded: bool) -> Step:
    """DeepSeek-V3 in small, as deep as the job's model and as long as its sequences, in bf16: how
    many tokens each expert gets is what only data decides.
    """
    from compiled_fsdp import fully_shard

    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    model = _mixture(job)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("efsdp", "ep"))
    experts = share_grouped_experts(model, mesh["ep"])
    if not is_sharded:
        for each in experts:
            parameters: Any = [*each.named_parameters()]
            for name, parameter in parameters:
                setattr(each, name, nn.Parameter(parameter.to_local()))
        model.bfloat16()
        return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for each in experts:
        fully_shard(each, mesh=mesh["efsdp"], mp_policy=policy)
    for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
        fully_shard(unit, mesh=mesh._flatten("dp"), mp_policy=policy)
    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job)


def _mixture(job: Job) -> DeepSeek:
    torch.manual_seed(0)
    model = DeepSeek(tiny_deepseek(job.config.num_layers, job.length, vocab=256))
    for parameter in model.parameters():
        if parameter.dim() == 3:  # the experts', which are not written to when they are made
            nn.init.normal_(parameter, std=0.02)
    return model


def checkpointed(build: Callable[[Job], Step]) -> Callable[[Job], Step]:
    """The same way to train, with a checkpoint around each layer."""
    return lambda job: build(replace(job, checkpoints=True))


def build_ours_eager(job: Job) -> Step:
    from compiled_fsdp import fully_shard

    model = make_model(job)
    shard(model, fully_shard)
    return trainer(model, model, job)


def build_ours_overlap(job: Job, **options: float) -> Step:
    from compiled_fsdp import fully_shard, overlap_optimizer

    model = make_model(job)
    shard(model, fully_shard)

    def overlap(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        overlap_optimizer(model, optimizer, **options)  # type: ignore[arg-type]

    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job, overlap=overlap)


def build_ours_whole_step(job: Job, **fields: float | str) -> Step:
    """Forward, backward and the optimizer as one graph, with other fields of the plan."""
    from compiled_fsdp import compile_step, fully_shard, planned

    model = make_model(job)
    shard(model, fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    whole_step = compile_step(model, optimizer, dynamic=False)
    batches = make_batches(job)

    def step(index: int) -> Tensor:
        with planned(**fields):  # compiled in the first step
            loss: Tensor = whole_step(*batches[index % NUM_BATCHES])
        return loss

    return step if fields else lambda index: whole_step(*batches[index % NUM_BATCHES])


def build_ours_planned(
    job: Job, *, overlap: dict[str, float] | None = None, **fields: float | str | torch.dtype
) -> Step:
    """With other fields of the plan (a memory budget of 0.0 drops every parameter after forward,
    1.0 keeps all).

    overlap: options of `overlap_optimizer`; None to leave it out.
    """
    from compiled_fsdp import planned

    step = build_ours(job) if overlap is None else build_ours_overlap(job, **overlap)

    def step_as_planned(index: int) -> Tensor | None:
        with planned(**fields):  # compiled in the first step
            return step(index)

    return step_as_planned


def build_ours_costs(job: Job) -> Step:
    """Everything decided from costs, kernels measured; other variants of the same process keep the
    default plan.
    """
    from compiled_fsdp import (
        Plan,
        current_plan,
        explain,
        fully_shard,
        measure_kernels,
        planned,
        set_plan,
    )

    model = make_model(job)
    shard(model, fully_shard)
    seconds: list[float] = []
    step = trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job, seconds=seconds)
    plan = Plan(
        None,
        None,
        None,
        bucket_bytes=None,
        split_bytes=None,
        own_message=None,
        reductions=None,
        copy_out=None,
    )

    def step_from_costs(index: int) -> Tensor | None:
        nonlocal plan
        with planned():
            set_plan(plan)
            if plan.costs is None:
                measure_kernels(model, *make_batches(job)[0])
            loss = step(index)
            plan = current_plan()
        return loss

    def predicted() -> float | None:
        return explain(model).step.predicted_seconds

    PREDICTIONS["ours_costs"] = Prediction(predicted, seconds)
    return step_from_costs


def build_muon(job: Job, *, name: str) -> Step:
    """Muon for the matrices of the blocks, in one of the ways of `matrix_optimizers.py`."""
    from compiled_fsdp import fully_shard

    is_eager = name in ("stock_muon", "muon_eager")
    make = {"muon_gathered": gathered, "stock_muon": by_dtensor}.get(name, planned)
    model = make_model(job)
    shard(model, stock_fully_shard if name == "stock_muon" else fully_shard)
    run = model if is_eager else torch.compile(model, fullgraph=True, dynamic=False)
    return step_of(name, model, run, make_batches(job), make, overlaps=name == "muon")


def build_stock(job: Job, *, prefetch: bool = False, compiled: bool = False) -> Step:
    """FSDP2; `prefetch` tells every unit to gather the next one, forward and backward."""
    model = make_model(job)
    if compiled:
        compile_blocks(model)
    shard(model, stock_fully_shard)
    if prefetch:
        for unit, following in pairwise([model.embedding, *model.layers, model.norm]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
    return trainer(model, model, job)


def build_fsdp1(job: Job, *, compiled: bool = False) -> Step:
    """FSDP1, a flat parameter per block; backward prefetch is its default, forward prefetch asked
    for.
    """
    model = wrap(job, FullyShardedDataParallel)
    return trainer(model, torch.compile(model, dynamic=False) if compiled else model, job)


def build_ours_fsdp1(job: Job) -> Step:
    from compiled_fsdp import FullyShardedDataParallel as Ours

    model = wrap(job, Ours)
    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job)


def build_ddp_compile(job: Job) -> Step:
    ddp = DistributedDataParallel(
        make_model(job), gradient_as_bucket_view=True, forward_sync_buffers=False
    )
    return trainer(ddp, torch.compile(ddp, dynamic=False), job)


def build_simple_fsdp(job: Job) -> Step:
    model = make_model(job)
    simple_fsdp(model, dist.group.WORLD)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    return trainer(model, compiled, job, divide=dist.get_world_size())


def build_local(job: Job, *, compiled: str = "", whole_optimizer: bool = False) -> Step:
    """Forward and backward of the unsharded model; AdamW on as much as one rank owns, or on all."""
    model = make_model(job)
    run: Callable[..., Tensor] = model
    if compiled == "blocks":
        compile_blocks(model)
    elif compiled == "whole":
        run = torch.compile(model, fullgraph=True, dynamic=False)
    if whole_optimizer:
        return trainer(model, run, job)
    batches = make_batches(job)
    parts = [nn.Parameter(part_of(parameter.detach())) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parts, fused=True)

    def step(index: int) -> None:
        run(*batches[index % NUM_BATCHES]).backward()
        for part, parameter in zip(parts, model.parameters(), strict=True):
            assert parameter.grad is not None
            part.grad = part_of(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    return step


def build_raw_collectives(job: Job) -> Step:
    """Every unit gathered twice and reduced by all-to-all, a few in flight, without computation;
    the tokens of a mixture travel to experts and back.
    """
    world = dist.get_world_size()
    units = [
        sum(p.numel() for p in m.parameters() if p.dim() < 3)
        // world  # experts stay where they are
        for m in units_of(make_model(job))
    ]
    routed = torch.zeros(
        job.batch * job.length * job.config.top * job.config.width
        if isinstance(job.config, MoEConfig)
        else 0
    )
    shards = [torch.zeros(numel) for numel in units]
    full = [torch.zeros(numel * world) for numel in units]
    received = [torch.zeros(numel * world) for numel in units]

    def gather(unit: int) -> Any:
        work: Any = dist.all_gather_into_tensor(full[unit], shards[unit], async_op=True)
        return work

    def exchange(unit: int) -> Any:
        work: Any = dist.all_to_all_single(received[unit], full[unit], async_op=True)
        return work

    def route(_unit: int) -> Any:
        work: Any = dist.all_to_all_single(torch.empty_like(routed), routed, async_op=True)
        return work

    def routes(unit: int) -> list[Any]:
        is_block = 0 < unit < len(units) - 1
        return [route, route] if is_block and routed.numel() else []

    order = range(len(units))
    forward = [(issue, unit) for unit in order for issue in [gather, *routes(unit)]]
    backward = [
        (issue, unit) for unit in reversed(order) for issue in [gather, *routes(unit), exchange]
    ]

    def step(_index: int) -> None:
        works: list[Any] = []
        for issue, unit in [*forward, *backward]:
            if len(works) == NUM_RAW_IN_FLIGHT:
                works.pop(0).wait()
            works.append(issue(unit))
        for work in works:
            work.wait()

    return step
