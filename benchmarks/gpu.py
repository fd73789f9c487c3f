"""What sharding costs on one GPU: Llama of 1.1 B parameters in bf16, as rank 0 of a fake group of 8
and of 64.

A fake group moves nothing and waits for nobody. What is left is all that a rank does besides its
model's computation (casts, packing, copies, launches), and the memory that it needs: what it holds
is 1/8 or 1/64 of every parameter, and what it gathers is as large as in a real job. The floor is
the same model unsharded and compiled as a whole, in bf16, with AdamW on as many fp32 elements as a
rank owns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hosts import HostsError
from llama import Llama, LlamaConfig
from measure import peak_tensor_bytes
from results import Panel, Report, Table, machine, ratio, spread
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from variants import part_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from screen import Screen
    from settings import Settings

WORLDS = (8, 64)
CAPTURED = "ours_whole_step_cuda_graphs"
VARIANTS = (
    "local",
    "ours",
    "ours_cuda_graphs",
    "ours_whole_step",
    CAPTURED,
    "stock_block_compile",
)
BATCH, LENGTH = 4, 2048
WARM_UP, STEPS = 5, 20
GOAL = 1.03
CONFIG = LlamaConfig(
    num_layers=16, width=2048, num_heads=32, hidden=8192, max_length=LENGTH, vocab=32768
)
SMALL = LlamaConfig(num_layers=2, width=256, num_heads=8, hidden=512, max_length=LENGTH, vocab=512)


def run(settings: Settings, screen: Screen) -> Report:
    """One process for each way and size of the group, one after the other."""
    if not torch.cuda.is_available():
        raise HostsError("it needs a CUDA device")
    found: dict[str, dict[str, Any]] = {}
    for world in WORLDS[:1] if settings.quick else WORLDS:
        for variant in VARIANTS:
            screen.line(f"gpu, {variant}, {world} ranks")
            command = [
                sys.executable,
                str(Path(__file__).resolve()),
                variant,
                str(world),
                *["--quick"] * settings.quick,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[f"{variant}, {world}"] = json.loads(done.stdout.splitlines()[-1])
    return report(found)


def report(found: dict[str, dict[str, Any]]) -> Report:
    """A row per way; ratios are to the local step of the same group size."""
    rows, notes = [], []
    for name, seen in found.items():
        floor = found[f"local, {name.split(', ')[1]}"]
        median, between = spread([1e3 * s for s in seen["seconds"]], ".1f")
        to_floor = ratio(statistics.median(seen["seconds"]), statistics.median(floor["seconds"]))
        peak = f"{seen['peak'] / 2**30:.2f}"
        rows.append(
            [
                name,
                median,
                between,
                to_floor,
                peak,
                f"{(seen['peak'] - seen['at_rest']) / 2**30:.2f}",
            ]
        )
    for world in dict.fromkeys(name.split(", ")[1] for name in found):
        ours, stock = found[f"ours, {world}"], found[f"stock_block_compile, {world}"]
        step = statistics.median(ours["seconds"]) / statistics.median(
            found[f"local, {world}"]["seconds"]
        )
        notes.append(
            f"{world} ranks: ours is {step:.3f} times the local compiled step (target {GOAL}), and "
            f"its peak is {ours['peak'] / stock['peak']:.3f} of stock's with compiled blocks "
            "(target: at most 1)."
        )
    facts = [
        machine(),
        f"{torch.cuda.get_device_name()}.",
        f"Llama of {CONFIG.num_layers} layers, width {CONFIG.width}, hidden {CONFIG.hidden}, "
        f"vocabulary {CONFIG.vocab}; {BATCH} sequences of {LENGTH}; bf16 parameters, fp32 "
        f"reductions, fused AdamW; median and quartiles of {STEPS} steps after {WARM_UP}.",
    ]
    columns = ["", "step, ms", "quartiles", "over local", "peak, GiB", "above rest, GiB"]
    bars = {
        name: {"step": 1e3 * statistics.median(seen["seconds"])} for name, seen in found.items()
    }
    return Report(
        "gpu",
        "One GPU, fake groups",
        [Table("Steps", facts, columns, rows)],
        [Panel("Step", "ms", bars)],
        notes,
    )


def measure(variant: str, world: int, *, is_quick: bool) -> dict[str, Any]:
    """Build one way and time its steps."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    config = SMALL if is_quick else CONFIG
    with torch.device("cuda"):
        step = build(variant, config, world)
    if variant == CAPTURED:  # when it is captured, which is second: replays allocate nothing
        memory = peak_tensor_bytes(step, "cuda")
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if variant != CAPTURED:
        memory = peak_tensor_bytes(step, "cuda")
    return {"seconds": seconds, "peak": memory.peak, "at_rest": memory.at_rest}


def build(variant: str, config: LlamaConfig, world: int) -> Callable[[], None]:
    """The training step of one way."""
    tokens = torch.randint(config.vocab, (BATCH, LENGTH + 1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    model = Llama(config)
    if variant == "local":
        return local(model.bfloat16(), batch)
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    call: Any = model
    if variant == "stock_block_compile":
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        shard(model, stock_fully_shard, mesh, policy)
    else:
        from compiled_fsdp import compile_step, fully_shard

        shard(model, fully_shard, mesh, policy)
        if variant.startswith("ours_whole_step"):
            mode = "reduce-overhead" if variant == CAPTURED else None
            adamw = torch.optim.AdamW(model.parameters(), fused=True, capturable=mode is not None)
            whole = compile_step(model, adamw, mode=mode, dynamic=False)
            return lambda: whole(*batch)
        mode = "reduce-overhead" if variant == "ours_cuda_graphs" else None
        call = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shard(
    model: Llama, apply: Callable[..., object], mesh: object, policy: MixedPrecisionPolicy
) -> None:
    """The units of both sides."""
    for unit in (model.embedding, *model.layers, [model.norm, model.head], model):
        apply(unit, mesh=mesh, mp_policy=policy)


def local(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """Unsharded, without communication; the optimizer steps fp32 parts of 1/world."""
    call = torch.compile(model, fullgraph=True, dynamic=False)
    parts = [nn.Parameter(part_of(p.detach()).float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(parts, fused=True)

    def step() -> None:
        call(*batch).backward()
        for part, parameter in zip(parts, model.parameters(), strict=True):
            assert parameter.grad is not None
            part.grad = part_of(parameter.grad).float()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("world", type=int)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sys.stdout.write(
        json.dumps(measure(options.variant, options.world, is_quick=options.quick)) + "\n"
    )
