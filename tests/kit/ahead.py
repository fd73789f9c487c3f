"""Models that one process compiles ahead and others load, and the first of these: `python
tests/kit/ahead.py FOLDER CASE ...` compiles each case into a folder of its name, as one rank of a
world that is not there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from kit.pool import alone, use_scalar_kernels
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import compiled_fsdp
from compiled_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BATCH = 8, 4


OFFSETS = {"first": 0.5, "second": 0.25}
SHIFTS = {"only": 0.25}
FACTORS: dict[Any, float] = {1: 2.0}


@dataclass
class Gain:
    """An object that all blocks have."""

    of: float = 1.0


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Block(nn.Module):
    scale = 1.0

    def __init__(self, norm: type[nn.Module], gain: Gain) -> None:
        super().__init__()
        self.gain = gain
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH)
        self.norm, self.drop = norm(WIDTH + 1), nn.Dropout(0.1)
        self.without: set[Any] = {("a", "pair"), nn.Linear}

    def forward(self, x: Tensor, *, power: int = 1) -> Tensor:
        hidden = self.down(self.norm(self.up(x).relu() ** power))
        if "drop" not in self.without and nn.Conv1d not in self.without:
            hidden = self.drop(hidden)
        return x + self.scale * self.gain.of * doubled(hidden)


class Model(nn.Module):
    """Changes buffers, draws random numbers, and returns a dict with plain values in it.

    checkpoints: activation checkpointing of its blocks.
    """

    def __init__(
        self,
        *,
        checkpoints: bool = False,
        norm: type[nn.Module] = nn.BatchNorm1d,
        num_blocks: int = 2,
    ) -> None:
        super().__init__()
        gain = Gain()
        self.blocks = nn.ModuleList(Block(norm, gain) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 5)
        self.checkpoints, self.ends = checkpoints, torch.abs
        self.steps = {"up": 1.0, "down": -1.0}

    def forward(self, x: Tensor, *, power: int = 1) -> dict[str, Any]:
        for block in self.blocks:
            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, power=power)
        for step in self.steps.values():
            x = x + step
        for offset in OFFSETS.values():
            x = x + offset
        for name in SHIFTS:
            x = x - SHIFTS[name]
        x = x * FACTORS.get(("of", "all"), 1.0) * FACTORS.get(1, 1.0)
        loss = self.ends(self.head(x).square().mean())
        return {"loss": loss, "hidden": x, "power": power, "no": None}


class Tied(nn.Module):
    """The weight of the head is that of the embedding; a frozen layer; two outputs, of which the
    loss uses one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.other = nn.Linear(WIDTH, 12, bias=False), nn.Linear(WIDTH, 3)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.frozen(self.embed(x)).tanh()
        return self.head(hidden).float().square().mean(), self.other(hidden)


class Layer(nn.Module):
    """Hidden columns are cut over the mesh, the sequence between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Cut(nn.Module):
    """A vocabulary, of which each rank has a part, as it has of the sequence; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(12, WIDTH), Layer()
        self.head = nn.Linear(WIDTH, 12, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(x)
        hidden = hidden + self.layer(hidden)
        found = self.head(hidden)
        return found.square().mean(), found.argmax(-1)


def _cut(mesh: Any) -> Cut:
    return parallelize_module(
        Cut(),
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layer.norm": SequenceParallel(),
            "layer.up": ColwiseParallel(input_layouts=Shard(1)),
            "layer.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def _sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def plain() -> Any:
    return _sharded(Model())


def of_one_block() -> Any:
    return _sharded(Model(num_blocks=1))


def bfloat16() -> Any:
    """And activation checkpointing."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Model(checkpoints=True, norm=nn.LayerNorm)  # torch's BatchNorm mixes no dtypes
    return _sharded(model, mp_policy=policy)


def tied() -> Any:
    model = Tied()
    fully_shard(model.frozen)
    return fully_shard(model)


def fsdp1() -> Any:
    model = Model(num_blocks=1)
    how: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **how)
    return FullyShardedDataParallel(model, **how)


def hsdp() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _sharded(Model(), mesh=mesh)


def tensor_parallel(shard: Callable[..., Any] = fully_shard) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _cut(mesh["tp"])
    for unit in (model.layer, model):
        shard(unit, mesh=mesh["dp"])
    return model


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up.to_local()[0]  # type: ignore[attr-defined]  # one of the two is here


class Mixture(nn.Module):
    """The positive tokens, as many as there are, go to the first expert,
    the others to the second.
    """

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.expert = nn.LayerNorm(WIDTH), Expert()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_second = (x[:, 0] < 0).long()
        counts = torch.stack([1 - is_second, is_second], 1).sum(0)
        with torch.no_grad():
            theirs = wait_tensor(all_to_all_single(counts, None, None, self.group)).tolist()
        sent, order = counts.tolist(), is_second.argsort(stable=True)
        got = all_to_all_single_autograd(self.norm(x)[order], theirs, sent, self.group)
        back = all_to_all_single_autograd(self.expert(got), sent, theirs, self.group)
        hidden = x + back[order.argsort()]
        return hidden.square().mean(), hidden


def experts() -> Any:
    """Over a mesh of their own, as expert parallelism has them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = Mixture()
    model.group = mesh.get_group("ep")
    local = distribute_tensor(model.expert.up.data, mesh["ep"], [Shard(0)])
    model.expert.up = nn.Parameter(local)
    fully_shard(model.expert, mesh=mesh["efsdp"])
    return fully_shard(model, mesh=mesh._flatten("dp"))


def tensor_parallel_of_stock() -> Any:
    return tensor_parallel(stock_fully_shard)


@dataclass(frozen=True)
class Case:
    """A sharded model, and the arguments of a call; the same model by torch's FSDP, for some.

    same_data: how many ranks, one after the other, get the same.
    """

    build: Callable[[], Any]
    example: Callable[[], tuple[Any, ...]]
    world: int = 2
    backend: str = "compiled_fsdp_eager"
    bucket_bytes: int = 0  # as the pool's workers have it
    build_stock: Callable[[], Any] | None = None
    same_data: int = 1

    def model(self) -> Any:
        """The same on every rank."""
        torch.manual_seed(0)
        return self.build()

    def stock(self) -> Any:
        """By torch's FSDP, if it is to be compared."""
        torch.manual_seed(0)
        assert self.build_stock is not None
        return self.build_stock()


def _numbers() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, WIDTH),)


def _of_any_length() -> tuple[Tensor, ...]:
    """Another number of rows in each call, and on each rank."""
    x = torch.randn(int(torch.randint(2, 9, ())), WIDTH)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    return (x,)


def _sequence() -> tuple[Tensor, ...]:
    return (torch.randint(12, (2, BATCH)),)


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(12, (BATCH,)),)


CASES = {
    "plain": Case(plain, _numbers),
    "inductor": Case(of_one_block, _numbers, backend="compiled_fsdp"),
    "lengths": Case(of_one_block, _of_any_length),
    "bfloat16": Case(bfloat16, _numbers),
    "tied": Case(tied, _tokens),
    "fsdp1": Case(fsdp1, _numbers),
    "hsdp": Case(hsdp, _numbers, 4),
    "tensor_parallel": Case(
        tensor_parallel, _sequence, 4, build_stock=tensor_parallel_of_stock, same_data=2
    ),
    "experts": Case(experts, _numbers, 4),
    "other_plan": Case(plain, _numbers, bucket_bytes=1 << 20),
}


def precompile(folder: Path, *names: str) -> dict[str, str]:
    """Compile cases ahead in a process of its own; the SHA-256 of each."""
    found: dict[str, str] = alone(make, str(folder), *names)
    return found


def make(folder: str, *names: str) -> dict[str, str]:
    """Compile cases ahead, one after the other: units of the second have other numbers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    use_scalar_kernels()
    found = {}
    for name in names:
        case = CASES[name]
        if dist.is_initialized() and dist.get_world_size() != case.world:
            dist.destroy_process_group()
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
        target = compiled_fsdp.Target(backend=case.backend)
        with compiled_fsdp.planned(bucket_bytes=case.bucket_bytes):
            found[name] = compiled_fsdp.precompile(
                case.model(), case.example(), Path(folder) / name, target=target
            )
    return found


if __name__ == "__main__":
    from kit import ahead  # classes of this module, not of `__main__`

    print(ahead.make(*sys.argv[1:]))
