"""Llama 3 in the shape of its largest release, in half a page: grouped queries, separate
projections, from the GPT's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from gpt import GPTConfig, RMSNorm, SwiGLU, rotary_table, rotate
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaConfig(GPTConfig):
    """As for the GPT; several query heads share one of `num_kv_heads`."""

    num_kv_heads: int = 8


def llama_405b(num_layers: int = 126, max_length: int = 8192) -> LlamaConfig:
    """405 B parameters at 126 layers (Grattafiori et al., 2024)."""
    return LlamaConfig(
        num_layers, width=16384, num_heads=128, hidden=53248, max_length=max_length, vocab=128256
    )


class GroupedAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        kv_width = config.num_kv_heads * self.head_width
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            rotate(query, table), rotate(key, table), value, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(config.width), GroupedAttention(config)
        self.norm2, self.feed_forward = RMSNorm(config.width), SwiGLU(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), table)
        x = x + self.feed_forward(self.norm2(x))
        return x


class Llama(nn.Module):
    """Tokens and targets [B, T] of int64 to the mean loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        table = rotary_table(config.max_length, config.width // config.num_heads)
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
