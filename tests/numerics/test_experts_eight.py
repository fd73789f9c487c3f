"""Expert parallelism inside HSDP: eight ranks, two replicas of two shards of experts on two ranks
each.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.pool import Pool
from moe import MoEConfig, MoEGPT, share_experts
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from compiled_fsdp import fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = MoEConfig(
    num_layers=1, width=8, num_heads=2, hidden=16, max_length=4, vocab=16, num_experts=4,
    expert_hidden=16,
)  # fmt: skip
STEPS = 3
# Gloo adds four or eight gradients in another order than our all-to-all and local sum.
RTOL, ATOL = 1e-5, 1e-7


@pytest.fixture
def eight() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


def distribute(model: Any, shard: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    mesh["efsdp", "ep"]._flatten("dp")
    dense = mesh["replicate", "dp"]
    share_experts(model, mesh["ep"])
    experts = model.layers[0].mixture.experts
    shard(experts, mesh=mesh["replicate", "efsdp"])
    experts.set_gradient_divide_factor(4.0)  # tokens of an EP group's two ranks: see moe.py
    experts.set_force_sum_reduction_for_comms(True)
    shard(model.layers[0], mesh=dense)
    return shard(model, mesh=dense)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    data = torch.randint(CONFIG.vocab, (2, 5), generator=generator)
    return data[:, :-1], data[:, 1:]


def train(kind: str, reference: MoEGPT) -> list[Tensor]:
    model = distribute(
        copy.deepcopy(reference), stock_fully_shard if kind == "stock" else fully_shard
    )
    call = model
    if kind == "compiled":
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    for step in range(STEPS):
        loss = call(*batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.full_tensor() for p in model.parameters())]


def alone(reference: MoEGPT) -> list[Tensor]:
    """One process that has all experts and all ranks' tokens: this rank's losses."""
    model = copy.deepcopy(reference)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    for step in range(STEPS):
        losses = [model(*batch(step, rank)) for rank in range(dist.get_world_size())]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[dist.get_rank()].detach())
    return [*found, *model.parameters()]


def compare() -> None:
    torch.manual_seed(0)
    reference = MoEGPT(CONFIG)
    wanted, stock = alone(reference), train("stock", reference)
    counters.clear()
    ours = train("compiled", reference)
    assert counters["stats"]["unique_graphs"] == 1
    for mine, theirs, single in zip(ours, stock, wanted, strict=True):
        assert torch.allclose(mine, theirs, RTOL, ATOL)
        assert torch.allclose(mine, single, 1e-4, 1e-6)


def test_hsdp(eight: Pool) -> None:
    eight.run(compare)
