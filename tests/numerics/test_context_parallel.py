"""Torch's context parallelism around our graphs: a sequence divided among ranks, keys and values
sent round a ring, causal, so that each rank computes something else.

Torch has rings for kernels of devices alone; what CPUs' attention lacks stands here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.graphs import captured
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as rings

from compiled_fsdp import fully_shard
from compiled_fsdp.ir.collectives import WAIT
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import EXCHANGE

if TYPE_CHECKING:
    from kit.pool import Pool

VOCAB, LENGTH, DIM, HEADS, STEPS = 16, 16, 8, 2, 3
aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def ring(op: Any, args: Any, kwargs: Any) -> Any:
    """What torch does for attention on devices."""
    call = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
    mesh = call.compute_mesh
    names = (argument.name for argument in op._schema.arguments)
    given: Any = {**dict(zip(names, call.local_args, strict=False)), **call.local_kwargs}
    found = (
        rings._templated_ring_attention(mesh.get_group(), 2, op, **given)
        if op is FORWARD
        else rings._templated_ring_attention_backward(
            mesh.get_group(), 2, op, grad_out_name="grad_out", **given
        )
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.query(x).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.block, self.head = Block(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.block(self.tokens(tokens) + self.places(places)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> list[Tensor]:
    """The same whole sequences on all ranks."""
    generator = torch.Generator().manual_seed(step)
    data = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    return [data[:, :-1].clone(), torch.arange(LENGTH), data[:, 1:].clone()]


def train(kind: str, reference: Model) -> list[Tensor]:
    """Mean losses of all ranks, and parameters in the end."""
    model: Any = copy.deepcopy(reference)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    if kind != "alone":
        shard: Any = stock_fully_shard if kind == "stock" else fully_shard
        shard(model.block, mesh=mesh)
        shard(model, mesh=mesh)
    call = model
    if kind == "compiled":
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
    found = []
    for step in range(STEPS):
        given = batch(step)
        if kind == "alone":
            loss = call(*given)
            loss.backward()
        else:
            with context_parallel(
                mesh, buffers=given, buffer_seq_dims=[1, 0, 1], no_restore_buffers={*given}
            ):
                loss = call(*given)
                loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean / world)
        optimizer.step()
        optimizer.zero_grad()
    parameters = [p.detach() for p in model.parameters()]
    return [*found, *(p.full_tensor() if isinstance(p, DTensor) else p for p in parameters)]


def compare(method: str) -> tuple[list[int], int]:
    """How many sends round the ring each half has, and how many of them nobody reads."""
    torch.manual_seed(0)
    reference = Model()
    handlers = {FORWARD: ring, BACKWARD: ring}
    with mock.patch.dict(rings.custom_ops, handlers):
        rings.set_rotate_method(method)
        alone, stock, eager = (train(kind, reference) for kind in ("alone", "stock", "eager"))
        counters.clear()
        with captured() as graphs:
            compiled = train("compiled", reference)
        rings.set_rotate_method("allgather")
    assert counters["stats"]["unique_graphs"] == 1
    for found in (stock, eager, compiled):
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
    is_exact = dist.get_world_size() == 2  # gloo adds four in another order
    assert not is_exact or all(map(torch.equal, eager, stock))
    assert all(map(torch.equal, compiled, eager))
    waits = [wait for graph in graphs for wait in find(graph, WAIT)]
    sends = [len([n for n in find(graph, EXCHANGE)]) for graph in graphs]
    return sends, sum(not wait.users for wait in waits)


def test_two_ranks(two: Pool) -> None:
    """Keys and values gathered, gradients sent round: torch's default."""
    assert two.run(compare, "allgather") == [([0, 2], 0)] * 2


def test_four_ranks(four: Pool) -> None:
    """Keys and values sent round, in backward once more: the first of these sends is forward's, the
    others are backward's alone on every rank. Without sharding torch hangs there: how often it
    sends depends on what a rank computes.
    """
    assert four.run(compare, "alltoall") == [([3, 2 + 4], 0)] * 4
