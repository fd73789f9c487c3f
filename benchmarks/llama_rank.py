"""A training script for `simulate`: Llama of 1.1 B parameters as `bench gpu` has it, on the meta
device until it is sharded.

    python -m compiled_fsdp simulate --world 64 --machine h100 --efficiency 0.7 \
        benchmarks/llama_rank.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import rotary_table
from gpu_rank import SIZES
from llama import Llama, LlamaConfig

from compiled_fsdp import MixedPrecisionPolicy, fully_shard

SIZE = SIZES["1b"]
assert isinstance(SIZE.config, LlamaConfig)
CONFIG: LlamaConfig = SIZE.config


def main() -> None:
    """Train, on tokens of no meaning."""
    dist.init_process_group()
    with torch.device("meta"):
        model = Llama(CONFIG)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, [model.norm, model.head], model):
        fully_shard(unit, mp_policy=policy)
    model.to_empty(device="cpu")
    model.get_buffer("table").copy_(
        rotary_table(CONFIG.max_length, CONFIG.width // CONFIG.num_heads)
    )
    call = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:  # until `simulate` has seen enough
        tokens = torch.randint(CONFIG.vocab, (SIZE.batch, SIZE.length))
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
