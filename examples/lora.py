"""LoRA by PEFT: frozen weights sharded, adapters trained, merged and saved as a plain model.

torchrun --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_fsdp import fully_shard  # torch.distributed.fsdp before

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
LENGTH = 64
TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # what the model learns to write


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank; yours come from_pretrained
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=2, use_cache=False, **sizes)
    return LlamaForCausalLM(config).to(DEVICE)


def with_adapters() -> torch.nn.Module:
    return get_peft_model(build(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def batch(seed: int) -> Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([TEXT[start : start + LENGTH] for start in starts.tolist()]).to(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", default="merged")
    args = parser.parse_args()
    dist.init_process_group()
    model = with_adapters()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    compiled = torch.compile(fully_shard(model), backend=args.backend)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(args.steps):
        tokens = batch(2 * step + dist.get_rank())
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        plain = with_adapters()
        set_peft_model_state_dict(plain, get_peft_model_state_dict(plain, state_dict=whole))
        merged = plain.merge_and_unload()
        merged.save_pretrained(args.out)
        tokens = batch(-1)
        print(f"merged: loss {merged(input_ids=tokens, labels=tokens).loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
