"""torchtitan's DeepSeek-V3 as it is, with its own dispatcher and its own calls of `fully_shard`:
unmodified but for the import.

`make test-clients` installs it and runs this; otherwise it is skipped and says so. torchtitan
imports triton without naming it among what it needs, so that is installed beside it;
nothing runs it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.graphs import captured
from kit.titan import built, on_cpu
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed import fsdp as stock

import compiled_fsdp
from compiled_fsdp import Plan, explain, set_plan
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import EXCHANGE, NOTE_COUNTS

if TYPE_CHECKING:
    from kit.pool import Pool

missing = [name for name in ("torchtitan", "triton") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"needs {', '.join(missing)}: run `make test-clients`"
)

VOCAB, STEPS = 2048, 4


def build(api: Any) -> Any:
    """A dense layer and one of 8 experts, 3 for each token, divided among two ranks, which also
    share all other parameters; without tensor types of torchtitan's own.
    """
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # flex attention of CPUs has no backward
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=2, expert_parallel_degree=2, spmd_backend="partial_dtensor"
    )
    model, _ = built(api, spec, parallelism, TrainingConfig())
    return model


def losses(model: Any, call: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return [step(model, call, optimizer, n) for n in range(STEPS)]


def step(model: Any, call: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(10 * number + rank)
    data = torch.randint(0, VOCAB, (2, 17), generator=generator)
    logits: Tensor = call(data[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), data[:, 1:].flatten())
    (loss / size).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train() -> None:
    with on_cpu():
        theirs = build(stock)
        wanted = losses(theirs, theirs)
        eager = build(compiled_fsdp)
        assert losses(eager, eager) == wanted
        set_plan(Plan(record_routing=True))
        model = build(compiled_fsdp)
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
        counters.clear()
        with captured() as graphs:
            found = losses(model, call)
        assert found == wanted
        assert counters["stats"]["unique_graphs"] == 1, counters  # as routing changes
        forward = graphs[0]
        assert len(find(forward, EXCHANGE)) == 3  # counts, tokens there, and back
        assert len(find(forward, NOTE_COUNTS)) == 1
        with torch.profiler.profile(record_shapes=True) as profile:
            step(model, call, torch.optim.SGD(model.parameters(), lr=0.05), STEPS)
        told = explain(call, profile=profile).step.routing
        assert told.startswith(f"1 dispatches, {2 * 16 * 3} rows from here to 8 experts"), told


def test_deepseek_v3(two: Pool) -> None:
    """Compiled as one graph, and eagerly, beside stock: losses bit for bit while routing changes;
    its counts are found.
    """
    two.run(train, timeout=600.0)
