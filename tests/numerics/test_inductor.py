"""The default backend: the same numbers within rounding, our passes in its graphs, a user's own
hook beside them.

Inductor fuses operations, and a fused kernel keeps intermediate values in registers and contracts
multiply-adds; so results differ in the last bits. With SGD these stay that small (AdamW would turn
a zero gradient's rounding into a whole step).
"""

from __future__ import annotations

import inspect
import re
import time
from dataclasses import fields
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from kit.graphs import captured, uncached
from kit.harness import ROUNDING, SLOW, Options, batch_of, check_parity, make
from kit.models import Net, loss_of
from kit.oracle import batch
from kit.pool import Pool
from torch import nn
from torch._inductor import comms
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.nn import functional as F

from compiled_fsdp import Plan, compile_step, fully_shard, pipeline, planned
from compiled_fsdp.compiler import inductor, pin_order
from compiled_fsdp.ir.collectives import GATHERS, STARTS, WAIT
from compiled_fsdp.ir.fusion import readers
from compiled_fsdp.ir.graph import find, is_matmul, starts
from compiled_fsdp.ir.schema import REDUCE_GRAD, UNSHARD
from compiled_fsdp.planning.costs import Costs, Link


def test_gpt(two: Pool) -> None:
    options = Options("gpt_of_one_layer", steps=3, optimizer="sgd")
    two.run(check_parity, options, ("stock", "unsharded"), ("inductor",), *ROUNDING, timeout=SLOW)


def test_odd_sizes_in_bf16(two: Pool) -> None:
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = Options("odd", steps=3, optimizer="sgd", policies=(policy,))
    # Inductor keeps fused bf16 chains in fp32, stock rounds each to 8 bits: relative 2^-8 per
    # rounding, a few deep.
    two.run(check_parity, options, ("stock",), ("inductor",), 0.03, 3e-3, timeout=SLOW)


def test_hsdp(four: Pool) -> None:
    options = Options("odd", steps=2, optimizer="sgd", mesh="hsdp", num_backwards=2)
    four.run(check_parity, options, ("stock",), ("inductor",), *ROUNDING, timeout=SLOW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_that_comes_late(two: Pool, dtype: torch.dtype) -> None:
    """What a communication sends from is not written to before it is awaited: buffers of a cast, or
    of a part of a unit.
    """
    two.run(comes_late, dtype, timeout=SLOW)


def comes_late(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=Policy(param_dtype=dtype, reduce_dtype=torch.float32))
    calls = torch.compile(models[0], fullgraph=True), models[1]
    for step in range(3):
        results = []
        for model, call in zip(models, calls, strict=True):
            model.zero_grad()
            for half in ("forward", "backward"):
                if call is not model and dist.get_rank() == 1:
                    time.sleep(0.2)  # gloo sends when the other side is ready to receive
                if half == "forward":
                    loss = call(batch(step=step)).float().square().mean()
                else:
                    loss.backward()
            results.append([loss.detach(), *(p.grad.to_local() for p in model.parameters())])
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(
                ours, eager, rtol=3e-2, atol=1e-6 if dtype == torch.float32 else 1e-2
            )


# -- hooks


def test_users_hook_runs_too(two: Pool) -> None:
    two.run(with_users_hook, timeout=SLOW)


class Recorder(CustomGraphPass):
    """A user's pass, set before `fully_shard`."""

    def __init__(self) -> None:
        self.seen: list[set[Any]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append({n.target for n in graph.nodes})

    def uuid(self) -> None:
        return None


def with_users_hook() -> None:
    before = Recorder()
    with (
        captured(inductor) as graphs,
        inductor_config.patch(post_grad_custom_post_pass=before, joint_custom_post_pass=None),
    ):
        _, call, _ = make("inductor", Options("one_unit"))
        loss_of(call(*batch_of("one_unit", 0))).backward()
    after = [{n.target for n in graph.nodes} for graph in graphs]
    for seen, has_ours, has_collectives in ((before.seen, True, False), (after, False, True)):
        assert len(seen) == 2, "forward and backward"
        for targets in seen:
            assert bool(targets & {UNSHARD, REDUCE_GRAD}) == has_ours
            assert bool(targets & set(STARTS)) == has_collectives


def test_buffers_live_until_their_collective_is_awaited(two: Pool) -> None:
    two.run(sent_buffers, timeout=SLOW)


def sent_buffers() -> None:
    """In mixed precision what is sent is a buffer of the graph's: nothing may be written to it
    before, and nothing kept after.
    """
    policy = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def train() -> None:
        _, call, _ = make("inductor", Options("equal_units", policies=(policy,)))
        loss_of(call(*batch_of("equal_units", 0))).backward()

    _, codes = run_and_get_code(train)
    for code, kind in zip(codes, ("all_gather", "all_to_all"), strict=True):
        ends = ends_of_sent(code, kind)
        assert ends, f"{kind}: the units cast before they communicate"
        wrong = {name: when for name, when in ends.items() if when != "awaited, freed"}
        assert not wrong, f"{kind}: {wrong}"


def ends_of_sent(code: str, kind: str) -> dict[str, str]:
    """For each buffer that a collective sends: whether its life ends in the code, after the
    wait.
    """
    found = {}
    for start in re.finditer(rf"(buf\d+) = torch\.ops\.fsdp\.{kind}\.default\((.+)\n", code):
        renamed = re.search(rf"(buf\d+) = {start[1]}\n", code)  # before torch 2.15
        result = renamed[1] if renamed else start[1]
        wait = re.search(rf"wait_tensor\.default\({result}\)", code)
        assert wait is not None
        for name in re.findall(r"buf\d+", start[2]):
            end = re.search(rf"\bdel {name}\b", code)
            found[name] = (
                "kept"
                if end is None
                else "awaited, freed"
                if end.start() > wait.start()
                else "under way"
            )
    return found


def test_buffers_that_others_gather_are_not_reused(two: Pool) -> None:
    two.run(gather_without_a_unit, timeout=SLOW)


def gather_without_a_unit() -> None:
    """A functional all-gather of the user's own, as tensor parallelism has them: ours carries it
    out over gloo.
    """

    def compute(x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather_tensor(x @ x, 0, dist.group.WORLD)
        y = x
        for _ in range(3):
            y = y @ x
        return gathered[:8] + y

    fully_shard(torch.nn.Linear(2, 2))  # installs the passes
    _, (code,) = run_and_get_code(torch.compile(compute, fullgraph=True), torch.rand(8, 8))
    assert set(ends_of_sent(code, "all_gather").values()) == {"awaited, freed"}


# -- the order of the plan

MACHINE = Costs(flops=1e9, bandwidth=1e9, overhead=1e-6, links=(("0", Link(1e-4, 2e7)),))
CALLS = {
    r"fsdp\.all_gather\.default\(": "G",
    r"fsdp\.all_to_all\.default\(": "R",
    r"wait_tensor\.default\(": "w",
    r"extern_kernels\.(mm|addmm|bmm)\(": "m",
}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, 1, 1, 0, regions="off"),
        Plan(None, None, None, 0, costs=MACHINE, regions="off"),
    ],
    ids=["distances", "costs"],
)
def test_the_planned_order_is_in_the_generated_code(two: Pool, plan: Plan) -> None:
    two.run(planned_order, plan, timeout=SLOW)


def planned_order(plan: Plan) -> None:
    """Collectives, waits and matmuls follow each other in the code as they do in the final
    graphs.
    """
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96)) for _ in range(5))
    )
    for block in model:
        fully_shard(block)
    with (
        captured(inductor) as graphs,
        planned(**{f.name: getattr(plan, f.name) for f in fields(plan)}),
        uncached(),
    ):
        call = torch.compile(fully_shard(model), fullgraph=True)
        _, codes = run_and_get_code(lambda: call(torch.randn(8, 96)).square().mean().backward())
    pattern = re.compile("|".join(f"({p})" for p in (p.replace("(mm", "(?:mm") for p in CALLS)))
    found = [
        "".join([*CALLS.values()][m.lastindex - 1] for m in pattern.finditer(code))
        for code in codes
    ]
    assert found == list(map(order_of, graphs))
    assert found[0].count("m") == 10
    assert list(map(num_hidden, graphs)) == [4, 8], (
        "all gathers but the first in forward; in backward, gathers and reductions"
    )


def order_of(graph: Any) -> str:
    """A letter of `CALLS` for each node that has one."""
    letters = [(n, "G" if n.target in GATHERS else "R") for n in starts(graph)]
    letters += [(n, "w") for n in find(graph, WAIT)]
    letters += [(n, "m") for n in graph.nodes if is_matmul(n)]
    return "".join(letter for _, letter in sorted(letters))


def num_hidden(graph: Any) -> int:
    """Collectives that are under way during a matmul."""
    pairs = [(start, next(iter(start.users))) for start in starts(graph)]
    matmuls = [n for n in graph.nodes if is_matmul(n)]
    return sum(any(start < m < wait for m in matmuls) for start, wait in pairs)


def test_gathered_buffers_end_where_the_plan_ends_them(two: Pool) -> None:
    """Of a whole step, whose backward reads the rows of the table, too: Inductor would look them up
    again, and so keep the whole table until then.
    """
    two.run(ends_of_gathered, timeout=SLOW)


class Lookup(nn.Module):
    """Residual blocks behind a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


def ends_of_gathered() -> None:
    """How many products stand before the last kernel that reads what was gathered."""
    model = Lookup()
    for unit in (model.table, *model.blocks):
        fully_shard(unit)
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
    step = compile_step(model, optimizer, lambda m, ids: m(ids).square().mean(), max_ahead_bytes=0)
    with captured(inductor) as graphs, planned(regions="off", bucket_bytes=0), uncached():
        _, (code, *_) = run_and_get_code(step, torch.arange(40).view(4, 10))
    products = [m.start() for m in re.finditer(r"extern_kernels\.(mm|addmm|bmm)\(", code)]
    ends = []
    for gather in re.finditer(r"(buf\d+) = torch\.ops\.fsdp\.all_gather\.default\(", code):
        renamed = re.search(rf"(buf\d+) = {gather[1]}\n", code)  # before torch 2.15
        name = renamed[1] if renamed else gather[1]
        reads = [m.start() for m in re.finditer(rf"(?<!del )\b{name}\b(?!; del)", code)]
        ends.append(sum(product < reads[-1] for product in products))
    (graph,) = graphs
    matmuls = [n for n in graph.nodes if is_matmul(n)]
    planned_ends = []
    for gather in find(graph, *GATHERS):
        last = max(reader for wait in gather.users for reader in readers(wait))
        planned_ends.append(sum(matmul < last for matmul in matmuls))
    assert len(ends) == 4, "backward needs no table; where the step turns, one is kept"
    assert ends == planned_ends


class Gated(nn.Module):
    """A feed-forward network of three matrices, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 96, bias=False), nn.Linear(8, 96, bias=False)
        self.down, self.head = nn.Linear(96, 8, bias=False), nn.Linear(8, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.down(F.silu(self.gate(x)) * self.up(x)))
        return logits


def centered(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss of what rows differ from their mean, and of one column."""
    return (logits - logits.mean(-1, keepdim=True)).square().mean() - logits[:, 3].mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, centered])
def test_backward_begins_behind_the_head(two: Pool, loss: Any) -> None:
    """Of a whole step: what backward computes from gate and up alone is not made in forward, where
    a kernel has read both; and the gradient of the logits is written over the logits. Of a centered
    loss, Inductor would compute it beside the means, before the column is read.
    """
    two.run(backward_behind_forward, loss, timeout=SLOW)


def backward_behind_forward(loss: Any) -> None:
    def loss_fn(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(model(x), labels)
        return found

    model = Gated()
    fully_shard(model.head)
    step = compile_step(fully_shard(model), torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    batch = torch.rand(7, 8), torch.arange(7)
    with uncached():
        _, (code, *_) = run_and_get_code(step, *batch)
    products = [m.start() for m in re.finditer(r"extern_kernels\.mm\(", code)]
    assert len(products) == 4 + 6, "backward has two for each, but none for the input"

    def made(code: str, width: int) -> int:
        return len(re.findall(rf"= empty_strided_cpu\(\(7, {width}\)", code))

    forward = code[: products[3]]
    assert [made(forward, 96), made(forward, 40)] == [3, 1], "gate, up, their product; logits"
    assert made(code, 40) == 1, "the gradient of the logits is written over them"


@pytest.mark.skipif(not hasattr(comms, "simple_overlap"), reason="torch has it since 2.15")
def test_only_others_collectives_are_moved(two: Pool) -> None:
    """Inductor's own overlap, which follows our order, leaves a graph of ours as it is, and is at
    work in others'.
    """
    two.run(what_is_moved, timeout=SLOW)


def what_is_moved() -> None:
    def alone(x: torch.Tensor) -> torch.Tensor:
        y = (x @ x).sin()
        return all_gather_tensor(x, 0, dist.group.WORLD)[:8] + y

    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    moved: list[int] = []
    move = inspect.unwrap(comms.simple_overlap)

    def count(nodes: list[Any]) -> list[Any]:
        result = move(nodes)
        moved.append(sum(a is not b for a, b in zip(nodes, result, strict=True)))
        return result

    with (
        mock.patch.object(comms, "simple_overlap", count),
        uncached(),
    ):
        pin_order.keep_simple_overlap_out()
        torch.compile(model, fullgraph=True)(torch.rand(8, 8)).sum().backward()
        assert moved == [], "forward and backward are ours"
        torch.compile(alone, fullgraph=True)(torch.rand(8, 8))
    assert len(moved) == 1
    assert moved[0] > 0, "the user's own gather starts before what precedes it"


def test_small_parameters_are_read_in_their_bucket(two: Pool) -> None:
    two.run(strided_reads, timeout=SLOW)


def step_of_norms(call: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = call(torch.linspace(-1, 1, 8 * 24).view(8, 24)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def strided_reads() -> None:
    """No kernel copies what a norm reads; matmuls get their operands in one piece; the numbers
    stay.
    """
    losses: dict[str, list[float]] = {}
    copies: dict[str, list[int]] = {}
    for how in ("copy", "strided"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(24, 24, bias=False), nn.LayerNorm(24)) for _ in range(2)]
        model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block)
        call = torch.compile(fully_shard(model), fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            planned(copy_out=how, bucket_bytes=0),
            uncached(),
        ):
            first, codes = run_and_get_code(step_of_norms, call, optimizer)
        copies[how] = [code.count("copy_columns.default(") for code in codes]
        losses[how] = [first, step_of_norms(call, optimizer)]
    assert copies == {
        "copy": [6, 4],
        "strided": [2, 1],
    }  # backward reads a weight, and of the norms what it computes again
    torch.testing.assert_close(
        losses["strided"], losses["copy"], rtol=ROUNDING[0], atol=ROUNDING[1]
    )


def test_copies_into_buckets_are_calls(two: Pool) -> None:
    two.run(called_copies, timeout=SLOW)


def called_copies() -> None:
    """No kernel is compiled for them, however buckets differ; the numbers are the same."""
    kernels, losses = {}, {}
    for without in ("call_copies", ""):
        torch.manual_seed(0)
        widths = [24, 64, 48, 64]
        blocks = [
            nn.Sequential(nn.Linear(n, m, bias=False), nn.LayerNorm(m)) for n, m in pairwise(widths)
        ]
        model = nn.Sequential(*blocks)
        for block in blocks:
            fully_shard(block)
        call = torch.compile(fully_shard(model), fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            planned(reductions="reduce_scatter"),
            pipeline(without=without or ()),
            uncached(),
            torch._inductor.config.patch(disable_padding_cpu=True),  # as a CPU counts kernels
        ):
            first, codes = run_and_get_code(step_of_norms, call, optimizer)
        kernels[without] = {k for code in codes for k in re.findall(r"r'''.*?'''", code, re.DOTALL)}
        losses[without] = [first, step_of_norms(call, optimizer)]
    # One that joins flat buffers, one that joins gradients, and a division for each unit.
    found = {k: len(v) for k, v in kernels.items()}
    assert found == {"call_copies": 11, "": 11 - 2 - 3}, found
    assert losses[""] == losses["call_copies"]
