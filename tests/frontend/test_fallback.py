"""Where a rank reaches Dynamo's limit and others do not, all of them run the unit eagerly from the
same call on.
"""

from __future__ import annotations

import gc
import re
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.harness import IS_2_11, mesh_of, quiet
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.flop_counter import FlopCounterMode

import compiled_fsdp
from compiled_fsdp import FullyShardedDataParallel, fully_shard
from compiled_fsdp.frontend import together
from compiled_fsdp.frontend.state import states_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

NUM_EXPERTS = 2
LIMIT = 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, tag: str) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * (1 + len(tag))


class Routed(nn.Module):
    """Each expert is a unit and gets the rows that are routed to it: none, one or many; the graph
    breaks in the router.
    """

    def __init__(self, num_experts: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, x: Tensor, route: Tensor, tag: str = "") -> Tensor:
        x = self.embed(x)
        for number, expert in enumerate(self.experts):
            rows = (route == number).nonzero().flatten()
            x = x.index_add(0, rows, expert(x[rows], tag))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """tags: of rank 1, which sees a new one in every step; rank 0 sees none.
    before: all ranks have run the model both ways before.
    """

    tags: bool = False
    before: bool = False
    mesh: str = "1d"
    api: str = "fully_shard"
    steps: int = 32


def built(shard: Callable[..., Any], case: Case) -> Any:
    torch.manual_seed(0)
    model = Routed()
    if case.api == "FSDP" and shard is fully_shard:
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Expert}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    for expert in model.experts:
        shard(expert, mesh=mesh_of(case.mesh))
    shard(model, mesh=mesh_of(case.mesh))
    return model


def inputs(step: int, case: Case) -> tuple[Tensor, Tensor, str]:
    """What this rank gets in a step: from 1 to 6 rows, each for any expert, or all for one."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    count = int(torch.randint(1, 7, (1,), generator=generator))
    route = torch.randint(0, NUM_EXPERTS, (count,), generator=generator)
    if step % 3 == 0:
        route = torch.full((count,), step % NUM_EXPERTS)
    return (
        torch.randn(count, 6, generator=generator),
        route,
        "x" * (step % 16) if case.tags and dist.get_rank() == 1 else "",
    )


def step_of(model: nn.Module, call: Callable[..., Tensor], given: tuple[Any, ...]) -> float:
    loss = call(*given).square().sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad * 0.001)
                p.grad = None
    return loss.item()


def look_often() -> None:
    """A training step takes longer than what these do."""
    together._watcher.period = 0.02


def train(case: Case) -> tuple[list[int], list[str]]:
    """Against stock and our eager runtime; forwards of each unit outside graphs, and what was said
    of the limit.
    """
    look_often()
    stock, eager, model = (
        built(stock_fully_shard, case),
        built(fully_shard, case),
        built(fully_shard, case),
    )
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        if case.before:
            for call in (model, model, compiled, compiled):
                call(torch.ones(4, 6), torch.tensor([0, 1, 1, 0])).sum().backward()
            for p in model.parameters():
                p.grad = None
        for number in range(case.steps):
            given = inputs(number, case)
            expected, ours = step_of(eager, eager, given), step_of(model, compiled, given)
            assert ours == expected
            assert ours == pytest.approx(step_of(stock, stock, given), rel=1e-5)
            time.sleep(0.02)
    states = [s for s in states_below(model) if s.unit.kind == "Expert" or "experts" in s.unit.name]
    assert {s.unit.runs_eagerly for s in states} == {True}
    return [s.unit.num_eager_forwards for s in states], [
        str(w.message) for w in said if "recompile_limit" in str(w.message)
    ]


def check(found: list[tuple[list[int], list[str]]], steps: int = 32) -> None:
    """Every unit is told of once on every rank, by itself or with the root, whose own frames may
    reach the limit first.
    """
    for forwards, said in found:
        assert forwards == found[0][0], "ranks ran a unit eagerly in other calls"
        assert all(0 < count < steps + 4 for count in forwards)
        subjects = [
            re.findall(
                r"unit '([\w.]+)'", text.partition(" was compiled ")[0].partition(" since ")[0]
            )[0]
            for text in said
        ]
        assert len(set(subjects)) == len(subjects), said
        assert {f"experts.{number}" for number in range(NUM_EXPERTS)} <= set(subjects) or any(
            "'Routed'" in text for text in said
        ), said
        assert all("last because" in text for text in said)


def test_after_both_ways(two: Pool) -> None:
    """Ranks that have not: `test_replicas`."""
    check(two.run(train, Case(tags=True, before=True)))


def test_four_ranks(four: Pool) -> None:
    check(four.run(train, Case()))


def test_replicas(four: Pool) -> None:
    """Rank 1 shares no group with rank 2."""
    check(four.run(train, Case(tags=True, mesh="hsdp")))


def test_fsdp1(two: Pool) -> None:
    """And after both ways."""
    check(two.run(train, Case(tags=True, before=True, api="FSDP")))


# -- a rank that never reaches the limit is told


def one_reaches_it() -> list[str]:
    look_often()
    model = built(fully_shard, Case())
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    route = torch.tensor([0, 0, 0, 1, 1, 1])
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        for number in range(12):
            compiled(
                torch.ones(6, 6), route, "x" * number if dist.get_rank() else ""
            ).sum().backward()
            time.sleep(0.05)
    return [str(w.message) for w in said if "recompile_limit" in str(w.message)]


def test_what_is_said(two: Pool) -> None:
    told, here = two.run(one_reaches_it)
    assert [text.split("'")[1] for text in sorted(told)] == [
        text.split("'")[1] for text in sorted(here)
    ]
    for number in range(NUM_EXPERTS):
        # units that reach it while ranks settle are told of together, for the first one's reason
        (text,) = (t for t in told if f"'experts.{number}'" in t)
        assert " runs eagerly from now on, on all ranks, since unit '" in text
        assert "' was compiled 2 times on rank 1, last because" in text
        (text,) = (t for t in here if f"'experts.{number}'" in t)
        assert "was compiled 2 times, which is torch._dynamo.config.recompile_limit" in text
        assert "compiled on until all ranks run it eagerly" in text


# -- frames that may gather, below an entry and above it


class Broken(Routed):
    """The graph breaks once; what follows is one graph of all experts."""

    def forward(self, x: Tensor, route: Tensor, tag: str = "") -> Tensor:
        x = self.embed(x)
        torch._dynamo.graph_break()
        for expert in self.experts:
            x = x + expert(x, tag)
        return self.head(x)


def resumed() -> tuple[list[int], list[str]]:
    """Rank 1 cannot go on to compile the rest of the root's forward."""
    look_often()
    torch.manual_seed(0)
    model, eager = Broken(3), Broken(3)
    eager.load_state_dict(model.state_dict())
    for each in (model, eager):
        for expert in each.experts:
            fully_shard(expert)
        fully_shard(each)
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        for number in range(12):
            given = torch.ones(2, 6), torch.zeros(2), "x" * number if dist.get_rank() else ""
            found = step_of(model, compiled, given), step_of(eager, eager, given)
            assert found[0] == found[1], (number, found)
            time.sleep(0.05)
    assert all(s.unit.runs_eagerly for s in states_below(model))
    texts = [str(w.message) for w in said if "recompile_limit" in str(w.message)]
    return [s.unit.num_eager_forwards for s in states_below(model)], texts


def test_a_frame_below_the_entry(two: Pool) -> None:
    (first, (told,)), (second, (here,)) = two.run(resumed)
    assert first == second
    assert "and 1 more runs eagerly from now on, on all ranks, since unit " in told
    assert "was compiled 2 times" in here


def larger(breaks: bool) -> list[str]:
    """Rank 1 sees more kinds of inputs than a function around the model is compiled for."""
    wholes = [built(fully_shard, Case()) for _ in range(2)]  # kept, or units change their names
    model, eager = (whole.experts[0] for whole in wholes)

    def loss(x: Tensor, tag: str) -> Tensor:
        x = x * (1 + len(tag))
        if breaks:
            torch._dynamo.graph_break()
        return model(x, "").sin()

    compiled = torch.compile(loss, backend="compiled_fsdp_eager")
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        for number in range(6):
            given = torch.ones(2, 6), "x" * number if dist.get_rank() else ""
            expected = step_of(eager, lambda x, tag: eager(x * (1 + len(tag)), "").sin(), given)
            assert step_of(model, compiled, given) == expected
    return [str(w.message) for w in said if "recompile_limit" in str(w.message)]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_larger_function(two: Pool, breaks: bool) -> None:
    """With a graph break before the call, Dynamo would give up with the function all that it
    calls.
    """
    nothing, (said,) = two.run(larger, breaks)
    assert nothing == []
    assert "loss (" in said
    assert (
        "It is compiled on for every new kind of input, since other ranks may be in a graph" in said
    )


# -- many units of one class


class Named(nn.Module):
    """The graph breaks inside, and what is left differs from block to block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.up, self.down = name, nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * len(self.name)
        torch._dynamo.graph_break()
        return x + self.down(y) + (0.1 if self.name.endswith("x") else 0.2)


class Counted:
    """A backend that counts the graphs it is given, and their runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, gm: Any, given: Any) -> Any:
        self.graphs += 1
        run = torch._dynamo.lookup_backend("compiled_fsdp_eager")(gm, given)

        def counted(*args: Any) -> Any:
            self.runs += 1
            return run(*args)

        return counted


def many(num_blocks: int) -> tuple[list[int], int]:
    """How many graphs ran in each step, and how many warnings were about a limit."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Named("x" * (number + 1)) for number in range(num_blocks)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    backend = Counted()
    compiled, runs = torch.compile(model, backend=backend), []
    torch._dynamo.config.recompile_limit = num_blocks - 1  # the pool takes settings back
    with quiet(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            before = backend.runs
            compiled(torch.ones(2, 6)).sum().backward()
            runs.append(backend.runs - before)
    return runs, sum("recompile_limit" in str(w.message) for w in said)


def test_many_units_with_a_graph_break_inside(two: Pool) -> None:
    """Each keeps two graphs, before the break and after it."""
    assert two.run(many, 4) == [([8, 8, 8], 0)] * 2


def part() -> list[str]:
    """A frame inside a unit that runs eagerly anyway: each rank gives it up for itself."""
    torch.manual_seed(0)
    model = Named("x")
    fully_shard(model)
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        for number in range(5):
            model.name = "x" * (number + 1 if dist.get_rank() else 1)
            compiled(torch.ones(2, 6)).sum().backward()
    return [str(w.message) for w in said if "recompile_limit" in str(w.message)]


def test_a_part_of_a_unit(two: Pool) -> None:
    nothing, (said,) = two.run(part)
    assert nothing == []
    assert "forward (" in said
    assert "was compiled 2 times inside unit 'Named'" in said


# -- nobody to settle with


def test_one_rank_falls_back_at_once(fake_world: None) -> None:
    """A fake group answers nothing; what ranks there would be is not known."""
    model = Named("x")
    fully_shard(model)
    model.forward = lambda x: model.up(x).sin() * len(model.name)
    compiled = torch.compile(model, backend="compiled_fsdp_eager")
    with (
        quiet(),
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(recompile_limit=LIMIT),
    ):
        warnings.simplefilter("always")
        for number in range(LIMIT + 2):
            model.name = "x" * (number + 1)
            compiled(torch.ones(2, 6))
    (text,) = (str(w.message) for w in said if "recompile_limit" in str(w.message))
    assert (
        "unit 'Named' was compiled 2 times, which is torch._dynamo.config.recompile_limit" in text
    )
    assert "\nIt runs eagerly. Results are the same." in text
    (state,) = states_below(model)
    assert state.unit.num_eager_forwards == 2


# -- what stays an error


def whole() -> None:
    model = built(fully_shard, Case()).experts[0]
    compiled = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    with quiet(), torch._dynamo.config.patch(recompile_limit=LIMIT):
        for number in range(LIMIT):
            compiled(torch.ones(2, 6), "x" * number)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit, match="fullgraph=True"):
            compiled(torch.ones(2, 6), "x" * LIMIT)


def test_fullgraph(two: Pool) -> None:
    two.run(whole)


def breaks(x: Tensor) -> Tensor:
    """Not of any sharded model."""
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_breaks_of_others_are_no_reason(fake_world: None, policy: str) -> None:
    """A model that nobody has compiled runs eagerly because of that, whatever else is compiled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit)

    compiled_fsdp.set_fallback(policy)
    try:
        torch.compile(breaks, backend="eager")(torch.ones(2, 4))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(torch.ones(2, 4)).sum().backward()
        assert not [str(w.message) for w in said if "runs eagerly" in str(w.message)]
        assert not any(state.unit.why_eager for state in states_below(model))
    finally:
        compiled_fsdp.set_fallback("warn")


class Raising(nn.Module):
    """Raises in some calls, or asks for what torch refuses to trace."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(6, 6), way

    def forward(self, x: Tensor, is_bad: bool = False) -> Tensor:
        y: Tensor = self.linear(x)
        if is_bad and self.way == "raises":
            raise ValueError("no such batch")
        if self.way == "refused":
            y = torch.cat(torch.distributed.nn.functional.all_gather(y))
        return y


WHYS = {
    "raises": r"given up the call for good at .*test_fallback\.py:\d+, in forward: tracing it "
    r"raised ValueError\(.*'no such batch'.*\)\. torch\._dynamo\.reset\(\)",
    "refused": r"tracing it raised RuntimeError\('torch\.distributed\.nn\.functional\.all_gather",
    "counts": r"it compiles nothing while _FlopCounterMode is on\. Results",
    "stance": r"set_stance\('eager_then_compile'\) lets the first call run as it is\. Results",
}


@pytest.mark.parametrize("way", [way for way in WHYS if way != "refused" or not IS_2_11])
def test_why_a_call_is_skipped(fake_world: None, way: str) -> None:
    """Dynamo counts no graph break of it."""
    torch._dynamo.reset()
    model: Any = Raising(way)
    model = fully_shard(model)
    call = torch.compile(model, backend="compiled_fsdp_eager")
    x = torch.ones(2, 6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "counts":
            call(x)
            with FlopCounterMode(display=False):
                call(x)
        elif way == "stance":
            with torch.compiler.set_stance("eager_then_compile"):
                call(x)
                call(torch.ones(3, 6))
        elif way == "raises":
            call(x)
            with pytest.raises(ValueError, match="no such batch"):
                call(x, True)
        else:
            call(x)
    said = [str(w.message) for w in caught if "runs eagerly" in str(w.message)]
    assert len(said) == 1, said
    assert re.search(WHYS[way], said[0]), said


def test_what_is_known_of_a_call_that_is_skipped_holds_no_model(fake_world: None) -> None:
    torch._dynamo.reset()
    model: Any = fully_shard(Raising("raises"))
    call = torch.compile(model, backend="compiled_fsdp_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(torch.ones(2, 6))
        with pytest.raises(ValueError, match="no such batch"):
            call(torch.ones(2, 6), True)
    held = weakref.ref(model)
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert held() is None
