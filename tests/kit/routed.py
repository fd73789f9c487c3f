"""A mixture of experts whose router changes its mind at every step, beside one process that has all
the experts.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from moe import Mixture, MoEConfig, MoEGPT, share_experts
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp import fully_shard

CONFIG = MoEConfig(
    num_layers=1, width=16, num_heads=2, hidden=16, max_length=8, vocab=32, num_experts=4,
    expert_hidden=8,
)  # fmt: skip
BALANCED = replace(CONFIG, balance=0.05)  # with a loss that evens out the experts' shares
# fp32: tokens of all ranks are added per expert in one matmul, where one process has one a rank.
ALONE = (2e-4, 2e-6)
FAVOUR = 4.0  # of the router's scores, which are below 1: some experts get no token


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Other tokens in each step and on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    data = torch.randint(CONFIG.vocab, (2, 9), generator=generator)
    return data[:, :-1], data[:, 1:]


def route(model: Any, step: int) -> None:
    """Favour experts at random, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        mixture.bias.copy_(FAVOUR * torch.rand(CONFIG.num_experts, generator=generator))


def train(steps: int, backend: str = "compiled_fsdp_eager") -> tuple[int, float, int]:
    """Graphs compiled after the first step, the largest difference of a loss, and how often an
    expert got no token.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = MoEGPT(CONFIG)
    model: Any = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (world,))
    experts = share_experts(model, mesh)
    fully_shard(model.layers[0], mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    call = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    gap, graphs, num_empty = 0.0, 0, 0
    for step in range(steps):
        for each in (model, reference):
            route(each, step)
        loss = call(*batch(step, rank))
        loss.backward()
        wanted = [reference(*batch(step, other)) for other in range(world)]
        (sum(wanted) / world).backward()
        gap = max(gap, (loss - wanted[rank]).abs().item())
        num_empty += int((reference.layers[0].mixture.counted == 0).sum())
        reference.layers[0].mixture.counted.zero_()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            graphs = counters["stats"]["unique_graphs"]
    return counters["stats"]["unique_graphs"] - graphs, gap, num_empty
