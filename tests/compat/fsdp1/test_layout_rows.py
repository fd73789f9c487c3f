"""Chapter 5: the layout of flat parameters, and what is registered as a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import plain
from kit.oracle_fsdp1 import (
    STRATEGIES,
    Api,
    Block,
    adam,
    eager_same,
    full,
    grads,
    net,
    outcome,
    rows,
    same,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FlatParameter, MixedPrecision
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if TYPE_CHECKING:
    from kit.pool import Pool

METADATA = (
    "_fqns",
    "_shapes",
    "_strides",
    "_contiguities",
    "_numels",
    "_numels_with_padding",
    "_is_padding_mask",
    "_unpadded_unsharded_size",
    "_sharded_size",
    "_shard_numel_padded",
)


class Tied(nn.Module):
    """A weight with two names, one of them in another module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = (
            nn.Linear(3, 5),
            nn.Linear(5, 3, bias=False),
            nn.Linear(5, 3, bias=False),
        )
        self.c.weight = self.b.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) + self.c(self.a(x).relu())


class Conv(nn.Module):
    """A weight in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 3, 1, 1).expand(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        return self.out(self.conv(x).flatten(1))


def described(model: Any) -> Any:
    flat = model._flat_param
    infos = [[i.param_name, i.module_name] for i in flat._param_infos]
    shared = [
        [i.param_name, i.module_name, i.prim_param_name, i.prim_module_name]
        for i in flat._shared_param_infos
    ]
    shards = [list(i) for i in flat._shard_param_infos]
    return (
        {name: getattr(flat, name) for name in METADATA},
        infos,
        shared,
        shards,
        flat.detach().clone(),
    )


@rows("5.1", "5.5", "5.6", "5.8", "5.9", "5.10", "5.20")
def test_layout(two: Pool) -> None:
    two.run(eager_same, layout)


def layout(api: Api) -> Any:
    found = []
    for strategy in STRATEGIES:
        for use_orig_params in (True, False):
            for precision in (None, MixedPrecision(torch.bfloat16)):
                for make in (net, Tied, Conv):
                    options = {
                        "sharding_strategy": strategy,
                        "use_orig_params": use_orig_params,
                        "mixed_precision": precision,
                    }
                    model = api.wrap(make(), **options)
                    found.append(
                        [described(model), list(map(tuple, model._handle.shard_metadata()))]
                    )
    model = api.wrap(net())
    train_step(model)
    return found, model._flat_param._padded_unsharded_size


@rows("5.8")
def test_uneven_shards(four: Pool) -> None:
    four.run(eager_same, uneven_shards)


def uneven_shards(api: Api) -> Any:
    odd = nn.Linear(2, 5, bias=False)
    return described(api.wrap(odd, use_orig_params=False)), described(
        api.wrap(nn.Linear(1, 1), use_orig_params=True)
    )


@rows("5.3", "5.4", "5.12")
def test_what_cannot_be_flattened(two: Pool) -> None:
    two.run(eager_same, what_cannot_be_flattened)


def what_cannot_be_flattened(api: Api) -> Any:
    mixed, whole = net(), nn.Linear(2, 2)
    mixed[0].to(torch.float64)
    whole.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int32), requires_grad=False)
    whole.bias = None
    frozen = net()
    frozen[0].weight.requires_grad_(False)
    partly = net()
    partly[0].weight.requires_grad_(False)
    found = [
        outcome(lambda m=m: api.wrap(m, use_orig_params=False)) for m in (mixed, whole, frozen)
    ]
    flat = api.wrap(net(), use_orig_params=False)._flat_param
    kinds = [
        isinstance(flat, FlatParameter),
        isinstance(torch.ones(2), FlatParameter),
        type(flat).__name__,
    ]
    return found, kinds, api.wrap(partly, use_orig_params=True)._flat_param.requires_grad


@rows("5.11", "5.1")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shared_and_strided(two: Pool, use_orig_params: bool) -> None:
    two.run(shared_and_strided, use_orig_params)


def shared_and_strided(use_orig_params: bool) -> None:
    for make in (Tied, Conv):
        same(lambda api, make=make: steps(api, make, use_orig_params))


def steps(api: Api, make: Any, use_orig_params: bool) -> Any:
    model = api.wrap(make(), use_orig_params=use_orig_params)
    call, optimizer = api.compile(model), adam(model)
    found = []
    for step in range(2):
        found.append([train_step(call, step), plain(grads(model))])
        optimizer.step()
        optimizer.zero_grad()
    return found, full(api, model)


@rows("5.17", "7.6", "6.15")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_frozen(two: Pool, use_orig_params: bool) -> None:
    two.run(same, frozen, use_orig_params)


def frozen(api: Api, use_orig_params: bool) -> Any:
    model = net()
    for p in (
        model[1].parameters() if not use_orig_params else [model[1].a.weight, model[2].b.weight]
    ):
        p.requires_grad_(False)
    sharded = api.blocks(model, use_orig_params=use_orig_params)
    call = api.compile(sharded)
    found = [train_step(call), plain(grads(sharded))]
    if use_orig_params:
        for p in sharded.parameters():
            p.grad = None
        for p in sharded[1].parameters():
            p.requires_grad_(False)
        found += [train_step(call, 1), plain(grads(sharded)), sharded[1]._flat_param.requires_grad]
        for p in sharded[1].parameters():
            p.requires_grad_(True)
        found += [train_step(call, 2), plain(grads(sharded)), sharded[1]._flat_param.requires_grad]
    return found


@rows("5.22")
def test_tensor_parallel(four: Pool) -> None:
    four.run(tensor_parallel)


def tensor_parallel() -> None:
    """Against stock, and the unsharded model on the same batches: sums in another order."""
    torch.manual_seed(1)
    whole = Block(6)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(5))
    sum(whole(part).square().mean() for part in x).div(2).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for kind in ("stock", "eager", "compiled"):
        torch._dynamo.reset()
        api = Api(kind)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        model = parallelize_module(
            Block(6), mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()}
        )
        sharded = api.wrap(model, device_mesh=mesh["dp"], use_orig_params=True)
        out = api.compile(sharded)(x[mesh["dp"].get_local_rank()])
        out.square().mean().backward()
        flat = sharded._flat_param
        pieces = [torch.empty_like(flat.grad) for _ in range(2)]
        dist.all_gather(pieces, flat.grad, group=mesh["dp"].get_group())
        found = torch.cat(pieces).split(flat._numels_with_padding)
        real = [
            piece
            for piece, is_padding in zip(found, flat._is_padding_mask, strict=True)
            if not is_padding
        ]
        for name, shape, piece in zip(flat._fqns, flat._shapes, real, strict=True):
            dim = 1 if name == "b.weight" else 0
            part = expected[name].chunk(2, dim)[mesh["tp"].get_local_rank()]
            torch.testing.assert_close(piece.view(shape), part, rtol=1e-5, atol=1e-6)
