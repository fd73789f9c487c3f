"""The ways to train that benchmarks compare: what is built, and what one step of it does.

Every builder takes a `Job` and makes the same model from the same seed, the same batches and a
fused AdamW, so that all that train lose alike. The local ones communicate nothing: each is the
floor of those that compute with the same kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from matrix_optimizers import by_dtensor, gathered, planned, step_of
from moe import Mixture, MoEConfig, MoEGPT, share_experts
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

NUM_BATCHES = 4
NUM_RAW_IN_FLIGHT = 3

Step = Callable[[int], Tensor | None]


@dataclass(frozen=True, slots=True)
class Job:
    """What all sides of a comparison train on: `batch` sequences of `length` bytes per rank and
    step.
    """

    config: GPTConfig
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of forward and backward: what the planner expects once they are compiled, and what
    each step took.
    """

    predicted: Callable[[], float | None]
    seconds: list[float]


PREDICTIONS: dict[str, Prediction] = {}  # of the variants that were built, by name


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train.

    floor: the variant that computes with the same kernels and communicates nothing; "" for the
        floors.
    tolerance: by how much its first losses may differ from those of the others, beyond rounding.
    optimizer: those of the same one lose alike.
    """

    build: Callable[[Job], Step]
    floor: str = ""
    summary: str = ""
    tolerance: float = 0.0
    optimizer: str = "adamw"

    @property
    def trains(self) -> bool:
        """Whether its losses are those of the job: floors see this rank's gradients only."""
        return bool(self.floor)


def build_ours(job: Job, *, chunks: int = 1) -> Step:
    """chunks: of a mixture of experts, into how many the tokens of a block are cut."""
    from compiled_fsdp import fully_shard

    model = make_model(job)
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        mixture.chunks = chunks
    shard(model, fully_shard)
    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), job)


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


def wrap(job: Job, cls: Callable[..., nn.Module]) -> nn.Module:
    """The model as FSDP1 of either library."""
    return cls(
        make_model(job),
        auto_wrap_policy=ModuleWrapPolicy({Block, nn.Embedding}),
        use_orig_params=True,
        forward_prefetch=True,
        device_id=torch.device("cpu"),
    )


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


RECOMPUTED = {f"ours_recompute_{100 * budget:.0f}": budget for budget in (0.0, 0.25, 0.5)}
SWEEP = {f"ours_budget_{100 * budget:.0f}": budget for budget in (0.0, 0.25, 0.5, 0.75, 1.0)}

VARIANTS: dict[str, Variant] = {
    "ours": Variant(build_ours, "local_compile", "compiled_fsdp, one graph, default backend"),
    "ours_costs": Variant(build_ours_costs, "local_compile", "the same, scheduled from costs"),
    "ours_overlap": Variant(
        build_ours_overlap, "local_compile", "the same, with overlap_optimizer"
    ),
    "ours_strided": Variant(
        partial(build_ours_planned, copy_out="strided"),
        "local_compile",
        "the same, small parameters read in their buckets",
    ),
    "ours_eager": Variant(build_ours_eager, "local_eager", "compiled_fsdp without torch.compile"),
    "ours_fsdp1": Variant(
        build_ours_fsdp1, "local_compile", "compiled_fsdp's FullyShardedDataParallel, one graph"
    ),
    "stock_eager": Variant(build_stock, "local_eager", "FSDP2"),
    "stock_prefetch": Variant(
        partial(build_stock, prefetch=True), "local_eager", "FSDP2, explicit prefetch both ways"
    ),
    "stock_block_compile": Variant(
        partial(build_stock, compiled=True), "local_block_compile", "FSDP2, each block compiled"
    ),
    "stock_prefetch_block_compile": Variant(
        partial(build_stock, prefetch=True, compiled=True), "local_block_compile", "FSDP2, both"
    ),
    "fsdp1": Variant(build_fsdp1, "local_eager", "FSDP1, forward and backward prefetch"),
    "fsdp1_compile": Variant(
        partial(build_fsdp1, compiled=True),
        "local_block_compile",
        "FSDP1, compiled: a graph per block",
    ),
    "ddp_compile": Variant(
        build_ddp_compile, "local_compile_whole", "DDP, compiled: nothing sharded"
    ),
    "simple_fsdp": Variant(
        build_simple_fsdp,
        "local_compile",
        "SimpleFSDP-style: one graph, collectives per parameter, Inductor's order",
    ),
    "local_compile": Variant(
        partial(build_local, compiled="whole"), summary="one compiled graph, no collectives (floor)"
    ),
    "local_block_compile": Variant(
        partial(build_local, compiled="blocks"), summary="compiled blocks, no collectives (floor)"
    ),
    "local_eager": Variant(build_local, summary="eager, no collectives (floor)"),
    "local_compile_whole": Variant(
        partial(build_local, compiled="whole", whole_optimizer=True),
        summary="one compiled graph, the optimizer steps everything (floor of DDP)",
    ),
    "raw_collectives": Variant(
        build_raw_collectives, summary="the collectives of FSDP, no computation (floor)"
    ),
}
BY_DEFAULT = tuple(VARIANTS)
VARIANTS["ours_whole_step"] = Variant(
    build_ours_whole_step, "local_compile", "ours, the optimizer in the same graph (compile_step)"
)
VARIANTS["ours_regions_off"] = Variant(
    partial(build_ours_planned, regions="off"),
    "local_compile",
    "ours, each layer compiled by itself",
)
VARIANTS["ours_regions_units"] = Variant(
    partial(build_ours_planned, regions="units"),
    "local_compile",
    "ours, equal units traced and compiled once",
)
# Codes of eight bits round what travels, so these lose a little differently.
CODED_TOLERANCE = 0.1
VARIANTS["ours_int8_gathers"] = Variant(
    partial(build_ours_planned, gather_quantized=torch.int8),
    "local_compile",
    "ours, parameters gathered as int8",
    CODED_TOLERANCE,
)
VARIANTS["ours_int8"] = Variant(
    partial(build_ours_planned, gather_quantized=torch.int8, reduce_quantized=torch.int8),
    "local_compile",
    "ours, parameters gathered and gradients reduced as int8",
    CODED_TOLERANCE,
)
VARIANTS["ours_fp8"] = Variant(
    partial(
        build_ours_planned,
        gather_quantized=torch.float8_e4m3fn,
        reduce_quantized=torch.float8_e4m3fn,
    ),
    "local_compile",
    "ours, parameters gathered and gradients reduced as fp8 (e4m3)",
    CODED_TOLERANCE,
)
VARIANTS["ours_checked"] = Variant(
    partial(build_ours_planned, check="checksums"),
    "local_compile",
    "ours, what travels and rests is compared between ranks",
)
VARIANTS["ours_exchanges_shared"] = Variant(
    partial(build_ours_planned, exchange_group="shared"),
    "local_compile",
    "ours, tokens on the group of the gathers",
)
VARIANTS["ours_exchanges_in_place"] = Variant(
    partial(build_ours_planned, overlap_exchanges=False),
    "local_compile",
    "ours, tokens awaited where the program says it",
)
VARIANTS["ours_chunks"] = Variant(
    partial(build_ours, chunks=2), "local_compile", "ours, tokens of a block in two chunks"
)
VARIANTS |= {
    name: Variant(
        partial(build_ours_planned, memory_budget=budget),
        "local_compile",
        f"ours, memory_budget={budget}",
    )
    for name, budget in SWEEP.items()
}
VARIANTS |= {
    name: Variant(
        partial(build_ours_planned, memory_budget=budget, recompute="budget"),
        "local_compile",
        f"ours, memory_budget={budget}, recompute='budget'",
    )
    for name, budget in RECOMPUTED.items()
}
VARIANTS["ours_whole_step_recompute_40"] = Variant(
    partial(build_ours_whole_step, memory_budget=0.4, recompute="budget"),
    "local_compile",
    "compile_step, memory_budget=0.4, recompute='budget'",
)
# torch's Muon iterates in bfloat16, the others here in fp32.
BF16_TOLERANCE = 0.1
VARIANTS |= {
    name: Variant(partial(build_muon, name=name), floor, summary, tolerance, "muon")
    for name, floor, summary, tolerance in (
        ("muon", "local_compile", "ours, Muon for matrices with overlap_optimizer, and AdamW", 0.0),
        (
            "muon_gathered",
            "local_compile",
            "ours, each gradient gathered in optimizer.step, orthogonalized on every rank",
            0.0,
        ),
        ("muon_eager", "local_eager", "ours, eager, Muon and AdamW", 0.0),
        (
            "stock_muon",
            "local_eager",
            "FSDP2 with torch.optim.Muon: DTensor's collectives for each matmul, in bfloat16",
            BF16_TOLERANCE,
        ),
    )
}
KEPT: dict[str, Any] = {"memory_budget": 1.0, "prefetch": 6.0, "reduces_in_flight": 2.0}
VARIANTS["ours_kept"] = Variant(
    partial(build_ours_planned, overlap={}, **KEPT),
    "local_compile",
    "ours, memory_budget=1.0, overlap_optimizer, gathers six units ahead in forward, two "
    "reductions under way",
)
# As much memory as DDP has is room for more than keeping every parameter.
VARIANTS["ours_at_ddp_peak"] = Variant(
    partial(build_ours_planned, overlap={"in_backward": True, "max_ahead_bytes": 1 << 27}, **KEPT),
    "local_compile",
    "the same, stepped in backward, 128 MiB gathered ahead",
)


def with_floors(names: list[str]) -> list[str]:
    """The variants named and their floors, in the order of the table."""
    wanted = {*names, *(VARIANTS[name].floor for name in names)}
    return [name for name in VARIANTS if name in wanted]


def legend(names: Iterable[str]) -> str:
    """What the names mean, for the notes of a table."""
    return "; ".join(f"**{name}**: {VARIANTS[name].summary}" for name in names) + "."


def make_model(job: Job) -> GPT:
    """Return the model, with the same weights on every call."""
    torch.manual_seed(0)
    return MoEGPT(job.config) if isinstance(job.config, MoEConfig) else GPT(job.config)


def make_batches(job: Job) -> list[tuple[Tensor, Tensor]]:
    """Return a few batches of random bytes: seen again and again, they make the loss fall."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (job.batch, job.length + 1)
    bytes_ = [torch.randint(256, shape, generator=generator) for _ in range(NUM_BATCHES)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in bytes_]


def units_of(model: GPT) -> list[nn.Module]:
    """Return what is gathered together, in the order of use."""
    return [model.embedding, *model.layers, nn.ModuleList([model.norm, model.head])]


def shard(model: GPT, fully_shard: Callable[..., Any]) -> None:
    """Shard embedding, every block, norm with head, and the root; experts belong to ranks."""
    experts = share_experts(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    for unit in [model.embedding, *model.layers, [model.norm, model.head], model]:
        fully_shard(unit, ignored_params=experts)


def compile_blocks(model: GPT) -> None:
    """Compile every block on its own: what the documentation of FSDP2 recommends."""
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)


def part_of(tensor: Tensor) -> Tensor:
    """Return as much of a tensor as one rank owns."""
    return tensor.flatten()[: tensor.numel() // dist.get_world_size()]


def trainer(
    model: nn.Module,
    run: Callable[..., Tensor],
    job: Job,
    divide: int = 1,
    overlap: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
    seconds: list[float] | None = None,
) -> Step:
    """Return the training step that all share; `divide` where gradients arrive as sums over ranks.

    seconds: where each step's forward and backward are noted, without the optimizer.
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if overlap is not None:
        overlap(model, optimizer)
    batches = make_batches(job)

    def step(index: int) -> Tensor:
        begin = time.perf_counter()
        loss = run(*batches[index % NUM_BATCHES])
        (loss / divide if divide > 1 else loss).backward()
        if seconds is not None:
            seconds.append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
