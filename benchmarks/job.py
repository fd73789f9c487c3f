"""What all sides of a comparison train, so that they lose alike: the same model from the same seed,
the same batches, a fused AdamW; and one step of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from moe import MoEConfig, MoEGPT, share_experts
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

NUM_BATCHES = 4

Step = Callable[[int], Tensor | None]


@dataclass(frozen=True, slots=True)
class Job:
    """What all sides of a comparison train on: `batch` sequences of `length` bytes per rank and
    step.

    checkpoints: whether activations inside of layers are computed again in backward.
    """

    config: GPTConfig
    batch: int
    length: int
    checkpoints: bool = False


def make_model(job: Job) -> GPT:
    """Return the model, with the same weights on every call."""
    torch.manual_seed(0)
    model = MoEGPT(job.config) if isinstance(job.config, MoEConfig) else GPT(job.config)
    if job.checkpoints:
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    return model


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
