"""From nothing to the page that shows a step: trains a small model, and leaves `report.html` in the
folder in which it is started.

    torchrun --nproc-per-node 2 to_a_report.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from compiled_fsdp import dumped_to, explain, fully_shard
from compiled_fsdp.report import add_profile, write_report


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256) for _ in range(4)))
    for block in model:
        fully_shard(block)
    model = torch.compile(fully_shard(model), backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256)

    def step() -> float:
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text)

    with dumped_to("dump"):  # what is compiled in here
        say(f"loss {step():.4f}")
    for _ in range(options.steps):
        loss = step()
    say(f"loss {loss:.4f}")
    with torch.profiler.profile() as profile:
        step()
    add_profile("dump", profile, rank=dist.get_rank())
    dist.barrier()  # all ranks have written
    say(explain(model).summary())
    if dist.get_rank() == 0:
        write_report("dump", "report.html")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
