"""Graphs of models as wide as the world, or a row more or less, in worlds of 2 to 64 ranks: what
passes make of them means what was captured, whatever the plan says.

Models and plans are drawn at random, and ways to train them: loops, whole steps, overlap, FSDP1.
To try more of them:

    PYTHONPATH=tests:benchmarks python tests/verification/test_many_worlds.py FIRST COUNT
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.passes_harness import fake_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from compiled_fsdp import (
    FullyShardedDataParallel,
    Plan,
    compile_step,
    fully_shard,
    overlap_optimizer,
    planned,
)

# 16, 43 and 49 have, beside codes, a parameter of as many rows as ranks: views of it were dropped.
SEEDS = (*range(8), 16, 43, 49)
WAYS = ("clip", "scaler", "overlap", "in_backward", "two", "dynamic", "fsdp1", "fsdp1_flat")
BACKEND = "compiled_fsdp_eager"


class Layer(nn.Module):
    """Two products, one of them through as many features as there are ranks, or nearly; with or
    without biases, a norm, a scale.
    """

    def __init__(self, draw: random.Random, world: int, width: int) -> None:
        super().__init__()
        near = [1, 2, 3, 5, world - 1, world, world + 1, 2 * world, 2 * world + 3]
        features, has_biases = draw.choice(near), draw.random() < 0.5
        self.up = nn.Linear(width, features, bias=has_biases)
        self.down = nn.Linear(features, width, bias=draw.random() < 0.5)
        self.norm = nn.LayerNorm(width) if draw.random() < 0.5 else nn.Identity()
        self.scale = nn.Parameter(torch.ones(width)) if draw.random() < 0.3 else None
        self.down.weight.requires_grad_(draw.random() < 0.85)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return x if self.scale is None else x * self.scale


class Model(nn.Module):
    """A table, layers, and a head."""

    def __init__(self, draw: random.Random, world: int) -> None:
        super().__init__()
        width = draw.choice([1, 4, world, world + 1, 2 * world, 16, 64, 64])
        rows = draw.choice([world, world + 1, 2 * world, 10, 8 * world, 16 * world])
        self.table = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(Layer(draw, world, width) for _ in range(draw.randint(1, 3)))
        self.head = nn.Linear(width, draw.choice([world, 3, 2 * world]), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()  # type: ignore[no-any-return]


def plan_of(draw: random.Random) -> dict[str, Any]:
    """Fields of a plan, most of them at their defaults."""
    codes = [None, None, torch.int8, torch.float8_e4m3fn]
    fields: dict[str, Any] = {
        "gather_quantized": draw.choice(codes),
        "reduce_quantized": draw.choice(codes),
    }
    if draw.random() < 0.25:
        fields["check"] = "checksums"
    is_exchanged = fields["reduce_quantized"] or "check" in fields
    rare: dict[str, list[Any]] = {
        "bucket_bytes": [0, 100, 10**7],
        "own_message": [0, 100, 10**6],
        "copy_out": ["copy", "strided"],
        "split_bytes": [100, 1000],
        "reductions": ["all_to_all"] if is_exchanged else ["reduce_scatter", "all_to_all"],
        "memory_budget": [0.0, 0.5, 1.0],
    }
    return fields | {name: draw.choice(of) for name, of in rare.items() if draw.random() < 0.25}


def way_of(draw: random.Random, world: int) -> dict[str, Any]:
    """Arguments of `fully_shard`."""
    policy = MixedPrecisionPolicy(
        param_dtype=draw.choice([None, torch.bfloat16]),
        reduce_dtype=draw.choice([None, torch.float32, torch.bfloat16]),
    )
    way: dict[str, Any] = {"mp_policy": policy}
    if world in (4, 6, 8, 64) and draw.random() < 0.3:
        way["mesh"] = init_device_mesh(
            "cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")
        )
    size = way["mesh"].size(1) if "mesh" in way else world
    if draw.random() < 0.2:

        def place(param: nn.Parameter) -> Shard | None:
            return Shard(1) if param.ndim > 1 and param.shape[1] % size == 0 else None

        way["shard_placement_fn"] = place
    return way


def keep_otherwise(draw: random.Random, model: nn.Module) -> type[torch.optim.Optimizer]:
    """Of every third model, keep some or all gradients in another dtype; returns what steps it."""
    if draw.random() >= 1 / 3:
        return torch.optim.AdamW
    share, dtype = draw.choice([0.5, 1.0]), draw.choice([torch.float64, torch.bfloat16])
    for parameter in model.parameters():
        if draw.random() < share:
            parameter.grad_dtype = dtype
    return torch.optim.SGD  # torch's AdamW takes gradients of the parameter's dtype alone


def trained(seed: int) -> None:
    """Compile two steps of a drawn model; the verifier looks at each graph."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4, 6, 7, 8, 64])
    plan = plan_of(draw)
    with fake_ranks(world), planned(**plan):
        torch.manual_seed(seed)
        model = Model(draw, world)
        optimizer_of = keep_otherwise(random.Random(seed), model)
        ids = torch.arange(6) % min(10, model.table.num_embeddings)
        way, reshard = way_of(draw, world), draw.choice([None, True, False])
        shard(draw, model, reshard_after_forward=reshard, **way)
        if draw.random() < 0.3 and "check" not in plan:
            optimizer, count = optimizer_of(model.parameters(), lr=1e-3), draw.choice([1, 2])
            step = compile_step(model, optimizer, loss_of, backend=BACKEND, accumulate=count)
            other = ids if draw.random() < 0.5 else ids.clone()  # the same tensors, or others
            for _ in range(2):
                step(ids) if count == 1 else step([(ids,), (other,)])
            return
        call = torch.compile(model, fullgraph=True, backend=BACKEND)
        for _ in range(2):
            call(ids).backward()


def shard(draw: random.Random, model: Model, **options: Any) -> None:
    """As one unit, or several; the outermost is resharded as ever."""
    units: list[list[nn.Module]] = [[], [*model.layers], [model.table, *model.layers, model.head]]
    for unit in draw.choice(units):
        fully_shard(unit, **options)
    del options["reshard_after_forward"]
    fully_shard(model, **options)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids)
    return loss


def trained_in(way: str, seed: int) -> None:
    """The same for one of `WAYS`."""
    draw = random.Random(f"{way} {seed}")
    world, plan = draw.choice([2, 3, 4, 6, 7, 8, 64]), plan_of(draw)
    if draw.random() < 0.3:
        plan |= {"memory_budget": draw.choice([0.0, 0.5]), "recompute": "budget"}
    if way not in ("two", "dynamic"):  # whose sums are compared at places of their own
        plan.pop("check", None)
    with fake_ranks(world), planned(**plan):
        torch.manual_seed(seed)
        model = Model(draw, world)
        ids = torch.arange(6) % min(10, model.table.num_embeddings)
        if way.startswith("fsdp1"):
            wrapped = wrapped_of(draw, model, use_orig_params=way == "fsdp1")
            call = torch.compile(wrapped, fullgraph=True, backend=BACKEND)
            for _ in range(2):
                call(ids).backward()
            return
        shard(draw, model, reshard_after_forward=draw.choice([None, True]), **way_of(draw, world))
        trains = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trains)
        if way in ("clip", "scaler"):
            more = {"clip": 1.0} if way == "clip" else {"scaler": torch.amp.GradScaler("cpu")}
            step = compile_step(model, optimizer, loss_of, backend=BACKEND, **more)  # type: ignore[arg-type]
            for _ in range(2):
                step(ids)
            return
        if way in ("overlap", "in_backward"):
            overlap_optimizer(model, optimizer, in_backward=way == "in_backward")
        call = torch.compile(
            model, fullgraph=True, backend=BACKEND, dynamic=True if way == "dynamic" else None
        )
        for count in (6, 4, 5) if way == "dynamic" else (6, 6, 6):
            loss = call(ids[:count])
            (loss + call(ids[:4]) if way == "two" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def wrapped_of(draw: random.Random, model: Model, *, use_orig_params: bool) -> nn.Module:
    """As one instance of FSDP1, or one for each layer too; nothing is frozen."""
    model.requires_grad_(requires_grad=True)
    reduced = draw.choice([None, torch.float32])
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    options: dict[str, Any] = {
        "device_id": torch.device("cpu"),
        "mixed_precision": draw.choice([None, low]),
        "use_orig_params": use_orig_params,
    }
    if draw.random() < 0.6:
        for i, layer in enumerate(model.layers):
            model.layers[i] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_means_what_was_captured(seed: int) -> None:
    trained(seed)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_train(way: str) -> None:
    trained_in(way, 0)


def test_a_model_of_before_its_groups_are_gone() -> None:
    """A plan with codes reaches all units that there are, but those of before the process group was
    made anew, as in a notebook; torch gives new groups the names of old ones, one after the other.
    """
    before = planned_now()
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
        model = fully_shard(nn.Linear(64, 64), mesh=mesh, reshard_after_forward=2)
        model(torch.ones(2, 64)).sum().backward()
    with fake_ranks(2):
        for _ in range(8):
            with planned(gather_quantized=torch.int8):
                dist.new_group([0, 1])
    assert planned_now() == before


def planned_now() -> Plan:
    with planned() as plan:
        return plan


def test_a_plan_that_cannot_be_followed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_fsdp.planning import plan as module

    def refuse() -> None:
        raise RuntimeError("no")

    before = planned_now()
    monkeypatch.setattr(module, "_followers", [refuse])
    with pytest.raises(RuntimeError, match="no"), planned(gather_quantized=torch.int8):
        pytest.fail("it was refused")
    with pytest.raises(RuntimeError, match="no"):
        module.set_plan(Plan(gather_quantized=torch.int8))
    assert planned_now() == before


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for number in range(first, first + count):
        for kind in ("", *WAYS):
            try:
                trained_in(kind, number) if kind else trained(number)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is to be looked at
                print(number, kind, type(error).__name__, str(error)[:400])
