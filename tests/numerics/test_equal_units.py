"""Units that compute the same are traced, differentiated and compiled once
(`Plan(regions="units")`): the same numbers, bit for bit without Inductor,
and graphs with the same communication.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kit.graphs import captured
from kit.pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from compiled_fsdp import (
    compile_step,
    dumped_to,
    errors,
    explain,
    fully_shard,
    fully_sharded_data_parallel,
    planned,
)
from compiled_fsdp.compiler import inductor
from compiled_fsdp.inspection.dump_folder import read_folder
from compiled_fsdp.ir.graph import find, is_matmul, starts
from compiled_fsdp.ir.schema import TO_LOWER
from compiled_fsdp.ir.subgraphs import INVOKE
from compiled_fsdp.planning.costs import assumed
from compiled_fsdp.torch_private.subgraphs import grad_mode_at_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.fx import Graph

WIDTH, CPU = 32, torch.device("cpu")


class Layer(nn.Module):
    """`odd`: what it does besides, that a graph of its own may not, or that makes it another;
    several, joined by "+".
    """

    def __init__(self, odd: str, checkpoints: str = "") -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.odd = nn.Linear(WIDTH, WIDTH), odd
        self.aside = nn.Linear(WIDTH, 4) if odd in ("aside", "dtype alone") else None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = self.checkpointed(self.attention, self.norm(x)) * scale
        if self.odd == "dropout":
            y = F.dropout(y, 0.5, self.training)
        if "in place inside" in self.odd:
            y.mul_(2.0)
        if self.odd == "buffer":
            self.calls += 1
        if self.odd == "switched inside":
            with torch.no_grad():
                shift = shift + y.mean()
        if self.odd == "argument":
            shift.add_(1.0)
        y = of_constants(self.odd, y, self.calls)
        if self.odd == "dtype alone":
            return (x + y + shift).type_as(self.aside(y)), y.mean()
        if "some alone" in self.odd:
            return x + y + shift, self.norm(x).mean()
        if self.aside is not None:
            return x + y + shift, self.aside(y).mean()
        return x + y + shift, y.mean()

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        return self.out(F.gelu(y[:, 0]))

    def checkpointed(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A part of the layer; "nested": within a checkpoint around the layer."""
        if self.checkpoints in ("part", "nested"):
            return checkpoint(part, x, use_reentrant=False)
        return part(x)


def of_constants(odd: str, y: Tensor, calls: Tensor) -> Tensor:
    if odd == "buffer behind":
        return y * (calls + 1.0)
    if "makes a module" in odd:  # which torch notes in the graph
        y = nn.Softmax(-1)(y)
    if odd == "complex":
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * 1j).flatten(-2)
    if "constants" in odd:  # as caches of Hugging Face's models begin
        return torch.cat([torch.tensor([], dtype=y.dtype).view(0, *y.shape[1:]), y])
    return y[:, [*range(y.shape[1])]] if odd == "index" else y


class Model(nn.Module):
    """used: which of the layers' results the loss is made of."""

    def __init__(self, depth: int, odd: str = "", checkpoints: str = "", used: str = "all") -> None:
        super().__init__()
        self.used = used
        self.embedding = nn.Embedding(20, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Layer(odd, checkpoints) for _ in range(depth))
        self.checkpoints = checkpoints
        self.options = [AROUND.get(checkpoints, AROUND["call"])(i) for i in range(depth)]

    def forward(self, tokens: Tensor) -> Tensor:
        x, means = self.embedding(tokens), []
        scale, shift = self.scale.mean() * 0.5, torch.zeros(WIDTH)
        odd = self.layers[0].odd
        if "switched around" in odd:  # as rotary embeddings of Hugging Face's models do
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                shift = torch.outer(x[0, :, 0].float(), torch.ones(WIDTH)).cos()
        if odd == "switched for one":
            with torch.no_grad():
                shift = self.layers[0](x, scale, shift)[0].mean()
            with torch.autocast("cpu", torch.bfloat16):
                means.append(self.layers[1](x, scale, shift)[1])
        if odd == "jvp":
            _, shift = torch.func.jvp(torch.sin, (shift,), (shift,))
        pairs = self.checkpoints == "pairs"
        for i in range(0, len(self.layers), 2 if pairs else 1):
            x, mean = self.called(i, x, scale, shift)
            means.append(mean)
        if self.used == "x":
            means = [x.mean()]
        if odd == "buffer behind":
            for layer in self.layers:
                layer.calls += 1
        logits = F.linear(x, self.embedding.weight).float()  # tied
        if self.used == "means":  # of the first layers, so that others lead nowhere
            return torch.stack(means[:1]).sum()
        used = means[-1:] if odd == "aside" else means
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + torch.stack(used).sum()

    def called(self, i: int, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[i]
        if layer.odd == "attention set":
            with sdpa_kernel(SDPBackend.MATH):
                return layer(x, scale, shift)
        if layer.odd == "added in place":
            added, mean = layer(x, scale, shift)
            x = torch.zeros_like(x)  # what else read `x` would add its gradient in another order
            x.add_(added)
            x[0] = added[1]
            return x, mean
        if self.checkpoints == "pairs":
            return checkpoint(self.pair, i, x, scale, shift, use_reentrant=False)
        if self.checkpoints in AROUND:
            return checkpoint(layer, x, scale, shift, **self.options[i])
        return layer(x, scale, shift)

    def pair(self, i: int, x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        x, mean = self.layers[i](x, scale, shift)
        return self.layers[i + 1](x, scale, shift + mean)


def keeping(i: int, *ops: Any) -> dict[str, Any]:
    """Options of a checkpoint: a function of its own, which keeps what these ops yield."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    def context() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return {"use_reentrant": False, "context_fn": context}


COUNTED: dict[Any, int] = {}


def counting(num: str = "") -> dict[str, Any]:
    """Options of a checkpoint whose policy writes to a variable of a function around it."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal num
        num += "i"
        return CheckpointPolicy.PREFER_RECOMPUTE

    return {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, policy),
    }


MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Ways to checkpoint whole layers: the options of the checkpoint around layer `i`.
AROUND: dict[str, Callable[[int], dict[str, Any]]] = {
    "call": lambda i: {"use_reentrant": False},
    "reentrant": lambda i: {"use_reentrant": True},
    "nested": lambda i: {"use_reentrant": False},
    "keeps matmuls": lambda i: keeping(i, *MATMULS),
    "the last keeps others": lambda i: keeping(i, *MATMULS[: i < 3]),
    "counts in a variable": lambda i: counting(),
    "counts in a list": lambda i: keeping(i, [0]),
    "counts": lambda i: keeping(i, COUNTED),
    "each keeps others": lambda i: keeping(i, *MATMULS[: i % 2]),
}


@dataclass(frozen=True)
class Case:
    """frozen: so many layers are, the first. num_calls: of units, in the forward graph.

    beside: what has the same numbers, and under "off", every layer traced for its place, also the
        same communication.
    saved: how many results of its own a layer keeps for backward, beside those that the next one
        reads; None: not looked at. Before 2.14 attention under a checkpoint keeps one more, the
        state of the generator.
    starts: without that, how many gathers and reductions each graph has; None under a budget.
    """

    depth: int = 3
    odd: str = ""
    checkpoints: str = ""
    frozen: int = 0
    policy: Policy = field(default_factory=Policy)
    reshard: bool | None = True
    accumulates: bool = False
    replicas: int = 1
    wrapper: bool = False
    autocast: bool = False
    backend: str = "compiled_fsdp_eager"
    plan: tuple[tuple[str, Any], ...] = ()
    num_calls: int = 3
    used: str = "all"
    saved: int | None = None
    beside: tuple[str, ...] = ("eager",)
    starts: tuple[tuple[int, int], ...] | None = ((4, 0), (4, 4))


OFF = ("eager", "off")
COSTS = (("costs", assumed("cpu")), ("prefetch", "auto"), ("reduces_in_flight", "auto"))
CASES = {
    "plain": Case(beside=OFF),
    "kept in bf16": Case(
        reshard=False, policy=Policy(torch.bfloat16, torch.float32), starts=((4, 0), (0, 4))
    ),
    "frozen": Case(depth=6, frozen=3, num_calls=6, starts=((7, 0), (7, 4))),
    "one frozen": Case(depth=5, frozen=1, num_calls=4, beside=OFF),
    "accumulated": Case(accumulates=True, beside=OFF),
    "from costs": Case(plan=COSTS),
    "budget": Case(depth=5, plan=(("memory_budget", 0.5),), num_calls=5, starts=None),
    "split": Case(plan=(("split_bytes", 4096), ("bucket_bytes", 0)), beside=OFF),
    "int8": Case(plan=(("gather_quantized", torch.int8),)),
    "checksums": Case(plan=(("check", "checksums"),)),
    "written to, constants, switched around, results of some parameters, a module": Case(
        odd="in place inside+constants+switched around+some alone+makes a module"
    ),
    "FSDP1": Case(wrapper=True, starts=((4, 0), (3, 4))),
    "added in place": Case(odd="added in place", used="x"),
    "checkpoints": Case(checkpoints="call", beside=OFF, saved=0),
    "checkpoints of FSDP1": Case(
        checkpoints="call", wrapper=True, starts=((4, 0), (3, 4)), saved=0
    ),
    "checkpoints, nothing freed": Case(
        checkpoints="call", reshard=False, starts=((4, 0), (0, 4)), saved=0
    ),
    "checkpoints, bf16, accumulated": Case(
        checkpoints="call",
        policy=Policy(torch.bfloat16, torch.float32),
        accumulates=True,
        beside=OFF,
        saved=0,
    ),
    "checkpoints, budget": Case(
        checkpoints="call", depth=5, plan=(("memory_budget", 0.5),), num_calls=5, starts=None
    ),
    "reentrant checkpoints": Case(checkpoints="reentrant", beside=OFF, saved=0),
    "nested checkpoints": Case(checkpoints="nested", beside=OFF, saved=0),
    "wrapped in checkpoints": Case(checkpoints="wrapped", beside=OFF, saved=0),
    "checkpoints in units": Case(checkpoints="part", beside=OFF),
    "checkpoints that keep": Case(checkpoints="keeps matmuls", beside=OFF, saved=2),
    "switched for one": Case(odd="switched for one", beside=("off",)),
    "autocast": Case(autocast=True, beside=OFF, saved=7),
    "autocast, checkpoints": Case(autocast=True, checkpoints="call", beside=OFF, saved=0),
}
LEFT = {
    "switched inside": (Case(odd="switched inside", num_calls=0), "%_set_grad_enabled"),
    "dropout": (Case(odd="dropout", num_calls=0), "it draws random numbers"),
    "dropout under checkpoints": (
        Case(odd="dropout", checkpoints="call", num_calls=0),
        "it draws random numbers",
    ),
    "switched inside of checkpoints": (
        Case(odd="switched inside", checkpoints="call", num_calls=0),
        "switches autograd",
    ),
    "checkpoints that keep one thing or another": (
        Case(checkpoints="each keeps others", num_calls=0),
        "it occurs 2 times",
    ),
    "a checkpoint that keeps something else": (
        Case(depth=4, checkpoints="the last keeps others", num_calls=3),
        "a checkpoint, computes or keeps other than that of layers.0",
    ),
    "checkpoints that count": (
        Case(checkpoints="counts", num_calls=0),
        "it occurs 1 times",
    ),
    "checkpoints that count in a list": (
        Case(checkpoints="counts in a list", num_calls=0),
        "it occurs 1 times",
    ),
    "checkpoints that count in a variable": (
        Case(checkpoints="counts in a variable", num_calls=0),
        "it occurs 1 times",
    ),
    "attention is set": (Case(odd="attention set", num_calls=0), "it stands behind %_sdpa_kernel"),
    "forward derivatives": (Case(odd="jvp", num_calls=0), "it stands behind %_jvp_increment"),
    "checkpoints around two layers": (
        Case(depth=4, checkpoints="pairs", num_calls=0),
        "a checkpoint, computes it together with others",
    ),
    "two layers": (Case(depth=2, num_calls=0), "no unit occurs 3 times"),
    "a buffer is written to behind them": (
        Case(odd="buffer behind", num_calls=0),
        "buffers_calls_, which the graph writes to",
    ),
    "complex numbers": (Case(odd="complex", num_calls=0), "it computes with complex numbers"),
    "a buffer is written to": (
        Case(odd="buffer", num_calls=0),
        "buffers_calls_, which the graph writes to",
    ),
    "an argument is": (Case(odd="argument", num_calls=0), "it writes to what it is given"),
    "some results alone": (
        Case(depth=4, odd="some alone", used="means", num_calls=0),
        "has no gradient from what is used of its results",
    ),
    "a constant index": (Case(odd="index", num_calls=0), "it makes a tensor of Python's numbers"),
    "only its dtype is used": (
        Case(odd="dtype alone", num_calls=0),
        "has no gradient from any of its results",
    ),
    "a result that nobody uses": (
        Case(depth=4, odd="aside", num_calls=0),
        "has no gradient from any of its results",
    ),
    "two of a kind": (Case(depth=4, frozen=2, num_calls=0), "it occurs 2 times"),
}


def make(case: Case) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(case.depth, case.odd, case.checkpoints, case.used)
    if case.checkpoints == "wrapped":
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    for layer in model.layers[: case.frozen]:
        layer.requires_grad_(requires_grad=False)
    if case.wrapper:
        FSDP = fully_sharded_data_parallel.FullyShardedDataParallel
        model.layers = nn.ModuleList(
            FSDP(layer, use_orig_params=True, device_id=CPU) for layer in model.layers
        )
        model = FSDP(model, use_orig_params=True, device_id=CPU)
    else:
        size = torch.distributed.get_world_size()
        shape = (case.replicas, size // case.replicas)
        names = ("replicate", "shard")
        start = case.replicas == 1
        mesh = init_device_mesh("cpu", shape[start:], mesh_dim_names=names[start:])
        for module in (*model.layers, model):
            fully_shard(
                module, mesh=mesh, mp_policy=case.policy, reshard_after_forward=case.reshard
            )
    return model


def train(case: Case, regions: str, steps: int = 3) -> tuple[list[Tensor], list[Graph], nn.Module]:
    """Losses and last gradients of this rank, the graphs, and the model;
    "eager" for regions: not compiled.
    """
    model = make(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Tensor] = []
    is_eager = regions == "eager"
    options = {} if case.backend == "inductor" else {"backend": case.backend}
    call = model if is_eager else torch.compile(model, fullgraph=True, dynamic=False, **options)
    seen = captured(inductor) if case.backend == "inductor" else captured()
    with planned(**dict(case.plan), regions="off" if is_eager else regions), seen as graphs:
        for step in range(steps):
            batches = 2 if case.accumulates else 1
            for batch in range(batches):
                if case.accumulates:
                    model.set_requires_gradient_sync(batch == batches - 1)
                torch.manual_seed(10 * step + batch)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = call(torch.randint(20, (2, 8)))
                loss.backward()
                found.append(loss.detach())
            if step == steps - 1:
                found += [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    found = [v.to_local() if hasattr(v, "to_local") else v for v in found]
    return found, list(graphs), model


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers(two: Pool, name: str) -> None:
    two.run(compare, CASES[name])


def test_replicas(four: Pool) -> None:
    """A mesh of two dims."""
    four.run(compare, Case(replicas=2, beside=OFF))


def compare(case: Case) -> None:
    """Bit for bit as the eager runtime, and as with every layer traced for its place;
    what is on the wire is the same.
    """
    with warnings.catch_warnings():
        if case.num_calls == case.depth and case.odd != "switched for one":
            warnings.simplefilter("error")  # nothing is left where it stands
        found, graphs, model = train(case, "units")
    for graph in explain(model).graphs:
        assert sum(region["calls"] for region in graph.regions) == case.num_calls
        if graph.kind == "forward":  # backward may read what was kept
            assert all("layer" in region["unit"] for region in graph.regions), graph.regions
        assert not graph.inline
    others: list[Graph] = []
    for regions in case.beside:
        expected, others, _ = train(case, regions)
        assert len(found) == len(expected)
        for value, other in zip(found, expected, strict=True):
            assert torch.equal(value, other), regions
    forward, backward = graphs[:2]
    assert len(find(forward, INVOKE)) == case.num_calls
    assert len({node.args[1] for node in find(forward, INVOKE)}) == 1 + (case.frozen > 1)
    assert len(find(backward, INVOKE)) == case.num_calls
    if case.saved is not None:
        results = [{read.args[1] for read in call.users} for call in find(forward, INVOKE)]
        assert {len(each) - 2 for each in results} <= {case.saved, case.saved + 1}
    names = [sorted(n.name.rstrip("_0123456789") for n in starts(graph)) for graph in graphs]
    if "off" in case.beside:
        assert names == [
            sorted(n.name.rstrip("_0123456789") for n in starts(graph)) for graph in others
        ]
    elif case.starts is not None:
        gathers = [sum("gather" in name for name in each) for each in names]
        assert [(n, len(each) - n) for n, each in zip(gathers, names, strict=True)] == [
            *case.starts
        ]


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.usefixtures("fake_world")
def test_left_where_it_stands(name: str) -> None:
    left(*LEFT[name])


def test_a_buffer_that_is_written_to(two: Pool) -> None:
    two.run(written_to, Case(odd="buffer", num_calls=0))


def written_to(case: Case) -> None:
    found, _, _ = train(case, "units")
    expected, _, _ = train(case, "off")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def left(case: Case, why: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        errors._said.clear()
        _, graphs, _ = train(case, "units", steps=1)
    assert {len(find(graph, INVOKE)) for graph in graphs} == {case.num_calls}
    texts = [str(each.message) for each in said if "regions='units'" in str(each.message)]
    assert any(why in text for text in texts), texts


class Other(Layer):
    """Another class that computes the same."""


def of_classes(wrapper: bool) -> dict[Any, tuple[list[str], list[str]]]:
    """What becomes a subgraph of six layers of two classes, and what is said, by `Plan.regions`."""
    found = {}
    for regions in ("units", ("Layer",), ("Layer", "Other"), ("Attention", "Other")):
        errors._said.clear()
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Model(6)
        model.layers = nn.ModuleList(Other("") if i % 2 else Layer("") for i in range(6))
        if wrapper:
            FSDP = fully_sharded_data_parallel.FullyShardedDataParallel
            model.layers = nn.ModuleList(
                FSDP(layer, use_orig_params=True, device_id=CPU) for layer in model.layers
            )
            model = FSDP(model, use_orig_params=True, device_id=CPU)
        else:
            for module in (*model.layers, model):
                fully_shard(module)
        call = torch.compile(model, fullgraph=True, dynamic=False, backend="compiled_fsdp_eager")
        with (
            planned(regions=regions),
            captured() as graphs,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            call(torch.arange(16).view(2, 8))
        calls = [str(node.args[1]).partition("fsdp_")[2] for node in find(graphs[0], INVOKE)]
        texts = [str(each.message) for each in said if "regions=" in str(each.message)]
        found[regions] = (calls, texts)
    return found


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.usefixtures("fake_world")
def test_units_of_these_classes(wrapper: bool) -> None:
    """By the names that the user gave them; one that none has is announced."""
    found = of_classes(wrapper)
    both = ["unit_0_0", "unit_1_0"] * 3
    assert found["Layer",] == (["unit_0_0"] * 3, [])
    assert found["Layer", "Other"] == (both if not wrapper else ["unit_0_0"] * 6, [])
    assert found["units"] == found["Layer", "Other"]
    calls, (text,) = found["Attention", "Other"]
    assert calls == ["unit_0_0"] * 3
    assert text == (
        "compiled_fsdp: Plan(regions=('Attention', 'Other')): no unit of a graph is of class "
        "Attention; there are Layer, Other"
    )


@pytest.mark.usefixtures("fake_world")
def test_whether_autograd_was_on_where_a_graph_began() -> None:
    """Not where it ends, behind `torch.set_grad_enabled(False)`."""
    seen = []

    def note(*_: object, **__: object) -> None:
        seen.append((grad_mode_at_start(), torch.is_grad_enabled()))

    layer = fully_shard(nn.Linear(2, 2))

    def function(x: Tensor) -> Tensor:
        y = layer(x)
        torch.set_grad_enabled(False)
        return y.cos()

    torch._dynamo.reset()
    with (
        mock.patch("compiled_fsdp.frontend.writes.outline_units", note),
        torch.enable_grad(),  # which puts back what it was
    ):
        torch.compile(function, backend="compiled_fsdp_eager")(torch.ones(2, 2))
    assert seen[0] == (True, False), seen


def test_whole_steps(two: Pool) -> None:
    two.run(whole_steps)


def whole_steps() -> None:
    """The optimizer in the same graph; and a forward alone."""
    found = {}
    for regions in ("units", "off"):
        model = make(Case())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with planned(regions=regions), captured() as graphs:
            step = compile_step(model, optimizer, backend="compiled_fsdp_eager")
            torch.manual_seed(0)
            losses = [step(torch.randint(20, (2, 8))).detach().clone() for _ in range(3)]
        parameters = [p.to_local().clone() for p in model.parameters()]
        with planned(regions=regions), torch.no_grad():
            call = torch.compile(model, fullgraph=True, backend="compiled_fsdp_eager")
            losses.append(call(torch.randint(20, (2, 8))))
        found[regions] = [*losses, *parameters]
        calls = [len(find(graph, INVOKE)) for graph in graphs]
        assert (max(calls) > 0) == (regions == "units"), calls
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@pytest.mark.usefixtures("fake_world")
def test_a_dump_has_them(tmp_path: Path) -> None:
    """After each pass the graph that calls them, with its collectives, for people and for programs;
    and the units' own graphs once.
    """
    with dumped_to(tmp_path):
        train(Case(), "units", steps=1)
    graphs = read_folder(tmp_path)[0].graphs
    assert [graph.kind for graph in graphs] == ["joint", "forward", "backward"]
    for graph in graphs:
        units = (graph.path / "units.txt").read_text()
        last = graph.after(None)
        names = {str(n.args[1]) for n in last.gm.graph.nodes if "invoke" in str(n.target)}
        assert names
        assert all(f"# {name}, called " in units and f"'{name}'" in last.text for name in names)
        assert "scaled_dot_product" in units
        assert len(find(last.gm.graph, *TO_LOWER) or starts(last.gm.graph)) > 1
    assert "+%all_gather" in graphs[1].after("lower").diff


@pytest.mark.usefixtures("fake_world")
def test_a_layer_more_adds_no_computation() -> None:
    """To the graphs that AOTAutograd traces: a call each way, and no subgraph more."""
    graphs = [train(Case(depth=depth), "units", steps=1)[1] for depth in (3, 4)]
    few, many = (sum(is_matmul(n) for g in each for n in g.nodes) for each in graphs)
    assert many == few > 0, "those of the head, which is in no subgraph"
    names = {node.args[1] for each in graphs for graph in each for node in find(graph, INVOKE)}
    assert len(names) == 2, names
    calls = [len(find(graph, INVOKE)) for each in graphs for graph in each]
    assert calls == [3, 3, 4, 4]
