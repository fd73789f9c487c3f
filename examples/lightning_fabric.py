"""Lightning Fabric: its ModelParallelStrategy calls a function that shards.

torchrun --nproc-per-node 2 examples/lightning_fabric.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from compiled_fsdp import fully_shard  # torch.distributed.fsdp before

LENGTH = 16
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # what the model learns to write


class Model(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(nn.Linear(LENGTH * dim, LENGTH * dim) for _ in range(2))
        self.head = nn.Linear(LENGTH * dim, 256)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(1)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x), target)


def parallelize(model: Model, mesh: DeviceMesh) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def batch(seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(TEXT) - LENGTH, (32,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = lightning.Fabric(accelerator="auto", devices=devices, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup(torch.compile(Model(), backend=args.backend))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(args.steps):
        tokens, target = fabric.to_device(batch(2 * step + fabric.global_rank))
        loss = model(tokens, target)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            fabric.print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
