"""Graphs are free of ranks: every rank compiles the same, whatever the mesh; so what one has
compiled serves the others.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import compiled_fsdp
from compiled_fsdp import FullyShardedDataParallel, fully_shard
from compiled_fsdp.inspection.dump_folder import read, read_folder
from compiled_fsdp.torch_private.groups import common_name, group_named, name_axes, name_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.pool import Pool

    from compiled_fsdp.inspection.dump_folder import DumpedRank

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def one_axis(model: Any) -> None:
    """Five rows over four ranks: one has none."""
    model.append(nn.Linear(WIDTH, 5))
    for module in (*model, model):
        fully_shard(module)


def int_reshard(model: Any) -> None:
    """A slice of three rows, or two, is kept on each rank."""
    model.append(nn.Linear(WIDTH, 5))
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=2)


def tensor_parallel(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def experts(model: Any) -> None:
    """Some parameters over a mesh of their own, as expert parallelism has them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    for block in model:
        fully_shard(block.up, mesh=mesh["efsdp"])
    one_axis(model)


def hsdp(model: Any) -> None:
    """And reductions over groups of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
        module.set_separate_reduce_scatter_group(enable=True)


def wrapper(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    how = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    how |= {"device_id": torch.device("cpu"), "use_orig_params": True}
    for number, block in enumerate(model):
        model[number] = FullyShardedDataParallel(block, **how)


CASES: dict[str, Callable[[Any], None]] = {
    "one axis, uneven": one_axis,
    "HSDP, reductions apart": hsdp,
    "int reshard, uneven": int_reshard,
    "tensor parallel": tensor_parallel,
    "a mesh of experts, uneven": experts,
    "FSDP1, HSDP": wrapper,
}


def compile_all(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    CASES[name](model)
    x = torch.ones(2, WIDTH, requires_grad=True)
    with compiled_fsdp.dumped_to(folder):
        torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(x).sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_same_graphs(four: Pool, name: str, tmp_path: Path) -> None:
    four.run(compile_all, name, tmp_path)
    first, *others = map(graphs_of, read_folder(tmp_path))
    assert len(first) > 30
    assert len(others) == 3
    for found in others:
        assert found.keys() == first.keys()
        for graph, text in found.items():
            assert text == first[graph], graph


def graphs_of(rank: DumpedRank) -> dict[str, str]:
    """The graphs of a rank: the joint one as it is split, and both halves after each pass."""
    found: dict[str, str] = {}
    for graph in rank.graphs:
        for dumped in graph.passes if graph.is_half else [graph.after("name_groups")]:
            found[f"{graph.kind}/{dumped.name}"] = dumped.text + read(dumped.json_path)
    return found


def test_names_of_groups(four: Pool) -> None:
    four.run(name_them)


def name_them() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    name_axes(mesh)
    replicate, shard = (group.group_name for group in mesh.get_all_groups())
    assert re.fullmatch(r"\w+_2of4_\w{8}", common_name(shard))
    assert re.fullmatch(r"\w+_2of4_\w{8}", common_name(replicate))
    assert group_named(common_name(shard)) is group_named(shard)
    name_axes(mesh)
    ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
    other = dist.new_group(ranks, use_local_synchronization=True)
    name_group(other, common_name(shard))
    assert common_name(other.group_name) == f"{common_name(shard)}_2"
    assert group_named(common_name(other.group_name)) is other
    whole = dist.group.WORLD.group_name
    assert common_name(whole) == whole, "it has one name already"
    assert common_name("nobody") == "nobody"
