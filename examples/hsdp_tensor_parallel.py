"""Replicas of shards (HSDP) with tensor parallelism inside a host, on one mesh.

torchrun --nproc-per-node 4 examples/hsdp_tensor_parallel.py --replicate 1 --tensor 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from compiled_fsdp import fully_shard  # torch.distributed.fsdp before

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
LENGTH = 16
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # what the model learns to write


def build(dim: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)
        )
        for _ in range(2)
    )
    return nn.Sequential(
        nn.Embedding(256, dim // LENGTH), nn.Flatten(), *blocks, nn.Linear(dim, 256)
    )


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in model[2:-1]:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)  # first: fully_shard cuts the local shards
        fully_shard(block, mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(TEXT) - LENGTH, (32,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1].to(DEVICE), rows[:, -1].to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group()
    sizes = args.replicate, dist.get_world_size() // (args.replicate * args.tensor), args.tensor
    mesh = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
    model = torch.compile(shard(build().to(DEVICE), mesh), backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data_rank = mesh["replicate", "shard"]._flatten().get_local_rank()
    for step in range(args.steps):
        tokens, target = batch(1000 * step + data_rank)  # ranks of one tensor group get the same
        loss = F.cross_entropy(model(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
