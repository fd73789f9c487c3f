"""A byte-level GPT in one page: RMSNorm, rotary attention, SwiGLU, and an untied output head.

The model knows nothing about sharding, so that the same class is trained unsharded, with stock
`fully_shard`, and with `compiled_fsdp.fully_shard`. Shapes in comments: B batch, T sequence,
H heads, D width of a head, C width of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a `GPT`; `hidden` is the width inside the feed-forward part."""

    num_layers: int
    width: int
    num_heads: int
    hidden: int
    max_length: int = 256
    vocab: int = 256


SIZES: dict[str, GPTConfig] = {
    "tiny": GPTConfig(num_layers=2, width=64, num_heads=2, hidden=192),
    "10m": GPTConfig(num_layers=6, width=384, num_heads=6, hidden=1024),
    "30m": GPTConfig(num_layers=9, width=512, num_heads=8, hidden=1408),
    "100m": GPTConfig(num_layers=12, width=832, num_heads=13, hidden=2304),
}


class RMSNorm(nn.Module):
    """Scale by the root mean square, computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotary_table(length: int, head_width: int) -> Tensor:
    """Cosines and sines of shape [2, length, head_width / 2] in fp32 (Su et al., 2021)."""
    frequency = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply rotary positions to x [B, H, T, D]."""
    cos, sin = table[:, : x.shape[2]].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotate(qkv[0], table), rotate(qkv[1], table)
        y = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer, 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.width), Attention(config)
        self.norm2, self.feed_forward = RMSNorm(config.width), SwiGLU(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        x = x + self.feed_forward(self.norm2(x))
        return x


class GPT(nn.Module):
    """Tokens [B, T] of int64 to logits [B, T, vocab] or, given targets [B, T], to the mean loss.

    The loss is in nats per byte.
    """

    def __init__(self, config: GPTConfig, blocks: Sequence[nn.Module] | None = None) -> None:
        """Make it of other blocks, if they are given."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        if blocks is None:
            blocks = [Block(config) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        table = rotary_table(config.max_length, config.width // config.num_heads)
        self.register_buffer("table", table, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** (0.5 * residual))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        logits: Tensor = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
