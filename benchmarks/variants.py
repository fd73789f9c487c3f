"""The ways to train that benchmarks compare, by name: of one `Job` (`job.py`), built by one of the
functions in `builders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from builders import (
    build_ddp_compile,
    build_fsdp1,
    build_local,
    build_mixture,
    build_muon,
    build_ours,
    build_ours_costs,
    build_ours_eager,
    build_ours_fsdp1,
    build_ours_overlap,
    build_ours_planned,
    build_ours_whole_step,
    build_raw_collectives,
    build_simple_fsdp,
    build_stock,
    checkpointed,
)
from job import Job, Step


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
for _name in ("ours", "ours_regions_units", "local_compile"):
    _plain = VARIANTS[_name]
    VARIANTS[f"{_name}_checkpoints"] = Variant(
        checkpointed(_plain.build),
        f"{_plain.floor}_checkpoints" if _plain.floor else "",
        f"{_plain.summary}; a checkpoint around each layer",
    )
VARIANTS["ours_mixture"] = Variant(
    partial(build_mixture, is_sharded=True),
    "local_compile_mixture",
    "ours, of DeepSeek-V3 in small: a mixture of experts, in bf16",
)
VARIANTS["local_compile_mixture"] = Variant(
    partial(build_mixture, is_sharded=False), summary="the same unsharded (floor)"
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
