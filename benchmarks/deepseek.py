"""DeepSeek-V3 in its shapes, in a page: attention through low ranks, a mixture of experts in all
but the first layers, as one grouped matmul; expert parallelism by all-to-alls (DeepSeek-AI, 2024).

Shapes in comments: N tokens of a rank, E experts of a rank, C width of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPTConfig, RMSNorm, SwiGLU, rotary_table, rotate
from moe import dispatched, divide
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class DeepSeekConfig(GPTConfig):
    """As for the GPT.

    num_dense: layers at the beginning without routed experts.
    query_rank, value_rank: of the low-rank projections; plain, rotated: parts of a head's width.
    """

    num_dense: int = 3
    query_rank: int = 1536
    value_rank: int = 512
    plain: int = 128
    rotated: int = 64
    num_experts: int = 256
    top: int = 8
    expert_hidden: int = 2048


def deepseek_v3(num_layers: int = 61, max_length: int = 4096) -> DeepSeekConfig:
    """671 B parameters at 61 layers; at least one layer has experts."""
    return DeepSeekConfig(
        num_layers,
        width=7168,
        num_heads=128,
        hidden=18432,
        max_length=max_length,
        vocab=129280,
        num_dense=min(3, num_layers - 1),
    )


def tiny_deepseek(num_layers: int = 4, max_length: int = 64, vocab: int = 512) -> DeepSeekConfig:
    """As small as it gets, with a layer of each kind."""
    return DeepSeekConfig(
        num_layers,
        width=64,
        num_heads=4,
        hidden=128,
        max_length=max_length,
        vocab=vocab,
        num_dense=1,
        query_rank=32,
        value_rank=32,
        plain=16,
        rotated=16,
        num_experts=16,
        top=2,
        expert_hidden=32,
    )


class LatentAttention(nn.Module):
    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.config = config
        heads, wide = config.num_heads, config.plain + config.rotated
        self.query_down = nn.Linear(config.width, config.query_rank, bias=False)
        self.query_norm = RMSNorm(config.query_rank)
        self.query_up = nn.Linear(config.query_rank, heads * wide, bias=False)
        self.down = nn.Linear(config.width, config.value_rank + config.rotated, bias=False)
        self.norm = RMSNorm(config.value_rank)
        self.up = nn.Linear(config.value_rank, heads * 2 * config.plain, bias=False)
        self.out = nn.Linear(heads * config.plain, config.width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        c, (batch, length, _) = self.config, x.shape
        query = self.query_up(self.query_norm(self.query_down(x)))
        query = query.view(batch, length, c.num_heads, -1).transpose(1, 2)
        latent, key = self.down(x).split([c.value_rank, c.rotated], dim=-1)
        both = self.up(self.norm(latent)).view(batch, length, c.num_heads, -1).transpose(1, 2)
        plain, value = both.split([c.plain, c.plain], dim=-1)
        turned = rotate(key[:, None], table).expand(-1, c.num_heads, -1, -1)
        query_plain, query_turned = query.split([c.plain, c.rotated], dim=-1)
        query = torch.cat([query_plain, rotate(query_turned, table)], -1)
        key = torch.cat([plain, turned], -1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return result


class Experts(nn.Module):
    """[E, C, F] twice and [E, F, C], each as a grouped matmul."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        wide = (config.num_experts, config.width, config.expert_hidden)
        self.gate, self.up = nn.Parameter(torch.empty(wide)), nn.Parameter(torch.empty(wide))
        self.down = nn.Parameter(torch.empty(wide[0], wide[2], wide[1]))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        gate, up, down = (
            p.to_local() if isinstance(p, DTensor) else p for p in (self.gate, self.up, self.down)
        )
        ends = counts.cumsum(0).to(torch.int32)
        hidden = F.silu(torch._grouped_mm(x, gate, ends)) * torch._grouped_mm(x, up, ends)
        done: Tensor = torch._grouped_mm(hidden, down, ends)
        return done


class Mixture(nn.Module):
    """Router, this rank's experts, and the one that every token goes to."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.num_experts, self.top = config.num_experts, config.top
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared = SwiGLU(
            GPTConfig(config.num_layers, config.width, config.num_heads, config.expert_hidden)
        )
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).float().sigmoid()
        chosen, ids = scores.topk(self.top, dim=-1)
        order = ids.flatten().argsort(stable=True)
        counts = torch.histc(
            ids.flatten().float(), bins=self.num_experts, min=0, max=self.num_experts
        ).long()
        assert self.group is not None, "share_experts comes first"
        done = dispatched(flat[order // self.top], counts, self.experts, self.group)
        done = done * (chosen / chosen.sum(-1, keepdim=True)).flatten()[order, None].to(done.dtype)
        routed = torch.zeros_like(flat).index_add(0, order // self.top, done)
        result: Tensor = routed.view_as(x) + self.shared(x)
        return result


class Block(nn.Module):
    def __init__(self, config: DeepSeekConfig, is_dense: bool) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.width), LatentAttention(config)
        self.norm2 = RMSNorm(config.width)
        self.feed_forward = SwiGLU(config) if is_dense else Mixture(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


class DeepSeek(nn.Module):
    """Tokens and targets [B, T] of int64 to the mean loss."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(
            Block(config, n < config.num_dense) for n in range(config.num_layers)
        )
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        table = rotary_table(config.max_length, config.rotated)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.loss(self.head(self.norm(x)), targets)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over all tokens."""
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def share_experts(model: DeepSeek, mesh: DeviceMesh) -> list[Experts]:
    """Give each rank of a mesh axis its experts, as DTensors; the modules that hold them."""
    mixtures = [m for m in model.modules() if isinstance(m, Mixture)]
    for mixture in mixtures:
        mixture.group = mesh.get_group()
        divide(mixture.experts, mesh)
    return [mixture.experts for mixture in mixtures]
