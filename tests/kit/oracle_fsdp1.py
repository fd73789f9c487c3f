"""Run the same observation on stock FSDP1 and on ours; as `kit.oracle` for `fully_shard`, whose
helpers these are.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from kit import oracle
from kit.compare import plain
from kit.oracle import grads, mesh_of, params, rows
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["grads", "mesh_of", "params", "rows"]

ALL_KINDS = oracle.KINDS
STRATEGIES = tuple(stock.ShardingStrategy)[:3]  # of one group


class Api(oracle.AnyApi):
    """`FullyShardedDataParallel`, as `FSDP`."""

    @property
    def FSDP(self) -> Any:
        """The class."""
        return self.package.FullyShardedDataParallel

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """An instance on the CPU, without the warnings that every NO_SHARD one gives."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.FSDP(module, **{"device_id": "cpu", **options})

    def blocks(self, module: nn.Module | None = None, **options: Any) -> Any:
        """The model of these tests, one instance a block, and one around."""
        return self.wrap(module or net(), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


class Block(nn.Module):
    """Odd sizes, so that shards begin inside rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width + 2)
        self.b = nn.Linear(width + 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def net(width: int = 5, seed: int = 7) -> nn.Sequential:
    """A layer, two blocks, a layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), Block(width), Block(width), nn.Linear(width, 2))


def hybrid_mesh() -> DeviceMesh:
    """Two replicas of two shards."""
    return mesh_of(2, 2, names=("replicate", "shard"))


def batch(step: int = 0, rows_: int = 4) -> Tensor:
    """Different on every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows_, 3, generator=generator)


def loss_of(call: Any, step: int = 0) -> Tensor:
    """Of one batch."""
    return call(batch(step)).float().square().mean()


def train_step(call: Any, step: int = 0) -> Tensor:
    """Forward and backward of one batch; the loss."""
    loss = loss_of(call, step)
    loss.backward()
    return loss.detach()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def full(api: Api, model: Any, **options: Any) -> dict[str, Any]:
    """Every parameter, whole."""
    with api.FSDP.summon_full_params(model, **options):
        return plain(params(model))


def outcome(run: Callable[[], Any]) -> Any:
    """What `run` returns, or the type and the text of what it raises."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return plain(run())
        except Exception as error:  # noqa: BLE001
            return [type(error).__name__, str(error).splitlines()[:1]]


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """The categories and beginnings of the warnings given inside, apart from what torch says of
    itself.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as entries:
        warnings.simplefilter("always")
        yield found
    own = [
        e
        for e in entries
        if not str(e.message).startswith(("compiled_fsdp:", "Dynamo", "torch.jit"))
    ]
    found += [f"{e.category.__name__}: {str(e.message)[:50]}" for e in own]


def same(observe: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Worker function: as `kit.oracle.same`, of FSDP1; so the following."""
    oracle.same(observe, *args, of=Api, **options)


def eager_same(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function."""
    oracle.eager_same(observe, *args, of=Api)


def close(observe: Callable[..., Any], *args: Any) -> None:
    """Worker function."""
    oracle.close(observe, *args, of=Api)


def each(observe: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Worker function."""
    oracle.each(observe, *args, of=Api, **options)
