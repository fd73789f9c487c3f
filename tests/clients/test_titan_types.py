"""torchtitan's DeepSeek-V3 as it is by default, with parameters typed by `spmd_types`: four ranks,
tensor, expert and data parallelism, unmodified but for the import.

What the CPU has not is put in its place: the backward of flex attention, and all-to-alls of lists
of unequal tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.compare import check_equal, plain
from kit.titan import built, on_cpu
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed import fsdp as stock
from torch.distributed.fsdp._fully_shard import _fsdp_param

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.pool import Pool

missing = [name for name in ("torchtitan", "triton") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"needs {', '.join(missing)}: run `make test-clients`"
)

HAS_STOCK = hasattr(_fsdp_param.FSDPParam, "_restore_spmd_types")
VOCAB, TOKENS, STEPS, PARALLEL = 2048, 16, 3, 2


def causal(self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:
    """A method in the place of flex attention with a causal mask; torchtitan reads these names."""
    query, key, value = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    scale = options.get("scale")
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return found.transpose(1, 2)


class Lists:
    """`torch.distributed`, whose all-to-all of lists takes unequal ones on gloo."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all(self, out: list[Tensor], given: list[Tensor], group: Any = None) -> None:
        sizes = [[each.numel() for each in every] for every in (out, given)]
        got = given[0].new_empty(sum(sizes[0]))
        sent = torch.cat([each.reshape(-1) for each in given])
        dist.all_to_all_single(got, sent, *sizes, group=group)
        for each, part in zip(out, got.split(sizes[0]), strict=True):
            each.copy_(part.view_as(each))


def learn(api: Any, backend: str = "", *, is_checked: bool = False) -> Any:
    """Losses of some steps in bf16, torchtitan's default, and the parameters behind them."""
    from spmd_types import no_typecheck
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.deepseek_v3 import model_registry

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=2,
        tensor_parallel_degree=PARALLEL,
        expert_parallel_degree=2,
        spmd_backend="spmd_types",
    )
    model, dims = built(api, model_registry("debugmodel"), parallelism, TrainingConfig())
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    context = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=is_checked)
    replicas = dist.get_world_size() // PARALLEL
    found = []
    for step in range(STEPS):
        seed = 10 * step + dist.get_rank() // PARALLEL
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=generator)
        given = {"positions": torch.arange(TOKENS)[None]}
        tokens, targets, given = annotate_input_spmd_types(
            dims, data[:, :-1].contiguous(), data[:, 1:].contiguous(), given
        )
        with context():
            logits = call(tokens, **given)
            loss = cross_entropy_loss(logits, targets, global_vocab_size=VOCAB)
            with no_typecheck():
                (loss / TOKENS / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found, [p.full_tensor().detach().clone() for p in model.parameters()]


@contextmanager
def for_gloo() -> Iterator[None]:
    from spmd_types import _dist
    from torchtitan.models.common.attention import FlexAttention

    attention = mock.patch.object(FlexAttention, "forward", causal)
    # Stock tells meshes apart by their groups, which the kit shares.
    groups = mock.patch.object(device_mesh, "new_group", dist.new_group)
    with attention, groups, mock.patch.object(_dist, "dist", Lists()):
        yield


def train() -> None:
    with on_cpu(), for_gloo():
        eager = plain(learn(compiled_fsdp))
        if HAS_STOCK:
            check_equal(eager, plain(learn(stock)), "eager, beside stock")
        check_equal(plain(learn(compiled_fsdp, is_checked=True)), eager, "with types checked")
        graph = plain(learn(compiled_fsdp, "compiled_fsdp_eager"))
        check_equal(graph, eager, "one graph, beside eager")


def test_deepseek_v3_with_types(four: Pool) -> None:
    """Losses and parameters, bit for bit."""
    four.run(train, timeout=600.0)
