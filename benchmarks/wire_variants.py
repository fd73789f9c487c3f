"""The ways to train that `wire.py` compares: what is built, and what one step of it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from gpt import GPT, SIZES
from hosts import WORLD_SIZE
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn.parallel import DistributedDataParallel

NUM_BATCHES = 4
NUM_RAW_IN_FLIGHT = 3

Step = Callable[[int], Tensor | None]


def build_ours(options: argparse.Namespace) -> Step:
    """compiled_fsdp, the whole model in one graph, default backend."""
    from compiled_fsdp import fully_shard

    model = make_model(options)
    shard(model, fully_shard)
    return trainer(model, torch.compile(model, fullgraph=True, dynamic=False), options)


def build_ours_eager(options: argparse.Namespace) -> Step:
    """compiled_fsdp without torch.compile: its eager runtime."""
    from compiled_fsdp import fully_shard

    model = make_model(options)
    shard(model, fully_shard)
    return trainer(model, model, options)


def build_stock_eager(options: argparse.Namespace) -> Step:
    """Stock FSDP2, eager."""
    model = make_model(options)
    shard(model, stock_fully_shard)
    return trainer(model, model, options)


def build_stock_prefetch(options: argparse.Namespace) -> Step:
    """Stock FSDP2, eager, every unit told to prefetch the next one, forward and backward."""
    model = make_model(options)
    shard(model, stock_fully_shard)
    for unit, following in pairwise([model.embedding, *model.layers, model.norm]):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    return trainer(model, model, options)


def build_stock_block_compile(options: argparse.Namespace) -> Step:
    """Stock FSDP2, every block compiled on its own: what its documentation recommends."""
    model = make_model(options)
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)
    shard(model, stock_fully_shard)
    return trainer(model, model, options)


def build_ddp_compile(options: argparse.Namespace) -> Step:
    """DistributedDataParallel, compiled: nothing sharded, two thirds of the bytes on the wire."""
    model = make_model(options)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    return trainer(model, torch.compile(ddp, dynamic=False), options)


def build_local_compiled(options: argparse.Namespace) -> Step:
    """Compute floor: forward and backward of the unsharded model, AdamW on this rank's half."""
    model = make_model(options)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    batches = make_batches(options)
    halves = [nn.Parameter(half(parameter.detach())) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(halves)

    def step(index: int) -> None:
        compiled(*batches[index % NUM_BATCHES]).backward()
        for piece, parameter in zip(halves, model.parameters(), strict=True):
            assert parameter.grad is not None
            piece.grad = half(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()

    return step


def build_raw_collectives(options: argparse.Namespace) -> Step:
    """Wire floor: every unit gathered twice and reduced by all-to-all, without computation."""
    units = [sum(p.numel() for p in m.parameters()) // WORLD_SIZE for m in units_of(options)]
    shards = [torch.zeros(numel) for numel in units]
    full = [torch.zeros(numel * WORLD_SIZE) for numel in units]
    received = [torch.zeros(numel * WORLD_SIZE) for numel in units]

    def gather(unit: int) -> dist.Work:
        work: dist.Work = dist.all_gather_single(full[unit], shards[unit], async_op=True)
        return work

    def exchange(unit: int) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(received[unit], full[unit], async_op=True)
        return work

    forward = [(gather, unit) for unit in range(len(units))]
    backward = [(issue, unit) for unit in reversed(range(len(units))) for issue in (gather, exchange)]

    def step(_index: int) -> None:
        works: list[dist.Work] = []
        for issue, unit in [*forward, *backward]:
            if len(works) == NUM_RAW_IN_FLIGHT:
                works.pop(0).wait()
            works.append(issue(unit))
        for work in works:
            work.wait()

    return step


BUILDERS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "ours": build_ours,
    "ours_eager": build_ours_eager,
    "stock_eager": build_stock_eager,
    "stock_prefetch": build_stock_prefetch,
    "stock_block_compile": build_stock_block_compile,
    "ddp_compile": build_ddp_compile,
    "local_compiled": build_local_compiled,
    "raw_collectives": build_raw_collectives,
}


def make_model(options: argparse.Namespace) -> GPT:
    """Return the model, with the same weights on every call."""
    torch.manual_seed(0)
    return GPT(SIZES[options.size])


def make_batches(options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return a few batches of random bytes: seen again and again, they make the loss fall."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options.batch, options.length + 1)
    bytes_ = [torch.randint(256, shape, generator=generator) for _ in range(NUM_BATCHES)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in bytes_]


def units_of(options: argparse.Namespace) -> list[nn.Module]:
    """Return what is gathered together, in the order of use."""
    model = make_model(options)
    return [model.embedding, *model.layers, nn.ModuleList([model.norm, model.head])]


def shard(model: GPT, fully_shard: Callable[..., object]) -> None:
    """Shard embedding, every block, norm with head, and the root."""
    fully_shard(model.embedding)
    for block in model.layers:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    fully_shard(model)


def half(tensor: Tensor) -> Tensor:
    """Return as much of a tensor as one rank owns."""
    return tensor.flatten()[: tensor.numel() // WORLD_SIZE]


def trainer(model: nn.Module, run: Callable[..., Tensor], options: argparse.Namespace) -> Step:
    """Return the training step that all variants share."""
    optimizer = torch.optim.AdamW(model.parameters())
    batches = make_batches(options)

    def step(index: int) -> Tensor:
        loss = run(*batches[index % NUM_BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
