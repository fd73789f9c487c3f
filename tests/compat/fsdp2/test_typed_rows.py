"""Chapter 17, parameters typed by the package `spmd_types`, as torchtitan has them. Stock has them
since torch 2.14; on older ones the unsharded model is what ours is compared with.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.compare import CLOSE, check_equal, plain
from kit.oracle import (
    Api,
    each,
    eager_same,
    grads,
    mesh_of,
    message,
    ours_alike,
    params,
    raised,
    rows,
    same,
)
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed import fsdp as stock
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool
    from torch.distributed.device_mesh import DeviceMesh

spmd: Any = import_module("spmd_types") if find_spec("spmd_types") else None
pytestmark = [
    pytest.mark.skipif(spmd is None, reason="needs spmd_types"),
    pytest.mark.skipif(
        not hasattr(stock, "DataParallelMeshDims"), reason="dp_mesh_dims came with torch 2.13"
    ),
]

HAS_STOCK = hasattr(_fsdp_param.FSDPParam, "_restore_spmd_types")
WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 12, 4, 4


def alike(observe: Callable[..., Any], *args: Any) -> None:
    (same if HAS_STOCK else ours_alike)(observe, *args)


def eager_alike(observe: Callable[..., Any], *args: Any) -> None:
    if HAS_STOCK:
        eager_same(observe, *args)
    else:
        each(observe, *args, kinds=("eager",))


class Block(nn.Module):
    """Tokens [B, T, C]; over a tensor-parallel group [B, T / n, C], as Megatron's sequences are
    cut. A parameter of each type: R (norm, bias), S (up, down, experts), I (gain).
    """

    seen: dict[str, str]

    def __init__(self, *, has_experts: bool = False) -> None:
        super().__init__()
        self.norm, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(_small(WIDTH))
        self.up = nn.Parameter(_small(HIDDEN, WIDTH))
        self.down = nn.Parameter(_small(WIDTH, HIDDEN))
        self.gain = nn.Parameter(_small(WIDTH))
        self.experts = nn.Parameter(_small(EXPERTS, WIDTH, WIDTH)) if has_experts else None
        self.group: dist.ProcessGroup | None = None
        self.note = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (WIDTH,)) * self.norm
        gain = self.gain
        if self.group is not None:
            how: Any = {"backward_options": {"op_dtype": torch.float32}}
            h = spmd.all_gather(h, self.group, src=spmd.S(1), dst=spmd.R, **how)
            gain = spmd.convert(gain, self.group, src=spmd.I, dst=spmd.R, **how)
        y = F.linear(F.gelu(F.linear(h, self.up)), self.down)
        if self.experts is not None:
            y = y + torch.einsum("btc,ecd->btd", h, self.experts)
        if self.group is not None:
            y = spmd.reduce_scatter(y, self.group, dst=spmd.S(1), op_dtype=torch.float32)
        if self.note:
            self.seen = {name: str(spmd.get_local_type(p)) for name, p in self._parameters.items()}
        return x * (1 + gain) + y + self.bias


def _small(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.2


def typed(
    block: Block,
    mesh: DeviceMesh,
    sparse: DeviceMesh | None = None,
    *,
    with_dp: bool = True,
) -> None:
    """Keep this rank's part of each parameter, and note its types.

    sparse: the mesh of the experts.
    """
    block.group, rank, size = mesh.get_group("tp"), mesh.get_local_rank("tp"), mesh["tp"].size()
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    dp = dict.fromkeys(names, spmd.R) if with_dp else {}
    kinds = {
        "norm": spmd.R,
        "bias": spmd.R,
        "up": spmd.S(0),
        "down": spmd.S(1),
        "gain": spmd.I,
    }
    for name, kind in kinds.items():
        cut = kind.dim if hasattr(kind, "dim") else None
        _part(block, name, rank, size, cut)
        with spmd.set_current_mesh(mesh):
            spmd.assert_type(getattr(block, name), {**dp, "tp": kind})
    if sparse is not None:
        _part(block, "experts", sparse.get_local_rank("ep"), sparse["ep"].size(), 0)
        with spmd.set_current_mesh(sparse):
            spmd.assert_type(block.experts, {"efsdp": spmd.R, "ep": spmd.S(0)})


def _part(block: Block, name: str, rank: int, size: int, dim: int | None) -> None:
    if dim is not None:
        parts = getattr(block, name).detach().chunk(size, dim)
        setattr(block, name, nn.Parameter(parts[rank].clone()))


def dims(*shard: str, replicate: str | None = None) -> Any:
    make: Any = stock.DataParallelMeshDims
    return make(shard=shard if len(shard) > 1 else shard[0], replicate=replicate)


def two_blocks(*, has_experts: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Block(has_experts=has_experts), Block(has_experts=has_experts))


def sequences(step: int, replicas: int) -> Tensor:
    """Of all data-parallel ranks [replicas, B, T, C]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(replicas, 2, TOKENS, WIDTH, generator=generator)


def learn(
    model: nn.Module, call: Any, mesh: DeviceMesh, *, checked: bool = False, steps: int = 2
) -> Any:
    """Losses, gradients and parameters of some steps; `foreach` refuses parameters on several
    meshes.

    checked: types are checked meanwhile.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    size, replicas = mesh["tp"].size(), mesh.size() // mesh["tp"].size()
    found = []
    for step in range(steps):
        x = sequences(step, replicas)[dist.get_rank() // size]
        x = x.chunk(size, 1)[mesh.get_local_rank("tp")].contiguous()
        with ExitStack() as inside:
            if checked:
                inside.enter_context(spmd.set_current_mesh(mesh))
                inside.enter_context(_typecheck())
                spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.S(1)})
            loss = call(x).square().mean() / size
            if checked:
                for axis in ("dp", "tp"):
                    group = mesh.get_group(axis)
                    loss = spmd.reinterpret(loss, group, src=spmd.V, dst=spmd.P)
            loss.backward()
        optimizer.step()
        found.append(plain((loss, grads(model), params(model))))
        optimizer.zero_grad()
    return found


def _typecheck() -> Any:
    from spmd_types.checker import typecheck

    return typecheck(local=True)


@rows("17.12")
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
def test_typed_parameters(four: Pool, shape: tuple[int, ...]) -> None:
    four.run(alike, typed_parameters, shape)
    four.run(as_unsharded, shape)


def mesh_and_dims(shape: tuple[int, ...]) -> tuple[DeviceMesh, Any]:
    if len(shape) == 2:
        return mesh_of(*shape, names=("dp", "tp")), dims("dp")
    return mesh_of(*shape, names=("replicas", "dp", "tp")), dims("dp", replicate="replicas")


@rows("17.12")
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_typed_parameters_in_bf16(four: Pool, reduce_dtype: torch.dtype | None) -> None:
    """As torchtitan trains: since torch 2.15 summands on "tp" are added up in fp32, too."""
    four.run(alike, typed_parameters, (2, 2), MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))


def units(
    api: Api, shape: tuple[int, ...], policy: MixedPrecisionPolicy | None = None
) -> tuple[nn.Sequential, DeviceMesh]:
    mesh, parallel = mesh_and_dims(shape)
    model = two_blocks()
    for block in model:
        typed(block, mesh)  # type: ignore[arg-type]
        options = {"mp_policy": policy} if policy else {}
        api.fully_shard(block, mesh=mesh, dp_mesh_dims=parallel, **options)
    return model, mesh


def typed_parameters(
    api: Api, shape: tuple[int, ...], policy: MixedPrecisionPolicy | None = None
) -> Any:
    model, mesh = units(api, shape, policy)
    places = [(str(p.placements), p.device_mesh.mesh_dim_names) for p in model.parameters()]
    found = learn(model, api.compile(model), mesh)
    model[0].unshard()
    return places, found, plain([*model[0].parameters()])


def as_unsharded(shape: tuple[int, ...]) -> None:
    """Sums over ranks in another order: a few units in the last place."""
    model, mesh = units(Api("eager"), shape)
    learn(model, model, mesh)
    whole = two_blocks()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(2):
        for x in sequences(step, replicas := dist.get_world_size() // shape[-1]):
            (whole(x).square().mean() / replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    for i, (ours, expected) in enumerate(pairs):
        check_equal(ours.full_tensor().detach(), expected.detach(), f"parameter {i}", *CLOSE)


@rows("17.12")
def test_types_are_checked(four: Pool) -> None:
    """In the forward each parameter has its types, what is not said of an axis that is
    data-parallel included; outside of it ours does not disturb who checks.
    """
    four.run(eager_alike, types_are_checked)


def types_are_checked(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model, found = two_blocks(), []
    with spmd.set_current_mesh(mesh):
        for block in model:
            typed(block, mesh, with_dp=False)  # type: ignore[arg-type]
            api.fully_shard(block, mesh=mesh, dp_mesh_dims=dims("dp"))
            block.note = True  # type: ignore[assignment]
    found.append(learn(model, model, mesh, checked=True))
    seen: Any = [block.seen for block in model]
    assert all(len(kinds.split(",")) == 2 for of in seen for kinds in of.values()), seen
    wrong = two_blocks()
    for block in wrong:
        typed(block, mesh)  # type: ignore[arg-type]
        api.fully_shard(block, mesh=mesh, dp_mesh_dims=dims("dp"))
        # Nothing is gathered then: shapes fit, types do not.
        block.group = None  # type: ignore[assignment]
    return found, seen, raised(lambda: learn(wrong, wrong, mesh, checked=True))


@rows("17.12")
def test_where_checking_is_on_and_off(four: Pool) -> None:
    """Parameters are cut where types are checked; in a forward where that is paused, nothing is
    noted on them.
    """
    four.run(eager_alike, where_checking_is_on_and_off)


def where_checking_is_on_and_off(api: Api) -> Any:
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model = two_blocks()
    for block in model:
        typed(block, mesh)  # type: ignore[arg-type]
        block.note = True  # type: ignore[assignment]
    with _typecheck():
        for block in model:
            api.fully_shard(block, mesh=mesh, dp_mesh_dims=dims("dp"))
        with spmd.no_typecheck():
            found = learn(model, model, mesh)
    seen: Any = [block.seen for block in model]
    assert all(kinds == "{}" for of in seen for kinds in of.values()), seen
    return found, seen


@rows("17.12")
def test_a_mesh_for_each_parameter(four: Pool) -> None:
    """Experts over (efsdp, ep), the others over (dp, tp), in one unit, as torchtitan has them."""
    four.run(alike, a_mesh_for_each_parameter)


def a_mesh_for_each_parameter(api: Api) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    sparse = _groups_of_their_own()
    infos = _get_mesh_info(mesh, dims("dp")), _get_mesh_info(sparse, dims("efsdp"))
    model = two_blocks(has_experts=True)
    for block in model:
        typed(block, mesh, sparse)  # type: ignore[arg-type]
        apart = {id(block.experts)}

        def place(parameter: nn.Parameter, apart: set[int] = apart) -> Any:
            is_expert = id(parameter) in apart
            return ShardPlacementResult(Shard(1 if is_expert else 0), infos[is_expert])

        api.fully_shard(block, mesh=mesh, dp_mesh_dims=dims("dp"), shard_placement_fn=place)
    places = [(str(p.placements), p.device_mesh.mesh_dim_names) for p in model.parameters()]
    return places, learn(model, api.compile(model), mesh)


def _groups_of_their_own() -> DeviceMesh:
    """Over the same ranks as (dp, tp); stock tells meshes apart by their groups, which the kit
    shares.
    """
    with mock.patch.object(device_mesh, "new_group", dist.new_group):
        return device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


@rows("17.12")
def test_types_that_are_refused(four: Pool) -> None:
    four.run(eager_alike, types_that_are_refused)


def types_that_are_refused(api: Api) -> Any:
    mesh, other = mesh_of(2, 2, names=("dp", "tp")), mesh_of(4, names=("all",))

    def layer(kinds: dict[str, Any], on: DeviceMesh = mesh) -> nn.Module:
        made = nn.Linear(4, 4, bias=False)
        with spmd.set_current_mesh(on):
            spmd.assert_type(made.weight, kinds)
        return made

    both = {"dp": spmd.R, "tp": spmd.R}
    calls = {
        "dp_mesh_dims=DataParallelMeshDims(": lambda: api.fully_shard(layer(both), mesh=mesh["dp"]),
        "for some axes of the mesh": lambda: shard(layer({"tp": spmd.R})),
        "data-parallel; should be R there": lambda: shard(layer({"dp": spmd.I, "tp": spmd.R})),
        "should be R, I or S(dim)": lambda: shard(layer({"dp": spmd.R, "tp": spmd.V})),
        "neither an axis": lambda: shard(layer({"all": spmd.R}, other)),
        "is no axis of": lambda: inside(other, lambda: shard(layer({"tp": spmd.I}))),
        "do not reach the same ranks": lambda: inside(mesh["dp"], lambda: shard(half())),
    }

    def half() -> nn.Module:
        return layer({"dp": spmd.R}, mesh["dp"])

    def shard(made: nn.Module) -> Any:
        return api.fully_shard(made, mesh=mesh, dp_mesh_dims=dims("dp"))

    def inside(on: DeviceMesh, call: Callable[[], Any]) -> Any:
        with spmd.set_current_mesh(on):
            return call()

    if not api.is_stock:
        for text, call in calls.items():
            said = message(call)
            assert text in said, said
            assert "weight" in said, said
    return [raised(call) for call in calls.values()]
