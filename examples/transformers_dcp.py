"""A model of transformers: evaluation, checkpoints by torch.distributed.checkpoint, going on later.

torchrun --nproc-per-node 2 examples/transformers_dcp.py    # again: goes on from the checkpoint
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_fsdp import fully_shard  # torch.distributed.fsdp before

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
LENGTH = 64
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # what the model learns to write
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


def batch(seed: int) -> Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([TEXT[start : start + LENGTH] for start in starts.tolist()]).to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--folder", default="checkpoint")
    args = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer)
    compiled = torch.compile(fully_shard(model), backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if Path(args.folder).exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=args.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = int(state["step"])
    for step in range(first, first + args.steps):
        tokens = batch(2 * step + dist.get_rank())
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            model.eval()
            with torch.no_grad():
                evaluated = compiled(input_ids=batch(-1), labels=batch(-1)).loss
            model.train()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: {loss.item():.3f}, evaluated: {evaluated.item():.3f}")
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(first + args.steps)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(args.folder, overwrite=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
