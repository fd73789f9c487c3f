"""A plain training loop: clipping, a schedule, evaluation, and the whole model in one file.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F

from compiled_fsdp import explain, fully_shard  # torch.distributed.fsdp before

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
LENGTH, TEXT = 64, torch.tensor(list(Path(__file__).read_bytes()))  # it learns to write this file


class Model(nn.Module):
    def __init__(self, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        x = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    for block in model.blocks:
        fully_shard(block)
    compiled = torch.compile(fully_shard(model), backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        loss = compiled(*batch(2 * step + dist.get_rank()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        evaluated = compiled(*batch(-1))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        print(f"evaluated: loss {evaluated.item():.3f}\n{explain(model)}")
        torch.save(whole, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
