"""Accelerate as it is: `replace_stock` puts ours where it imports torch's `fully_shard`.

torchrun --nproc-per-node 2 examples/accelerate_loop.py

On a CPU Accelerate itself takes DDP; `as_on_an_accelerator` shows it an FSDP2 run there too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_fsdp import explain, replace_stock

LENGTH = 64
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # what the model learns to write


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config)


def rows(count: int) -> list[Tensor]:
    starts = torch.randint(len(TEXT) - LENGTH, (count,), generator=torch.Generator().manual_seed(0))
    return [TEXT[start : start + LENGTH] for start in starts.tolist()]


def as_on_an_accelerator(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    replace_stock()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.accelerator.is_available())
    as_on_an_accelerator(accelerator, plugin)
    model = torch.compile(build(), backend=args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(rows(16 * args.steps), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, tokens in enumerate(loader):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.print(explain(model))
    accelerator.end_training()


if __name__ == "__main__":
    main()
