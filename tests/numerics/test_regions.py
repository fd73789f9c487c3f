"""Layers that compute the same are compiled once by Inductor: the same numbers, whatever the depth
a few more calls, and `explain` says what repeats.

Both sides are Inductor's. Where a layer begins, other operations may be fused with it than inside a
region, so results are equal within what fusing changes: the last bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from kit.graphs import captured
from kit.harness import ROUNDING, SLOW
from kit.pool import Pool
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.utils.checkpoint import checkpoint

from compiled_fsdp import FullyShardedDataParallel as FSDP
from compiled_fsdp import dumped_to, explain, fully_shard, planned
from compiled_fsdp.compiler import inductor
from compiled_fsdp.ir.collectives import GATHERS, WAIT
from compiled_fsdp.ir.graph import find, starts
from compiled_fsdp.ir.subgraphs import INVOKE

if TYPE_CHECKING:
    from pathlib import Path

    from torch.fx import Graph

    from compiled_fsdp.inspection.explanation import Explanation

WIDTH = 32


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = F.dropout(torch.softmax(q @ k.transpose(1, 2), -1), self.dropout, self.training)
        return x + self.out(F.gelu(scores @ v))


class Model(nn.Module):
    """`older`: the head reads what each layer has made, transposed, as well."""

    def __init__(self, depth: int, dropout: float, checkpoints: bool, older: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)  # logits of the size of the loss
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(depth))
        self.checkpoints, self.older = checkpoints, older

    def forward(self, tokens: Tensor) -> Tensor:
        x, made = self.embedding(tokens), []
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            made.append(x.transpose(0, 1)[:2])
        logits = F.linear(x, self.embedding.weight).float()  # tied
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss + 1e-2 * torch.stack(made).square().mean() if self.older else loss


@dataclass(frozen=True)
class Case:
    depth: int = 5
    dropout: float = 0.0
    checkpoints: bool = False
    older: bool = False
    policy: Policy = field(default_factory=Policy)
    reshard: bool = True
    plan: tuple[tuple[str, Any], ...] = ()
    regions: str = "auto"
    wrapper: bool = False


MIXED = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL = Case(
    depth=6,
    checkpoints=True,
    older=True,
    reshard=False,
    plan=(("copy_out", "strided"),),
)
CASES = {
    "all in one": ALL,
    "all in one, and dropout": replace(ALL, dropout=0.2),
    "bf16": Case(depth=7, older=True, policy=MIXED),
    "FSDP1": Case(depth=7, wrapper=True),  # which divides gradients before they are reduced, too
    "units": replace(ALL, regions="units"),
    "units in bf16": Case(depth=7, older=True, policy=MIXED, regions="units"),
}


def train(
    case: Case, regions: str, compiles: bool = True, steps: int = 2
) -> tuple[list[Tensor], Explanation]:
    """Losses and last gradients of this rank, and what became of the model."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(case.depth, case.dropout, case.checkpoints, case.older)
    if case.wrapper:
        how: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
        model.layers = nn.ModuleList(FSDP(layer, **how) for layer in model.layers)
        model = FSDP(model, **how)
    else:
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=case.policy, reshard_after_forward=case.reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, fullgraph=True, dynamic=False) if compiles else model
    found = []
    with planned(regions=regions, **{"bucket_bytes": 0, **dict(case.plan)}):
        for step in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = call(torch.randint(20, (2, 8)))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found += [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    return found, explain(model)


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers(two: Pool, name: str, tmp_path: Path) -> None:
    """And calls are where the plan has them, in the generated code among collectives and waits; a
    dump shows them.
    """
    two.run(compare, CASES[name], tmp_path, timeout=SLOW)
    (forward, backward) = sorted(tmp_path.glob("rank0/*/regions.txt"))
    for path in (forward, backward):
        text = path.read_text()
        assert "# fsdp_region_0, called " in text
        assert "invoke_subgraph(%fsdp_region_0, 'fsdp_region_0', " in text
        assert not list(path.parent.glob("*_outline.json.gz")), "readers read the graph before"


def compare(case: Case, path: Path) -> None:
    """In fp32 as the eager runtime, or, where Inductor draws random numbers, as without regions;
    bf16 keeps 8 bits, and what is fused keeps more: no further from fp32 than the eager runtime is.
    """
    with captured(inductor) as graphs, dumped_to(path):
        ((found, explanation), few), codes = run_and_get_code(lambda: lowered(case, case.regions))
    check_order(codes, graphs)
    if case.dropout:
        (expected, without), many = lowered(case, "off")
        assert not any(graph.regions for graph in without.graphs)
        assert few < 0.7 * many, "what repeats is lowered once"
    else:
        expected, _ = train(case, "off", compiles=False)
    if case.policy == Policy():
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=ROUNDING[0], atol=ROUNDING[1])
    else:
        exact, _ = train(replace(case, policy=Policy()), "off", compiles=False)
        assert distance(found, exact) <= 1.5 * distance(expected, exact)
    for graph in explanation.graphs:
        assert sum(region["calls"] for region in graph.regions) >= 3, (graph.regions, graph.alone)
        assert all(part["why"] for part in graph.alone)
    assert "compiled once, calls: " in str(explanation)


def distance(values: list[Tensor], others: list[Tensor]) -> float:
    """The root of the mean square: which element is the furthest off depends on the processor."""
    pairs = zip(values, others, strict=True)
    return (
        torch.cat([(value - other).flatten() for value, other in pairs])
        .square()
        .mean()
        .sqrt()
        .item()
    )


# -- how much is compiled, and where it is called

# What the generated code does in the order of the graph, by what it calls.
CALLS = {
    r"fsdp\.all_gather\.default\(": "G",
    r"fsdp\.all_to_all\.default\(": "R",
    r"wait_tensor\.default\(": "w",
    r"(?:fsdp_region|partitioned_[fb]w_fsdp_unit)_[\d_]+\(\w+_args\)": "c",
}


def check_order(codes: list[str], graphs: list[Graph]) -> None:
    """The generated code has what the graphs have, in their order."""
    pattern = re.compile("|".join(f"({p})" for p in CALLS))
    found = [
        "".join([*CALLS.values()][m.lastindex - 1] for m in pattern.finditer(code))
        for code in codes
    ]
    assert found == [order for order in map(order_of, graphs) if order]  # units' graphs have none
    assert all(re.search("[GRw]c[GRw]", order) for order in found), found


def lowered(case: Case, regions: str) -> tuple[tuple[list[Tensor], Explanation], int]:
    """What `train` returns, and how many nodes Inductor lowers. Without its cache: of a graph that
    another test compiled it would lower none.
    """
    lower = GraphLowering.call_function
    counted = mock.patch.object(GraphLowering, "call_function", autospec=True, side_effect=lower)
    with inductor_config.patch(fx_graph_cache=False), counted as calls:
        result = train(case, regions)
    return result, calls.call_count


def order_of(graph: Graph) -> str:
    """A letter of `CALLS` for each node that has one."""
    letters = [(n, "G" if n.target in GATHERS else "R") for n in starts(graph)]
    letters += [(n, "w") for n in find(graph, WAIT)]
    letters += [(n, "c") for n in find(graph, INVOKE)]
    return "".join(letter for _, letter in sorted(letters))


@pytest.mark.usefixtures("fake_world")
def test_dynamic_shapes_are_compiled_in_place() -> None:
    """Nothing is computed: what dynamic shapes do to numbers is Inductor's alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(4, 0.0, checkpoints=False, older=False)
    for module in (*model.layers, model):
        fully_shard(module)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    tokens = torch.randint(20, (2, 9))
    with torch.no_grad():
        compiled(tokens)
    assert not any(graph.regions for graph in explain(model).graphs)
