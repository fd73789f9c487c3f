"""`compile_step` for mixtures of experts that are divided among ranks: experts that no unit has are
updated in the graph, with the numbers of the ordinary loop.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.graphs import captured
from kit.harness import ROUNDING, SLOW, local
from kit.overlap import OPTIMIZERS
from moe import Mixture, MoEConfig, MoEGPT, share_experts
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from compiled_fsdp import Muon, compile_step, fully_shard, planned
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find, order
from compiled_fsdp.ir.schema import UPDATE
from compiled_fsdp.torch_private.dynamo import recompiles

if TYPE_CHECKING:
    from kit.pool import Pool

CONFIG = MoEConfig(
    num_layers=1, width=16, num_heads=2, hidden=16, max_length=8, vocab=32, num_experts=4,
    expert_hidden=8, balance=0.05,
)  # fmt: skip
STEPS = 4
# fp32: tokens of all ranks are added per expert in one matmul, where one process has one a rank
ALONE = (2e-4, 2e-6)
SCALES = {"init_scale": 1331.0, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 2}


@dataclass(frozen=True)
class Way:
    """How a step is taken.

    is_scaled: with a scaler, and a loss that is infinite on one rank in the second step.
    is_plain: experts are plain tensors, not DTensors.
    """

    optimizer: str = "adamw"
    clip: float | None = None
    count: int = 1
    once: bool = False
    chunks: int = 1
    is_scaled: bool = False
    is_plain: bool = False


def build(way: Way = Way()) -> MoEGPT:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MoEGPT(CONFIG)
    for mixture in mixtures(model):
        mixture.router.weight.data.mul_(8.0)  # so that routing differs from token to token
        mixture.chunks = way.chunks
    return model


def mixtures(model: nn.Module) -> list[Mixture]:
    return [m for m in model.modules() if isinstance(m, Mixture)]


def distribute(model: Any, way: Way = Way(), *, with_efsdp: bool = False) -> Any:
    """Experts over all ranks, in no unit; or over two, and in units over the other axis."""
    if with_efsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        whole = mesh["efsdp", "ep"]._flatten("dp")
        share_experts(model, mesh["ep"])
        for layer in model.layers:
            fully_shard(layer.mixture.experts, mesh=mesh["efsdp"])
            fully_shard(layer, mesh=whole)
        return fully_shard(model, mesh=whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ignored = share_experts(model, mesh)
    if way.is_plain:
        for mixture in mixtures(model):
            for name, p in [*mixture.experts.named_parameters()]:
                setattr(mixture.experts, name, nn.Parameter(p.to_local().detach().clone()))
        ignored = {p for m in mixtures(model) for p in m.experts.parameters()}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    data = torch.randint(CONFIG.vocab, (2, 9), generator=generator)
    return data[:, :-1], data[:, 1:]


def loss_fn(model: Any, tokens: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
    loss: Tensor = model(tokens, targets) * factor
    return loss


def batches(way: Way, step: int, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    is_infinite = way.is_scaled and step == 1 and rank == dist.get_world_size() - 1
    factor = torch.tensor(float("inf") if is_infinite else 1.0)
    return [(*batch(way.count * step + i, rank), factor) for i in range(way.count)]


def route(model: nn.Module, step: int) -> None:
    """In the third step all tokens go to the first experts: the last rank gets none; in the fourth to
    the last ones.
    """
    for mixture in mixtures(model):
        mixture.bias.zero_()
        if step >= 2:
            half = slice(0, 2) if step == 2 else slice(2, 4)
            mixture.bias[half] = 10.0


def state_of(model: Any, optimizer: Any) -> list[Any]:
    state = [
        [local(v) for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        for p in model.parameters()
    ]
    return [[local(p) for p in model.parameters()], state]


def looped(model: Any, way: Way, call: Any = None) -> list[Any]:
    """Losses and scales of the ordinary loop, and the state at its end."""
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=way.is_scaled, **SCALES)
    losses = []
    for step in range(STEPS):
        route(model, step)
        total = torch.zeros(())
        for i, each in enumerate(batches(way, step, dist.get_rank())):
            if way.once:
                model.set_requires_gradient_sync(i == way.count - 1)
            loss = loss_fn(call or model, *each) / way.count
            scaler.scale(loss).backward()
            total = total + loss.detach()
        if way.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(str(float(total)))
    return [losses, scaler.get_scale(), *state_of(model, optimizer)]


def whole(
    model: Any, way: Way, backend: str = "compiled_fsdp_eager", **more: Any
) -> tuple[list[Any], Any, Any]:
    """The same by a compiled step; and its optimizer."""
    optimizer = OPTIMIZERS[way.optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=way.is_scaled, **SCALES)
    step = compile_step(
        model, optimizer, loss_fn, clip=way.clip, accumulate=way.count, reduce_once=way.once,
        scaler=scaler, backend=backend, **more,
    )  # fmt: skip
    losses = []
    counters.clear()
    for i in range(STEPS):
        route(model, i)
        given = batches(way, i, dist.get_rank())
        losses.append(str(float(step(given) if way.count > 1 else step(*given[0]))))
        if not more.get("keep_grads"):
            assert all(p.grad is None for p in model.parameters())
    assert counters["stats"]["unique_graphs"] == 1, (counters["stats"], recompiles())
    return [losses, scaler.get_scale(), *state_of(model, optimizer)], optimizer, step


WAYS = {
    "adamw": Way(),
    "clipped": Way("sgd", clip=0.05),
    "accumulated": Way("adamw_fused", clip=0.1, count=3),
    "reduced once, in chunks": Way("sgd", count=2, once=True, chunks=2),
    "scaled": Way("adamw", clip=0.05, is_scaled=True),
    "scaled, fused": Way("adamw_fused", is_scaled=True),
    "plain tensors": Way("adamw", count=2, is_plain=True),
}


def compare(name: str) -> None:
    way = WAYS[name]
    wanted = looped(distribute(build(way), way), way)
    found, _, _ = whole(distribute(build(way), way), way)
    assert len(set(wanted[0])) == STEPS, wanted[0]
    check_equal(found, wanted, name)


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks(two: Pool, name: str) -> None:
    """Bit for bit the loop; ranks without tokens, and no second graph."""
    two.run(compare, name, timeout=SLOW)
