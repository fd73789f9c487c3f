"""A transformer under tensor parallelism and ours together: beside stock's FSDP2 with TP, and
beside the model on one rank.

The plan is the usual one: the vocabulary, the heads and the hidden columns are cut over "tp", and
between them the sequence. So a step has all-gathers, reduce-scatters and all-reduces of DTensor's
own, on activations, in the same graph as ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from kit.compare import check_equal, plain, whole
from kit.graphs import captured
from kit.harness import SLOW
from kit.oracle import BACKENDS, mesh_of
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from compiled_fsdp import fully_shard
from compiled_fsdp.ir.collectives import ALL_GATHER, ALL_TO_ALL, STARTS
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import ALL_GATHER as GLOO_GATHER
from compiled_fsdp.ir.schema import CAST_GRAD
from compiled_fsdp.torch_private.groups import common_name
from compiled_fsdp.units import tensor_parallel

if TYPE_CHECKING:
    from pathlib import Path

    from kit.pool import Pool

# Columns and heads that are cut are added in another order than whole ones, and Inductor fuses.
ROUNDING = (1e-4, 1e-6)


class Attention(nn.Module):
    """Heads of four columns; how many, the columns that arrive say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, num_layers: int, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(
            self.head(self.norm(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def parallelize(model: Transformer, mesh: Any) -> None:
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        plan = {
            "norm1": SequenceParallel(),
            "attention": gather,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(),
            "mlp": gather,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def build(kind: str, shape: tuple[int, ...], num_layers: int = 1) -> tuple[Transformer, Any]:
    """The model and what to call; "one rank" neither cuts nor shards it."""
    torch.manual_seed(5)
    model = Transformer(num_layers)
    if kind == "one rank":
        return model, model
    mesh = mesh_of(*shape, names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    for unit in (*model.layers, model):
        (stock_fully_shard if kind == "stock" else fully_shard)(unit, mesh=mesh["dp"])
    return model, torch.compile(
        model, backend=BACKENDS[kind], fullgraph=True
    ) if kind in BACKENDS else model


def batches(shape: tuple[int, ...], step: int) -> list[Tensor]:
    """One for each data-parallel rank."""
    return list(
        torch.randint(0, 16, (shape[0], 2, 8), generator=torch.Generator().manual_seed(step))
    )


def train(kind: str, shape: tuple[int, ...], num_layers: int = 1, steps: int = 3) -> Any:
    model, call = build(kind, shape, num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    rank = mesh_of(*shape, names=("dp", "tp")).get_local_rank("dp")
    found = []
    for step in range(steps):
        mine = batches(shape, step)[rank]
        if kind == "one rank":
            losses = [call(batch) for batch in batches(shape, step)]
            loss = losses[rank]
            torch.stack(losses).mean().backward()
        else:
            loss = call(mine)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append(plain((loss, whole(norm), gradients)))
        found.append({name: whole(grad) for name, grad in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: whole(p) for name, p in model.named_parameters()})
        with torch.no_grad():
            found.append(call(mine).clone())
    return found


def check_same(
    ours: Any, kind: str, oracle: str, shape: tuple[int, ...], num_layers: int, *tolerances: float
) -> None:
    theirs = train(oracle, shape, num_layers)
    assert len({round(loss.item(), 6) for loss, *_ in theirs[::4]}) > 1, "the oracle does not learn"
    if oracle == "one rank":  # it has other placements
        ours, theirs = (
            [[*part[:2], {}] if isinstance(part, list) else part for part in run]
            for run in (ours, theirs)
        )
    check_equal(ours, theirs, f"{kind} against {oracle}", *tolerances)


def same_as_stock(kind: str, shape: tuple[int, ...], *tolerances: float) -> None:
    check_same(train(kind, shape), kind, "stock", shape, 1, *tolerances)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_without_data_parallelism(two: Pool, kind: str) -> None:
    two.run(same_as_stock, kind, (1, 2))


def test_inductor(four: Pool) -> None:
    four.run(same_as_stock, "inductor", (2, 2), *ROUNDING, timeout=SLOW)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_layers(four: Pool, kind: str) -> None:
    """Two data-parallel ranks add in one order, so every bit is equal to stock's; and what stands
    in the graphs. Two layers, compiled one: that takes long.
    """
    four.run(layers, kind)


def layers(kind: str) -> None:
    num_layers = 1 if kind == "compiled" else 2
    with captured() as graphs:
        ours = train(kind, (2, 2), num_layers)
    check_same(ours, kind, "stock", (2, 2), num_layers)
    check_same(ours, kind, "one rank", (2, 2), num_layers, *ROUNDING)
    if kind == "compiled":
        what_stands_in(graphs)


def what_stands_in(graphs: list[Any]) -> None:
    """One graph a direction; on the data-parallel group a gather and a reduction for each unit,
    beside DTensor's own.
    """
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    dp, tp = (common_name(mesh[axis].get_group().group_name) for axis in ("dp", "tp"))
    assert len(graphs) == 3, "forward, backward, and the forward of an evaluation"
    training = graphs[:2]
    counts = [
        [sum(dp in node.args for node in find(graph, *targets)) for graph in training]
        for targets in ((ALL_GATHER, GLOO_GATHER), (ALL_TO_ALL,))
    ]
    assert counts == [[2, 1], [0, 2]], f"the root's unit is kept for backward; {counts}"
    for graph in training:
        assert sum(tp in node.args for node in find(graph, GLOO_GATHER, *STARTS)) >= 4, (
            "a layer has two ways in and two out"
        )


def test_checkpoint(four: Pool, tmp_path: Path) -> None:
    four.run(checkpoint, str(tmp_path))


def checkpoint(folder: str) -> None:
    """Two-dimensional -> one rank's model -> other dimensions, and back again;
    optimizer states too.
    """

    def trained(kind: str, shape: tuple[int, ...], steps: int) -> tuple[Any, Any]:
        model, call = build(kind, shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(steps):
            call(batches(shape, step)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    def full(model: Any, optimizer: Any) -> Any:
        options = StateDictOptions(full_state_dict=True)
        found = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        return plain(found)

    source = trained("eager", (2, 2), 2)
    expected = full(*source)
    dcp.save(states(*source), checkpoint_id=f"{folder}/a")
    ways = (("one rank", (2, 2)), ("eager", (4, 1)), ("eager", (2, 2)))
    for i, (kind, shape) in enumerate(ways):
        target = trained(kind, shape, 1)
        loaded = states(*target)
        dcp.load(loaded, checkpoint_id=f"{folder}/{'abcd'[i]}")
        set_model_state_dict(target[0], loaded["model"])
        set_optimizer_state_dict(target[0], target[1], loaded["optimizer"])
        check_equal(full(*target), expected, kind)
        dcp.save(states(*target), checkpoint_id=f"{folder}/{'bcde'[i]}")
    dist.barrier()


def test_gradient_accumulation(four: Pool) -> None:
    four.run(gradient_accumulation)


def gradient_accumulation() -> None:
    """Two backwards before a reduction. Stock adds gradients that are still Partial on "tp", ours
    what has been added there.
    """
    shape, results = (2, 2), []
    rank = mesh_of(*shape, names=("dp", "tp")).get_local_rank("dp")
    for kind in ("stock", "eager", "compiled"):
        torch._dynamo.reset()
        model, call = build(kind, shape)
        model.set_requires_gradient_sync(False)
        call(batches(shape, 0)[rank]).backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        call(batches(shape, 1)[rank]).backward()
        results.append(plain({name: p.grad for name, p in model.named_parameters()}))
    for kind, found in zip(("eager", "compiled"), results[1:], strict=True):
        check_equal(found, results[0], kind, 1e-6, 1e-8)


def test_wide_sums(four: Pool) -> None:
    """As torch has it since 2.15, gradients of replicated weights are added up over "tp" in the
    dtype in which they are reduced; stock is beside it in `test_parallel_rows.py`.
    """
    four.run(wide_sums, timeout=SLOW)


def wide_sums() -> None:
    def of(kind: str, *, is_wide: bool) -> list[dict[str, Tensor]]:
        with mock.patch.object(tensor_parallel, "widens_sums", return_value=is_wide):
            return summed(kind)

    eager, rounded = of("eager", is_wide=True), of("eager", is_wide=False)
    other = not tensor_parallel.widens_sums()  # what is installed is compared there
    check_equal(of("compiled", is_wide=other), eager if other else rounded, "compiled")
    pairs = zip(eager, rounded, strict=True)
    differ = {name for wide, low in pairs for name in wide if not wide[name].equal(low[name])}
    assert differ
    assert all("norm" in name for name in differ), differ


def summed(kind: str) -> list[dict[str, Tensor]]:
    """Gradients of two backwards in bf16, and of two more that are reduced together."""
    torch.manual_seed(5)
    model = Transformer(1)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    parallelize(model, mesh["tp"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=policy)
    call: Any = model
    if kind in BACKENDS:
        call = torch.compile(model, backend=BACKENDS[kind], fullgraph=True)
    found = []
    with captured() as graphs:
        for step, syncs in enumerate((True, True, False, True)):
            model.set_requires_gradient_sync(syncs)
            call(batches((2, 2), step)[mesh.get_local_rank("dp")]).backward()
            if syncs:
                found.append({name: whole(p.grad) for name, p in model.named_parameters()})
                model.zero_grad()
    assert not any(find(graph, CAST_GRAD) for graph in graphs)
    return found


def test_other_lengths_behind_a_baseline(four: Pool) -> None:
    """A head whose result is gathered, and batches of several sizes; the same model under tensor
    parallelism alone came before, on a mesh of its own, and a larger function is compiled.
    """
    four.run(other_lengths, timeout=SLOW)


def other_lengths() -> None:
    with mock.patch.object(device_mesh, "new_group", dist.new_group):  # each mesh its own
        found = [with_a_head(is_sharded) for is_sharded in (False, True)]
    check_equal(found[1], found[0], "other lengths")


def with_a_head(is_sharded: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    head = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    cut = ColwiseParallel(output_layouts=Replicate())
    model: Any = parallelize_module(head, mesh["tp"], {"0": cut, "1": cut})
    if is_sharded:
        fully_shard(model, mesh=mesh["dp"])

    def loss_of(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    call = torch.compile(loss_of, backend=BACKENDS["compiled"] if is_sharded else "aot_eager")
    losses = [call(torch.full((length, 8), 0.5)) for length in (4, 2, 3)]
    losses[-1].backward()
    return [*losses, *(p.grad.full_tensor() for p in model.parameters())]
