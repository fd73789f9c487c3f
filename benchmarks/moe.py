"""The GPT with a mixture of experts in each block: top-k of routed experts, and one that every
token goes to (Shazeer et al., 2017; Dai et al., 2024), with expert parallelism over all ranks.

As the GPT it knows nothing about sharding. Shapes in comments: N tokens of a rank, E experts, C
width of the model, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, SIZES, Attention, GPTConfig, RMSNorm, SwiGLU
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from compiled_fsdp import in_chunks

NUM_EXPERTS, TOP = 8, 2


@dataclass(frozen=True, slots=True)
class MoEConfig(GPTConfig):
    """As for the GPT; `hidden` is the width of the expert that every token goes to.

    num_experts, top, expert_hidden: routed experts, how many of them a token goes to, and how wide
        each is.
    balance: the weight of the loss that spreads tokens over experts (Fedus et al., 2021).
    bias_rate: by how much `update_bias` favours experts that got few tokens (Wang et al., 2024).
    """

    num_experts: int = NUM_EXPERTS
    top: int = TOP
    expert_hidden: int = 256
    balance: float = 0.01
    bias_rate: float = 0.0


def mixture_of(config: GPTConfig) -> MoEConfig:
    """A mixture that computes as much for a token as a GPT does: half of its feed-forward width is
    shared, half is routed.
    """
    half = config.hidden // 2
    return MoEConfig(
        config.num_layers,
        config.width,
        config.num_heads,
        half,
        config.max_length,
        config.vocab,
        expert_hidden=half // TOP,
    )


def config_of(fields: dict[str, Any]) -> GPTConfig:
    """A config from its fields, of either kind of model."""
    return MoEConfig(**fields) if "num_experts" in fields else GPTConfig(**fields)


def name_of(config: GPTConfig) -> str:
    """What a table calls the model."""
    if not isinstance(config, MoEConfig):
        return "GPT"
    return (
        f"GPT with {config.num_experts} experts of width {config.expert_hidden} a layer, "
        f"{config.top} for each byte, beside a shared one of {config.hidden}, divided among the "
        "ranks;"
    )


MOE_SIZES = {name: mixture_of(config) for name, config in SIZES.items()}


class ScaleGradient(torch.autograd.Function):
    """The same value; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Experts(nn.Module):
    """Gated feed-forward parts [E, C, F] and back, one after another; DTensors of Shard(0) under
    expert parallelism.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        wide = (config.num_experts, config.width, config.expert_hidden)
        self.gate = nn.Parameter(torch.empty(wide))
        self.up = nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(wide[0], wide[2], wide[1]))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Tokens [N, C] in the order of their experts, `counts` [E] of each."""
        weights = [self._local(p).to(x.dtype) for p in (self.gate, self.up, self.down)]
        parts = zip(x.split(counts.tolist()), *weights, strict=True)
        return torch.cat(
            [(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in parts]
        )

    def _local(self, parameter: Tensor) -> Tensor:
        """This rank's experts. Tokens of all ranks come to them, each with the gradient of its own
        rank's mean loss.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        scale: Any = ScaleGradient
        local: Tensor = scale.apply(parameter.to_local(), 1.0 / parameter.device_mesh.size())
        return local


class Mixture(nn.Module):
    """Router, routed experts, and the shared one.

    group: the ranks that share the experts.
    chunks: into how many its tokens are cut, each sent and computed by itself.
    bias, counted: what is added to scores when experts are chosen, and how many tokens each expert
        has got since `update_bias`, of this rank.
    """

    bias: Tensor
    counted: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.bias_rate = config.bias_rate
        self.num_experts, self.top = config.num_experts, config.top
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts, self.shared = Experts(config), SwiGLU(config)
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("counted", torch.zeros(config.num_experts), persistent=False)
        self.group: dist.ProcessGroup | None = None
        self.chunks = 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, T, C] to as many, and the balance loss."""
        flat = x.flatten(0, 1)
        scores = self.router(flat).float().softmax(-1)  # [N, E]
        ids = (scores.detach() + self.bias).topk(self.top, dim=-1).indices
        chosen = scores.gather(1, ids)
        weights = chosen / chosen.sum(-1, keepdim=True)
        counts = self._count(ids)
        self.counted.add_(counts)  # by a method: under checkpointing Dynamo takes no assignment
        routed = in_chunks(self._routed, self.chunks, flat, ids, weights)
        share = counts / counts.sum()
        balance = self.num_experts * (scores.mean(0) * share).sum()
        return routed.view_as(x) + self.shared(x), balance

    def _count(self, ids: Tensor) -> Tensor:
        """Tokens of this rank for each expert [E]."""
        flat = ids.flatten().float()
        return torch.histc(flat, bins=self.num_experts, min=0, max=self.num_experts).long()

    def _routed(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Some tokens [n, C] through their experts [n, top], and added up by weight [n, top]."""
        order = ids.flatten().argsort(stable=True)
        tokens, counts = flat[order // self.top], self._count(ids)
        done = (
            self.experts(tokens, counts)
            if self.group is None
            else dispatched(tokens, counts, self.experts, self.group)
        )
        done = done * weights.flatten()[order, None].to(done.dtype)
        return torch.zeros_like(flat).index_add(0, order // self.top, done)


def dispatched(
    tokens: Tensor, counts: Tensor, experts: nn.Module, group: dist.ProcessGroup
) -> Tensor:
    """Send tokens [N, C], in the order of their experts, to the ranks that hold these, compute
    there, and get them back. counts: tokens of this rank for each expert of all.
    """
    size = dist.get_world_size(group)
    with torch.no_grad():
        theirs = wait_tensor(all_to_all_single(counts, None, None, group)).view(size, -1)
        sent = counts.view(size, -1).sum(1).tolist()
        received = theirs.sum(1).tolist()
    got = all_to_all_single_autograd(tokens, received, sent, group)
    local = torch.arange(counts.shape[0] // size, device=counts.device).repeat(size)
    of_expert = local.repeat_interleave(theirs.flatten(), output_size=got.shape[0])
    order = of_expert.argsort(stable=True)
    done = experts(got[order], theirs.sum(0))[order.argsort()]
    return all_to_all_single_autograd(done, sent, received, group)


def divide(experts: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Keep of experts stacked in dim 0 those of this rank of a mesh axis, as DTensors."""
    for name, parameter in [*experts.named_parameters()]:
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        shared = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        setattr(experts, name, shared)
    return [*experts.parameters()]


class MoEBlock(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.width), Attention(config)
        self.norm2, self.mixture = RMSNorm(config.width), Mixture(config)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), table)
        routed, balance = self.mixture(self.norm2(x))
        return x + routed, balance


class MoEGPT(GPT):
    """Tokens [B, T] of int64 to logits [B, T, vocab] or, given targets [B, T], to the mean loss; in
    training mode with the balance loss added.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, [MoEBlock(config) for _ in range(config.num_layers)])
        self.balance = config.balance / config.num_layers
        for name, parameter in self.named_parameters():
            if parameter.dim() == 3:
                residual = name.endswith("down")
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** (0.5 * residual))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, uneven = layer(x, self.table)
            balance = balance + uneven
        logits: Tensor = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + self.balance * balance if self.training else loss


def update_bias(model: GPT) -> None:
    """After a step: favour experts that got fewer tokens than others, on all ranks together."""
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        if mixture.group is not None:
            dist.all_reduce(mixture.counted, group=mixture.group)
        fewer = mixture.counted.mean() - mixture.counted
        mixture.bias += mixture.bias_rate * fewer.sign()
        mixture.counted.zero_()


def num_active(model: GPT) -> int:
    """Parameters that one token is computed with."""
    return sum(
        p.numel() * model.config.top // model.config.num_experts
        if isinstance(model.config, MoEConfig) and p.dim() == 3
        else p.numel()
        for p in model.parameters()
    )


def share_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Give each rank of a mesh axis its experts, as DTensors; returns what units are to ignore.

    Dynamo is told to take sizes that depend on data into its graphs.

    Raises:
        ValueError: the ranks cannot have as many experts each.
    """
    found: set[nn.Parameter] = set()
    for mixture in [m for m in model.modules() if isinstance(m, Mixture)]:
        if mixture.num_experts % mesh.size():
            raise ValueError(
                f"{mixture.num_experts} experts cannot be divided among {mesh.size()} ranks; "
                f"take a number of ranks that divides {mixture.num_experts}"
            )
        mixture.group = mesh.get_group()
        found.update(divide(mixture.experts, mesh))
    if found:
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return found
