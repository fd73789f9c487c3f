"""Memory budgets of random small models: what is compiled in the end fits wherever any number of
kept parameters, and of saved activations, does, and where none does, it is the least, and said.

Keeping a parameter may need less than gathering it again: in half of these models nothing kept is
not the least. A joint graph is traced once, and goes through the driver and the partitioner as
often as there are budgets; nothing is run.
"""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import compiled_fsdp
from compiled_fsdp import MixedPrecisionPolicy, compile_step, errors, fully_shard, planned
from compiled_fsdp.compiler import backend, budget, driver, splitting
from compiled_fsdp.compiler.trial import copied
from compiled_fsdp.ir.graph import phase_of
from compiled_fsdp.planning.costs import Costs, Link
from compiled_fsdp.planning.memory import profile, profile_step
from compiled_fsdp.planning.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule

BY_COSTS = {
    **dict.fromkeys(("prefetch", "backward_prefetch", "reduces_in_flight", "split_bytes")),
    "costs": Costs(3e8, 8e8, 2e-6, (("0", Link(1e-6, 1e8)),)),
}
KINDS = ("linear", "two", "wide", "normed", "masked")


class Block(nn.Module):
    """A weight that is read as it is, or behind a mask, and so on."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        self.kind, has_bias = rng.choice(KINDS), rng.random() < 0.3
        inner = rng.choice((1, 2, 4)) * width if self.kind == "wide" else width
        self.first = nn.Linear(width, inner, bias=has_bias)
        self.second = nn.Linear(inner, width, bias=has_bias) if self.kind != "linear" else None
        self.norm = nn.LayerNorm(width) if self.kind == "normed" else None
        self.register_buffer("mask", torch.ones(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "masked":
            x = torch.tanh(x @ (self.first.weight * self.mask.to(x.dtype)))
        h = torch.tanh(self.first(x if self.norm is None else self.norm(x)))
        if self.second is None:
            return h
        return h * self.second(x) if self.kind == "two" else x + self.second(h)


class Captured(Exception):
    """There is a joint graph: nothing else of the compilation is wanted."""


class Subject:
    """A random model's joint graph, and the plan that it is compiled under."""

    def __init__(
        self,
        seed: int,
        *,
        is_step: bool,
        has_costs: bool,
        is_sliced: bool,
        is_recomputed: bool = False,
    ) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        torch._dynamo.reset()
        width, rows = rng.choice((8, 32)), rng.choice((1, 4, 64))
        model = nn.Sequential(*(Block(rng, width) for _ in range(2)))
        policy = MixedPrecisionPolicy(param_dtype=rng.choice((None, torch.bfloat16)))
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=2 if is_sliced else True, mp_policy=policy)
        distances: dict[str, Any] = {
            "bucket_bytes": rng.choice((0, 1 << 14)),
            "prefetch": rng.choice((0, 1)),
            "backward_prefetch": rng.choice((0, 0.5, 1)),
            "reduces_in_flight": rng.choice((0, 0.5, 1)),
        }
        self.changes = {**distances, **(BY_COSTS if has_costs else {})}
        self.budgeted: dict[str, Any] = {"recompute": "budget"} if is_recomputed else {}
        x, self.found = torch.randn(rows, width), []
        with (
            mock.patch.object(backend, "_partition", self._take),
            mock.patch.object(backend, "_partition_step", self._take_step),
            planned(**self.changes),
            suppress(Exception),  # Dynamo wraps it as it likes; below there is one, or none
        ):
            if is_step:
                optimizer = torch.optim.AdamW(model.parameters())
                compile_step(
                    model,
                    optimizer,
                    lambda model, x: model(x).float().square().mean(),
                    backend="compiled_fsdp_eager",
                )(x)
            else:
                torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)(x)
        ((self.joint, self.step, self.num_outputs),) = self.found
        with planned(memory_budget=1 << 40, **self.budgeted, **self.changes) as plan:
            fitted = budget._fit_here(copied(self.joint), plan, is_fused=False, step=self.step)
        self.candidates = fitted.candidates

    def _take(self, joint: GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> None:
        self.found.append((joint, None, num_fwd_outputs))
        raise Captured

    def _take_step(self, step: Any, joint: Any, _: Any, *, num_fwd_outputs: int, **__: Any) -> None:
        self.found.append((joint, step, num_fwd_outputs))
        raise Captured

    def record(self, plan: Plan, num: int) -> Plan:
        """With the first candidates kept."""
        return budget._with(plan, self.candidates, num)

    def compiled(self, room: float, num: int | None = None) -> tuple[int, list[str]]:
        """The peak of what is compiled, and warnings: with so many candidates kept, or as the
        budget decides.
        """
        finals: list[Any] = []

        def note(gm: GraphModule, _: Plan) -> None:
            finals.append(copied(gm).graph)

        def fixed(_: Any, plan: Plan, **__: Any) -> Plan:
            return self.record(plan, num or 0)

        errors._said.clear()
        with (
            planned(memory_budget=room, **self.budgeted, **self.changes),
            mock.patch.object(driver, "fit_budget", budget.fit_budget if num is None else fixed),
            compiled_fsdp.pipeline(note, before="summarize"),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            options, joint = {"num_fwd_outputs": self.num_outputs}, copied(self.joint)
            if self.step is None:
                halves = backend._partition(joint, (), **options)
            else:
                halves = backend._partition_step(self.step, joint, (), **options)[:1]
            for half in halves:
                driver.run_half(half)
        peak = profile(finals[0]).peak if self.step else profile_step(*finals).peak
        return peak, [str(w.message) for w in said if "memory_budget" in str(w.message)]


@pytest.fixture
def four() -> Iterator[None]:
    """This process is rank 0 of 4, which move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


CASES = {
    "halves": (range(2), {}),
    "a whole step": (range(2, 3), {"is_step": True}),
    "from costs": (range(3, 4), {"has_costs": True}),
    "slices": (range(4, 5), {"is_sliced": True}),
    "a whole step from costs": (range(5, 6), {"is_step": True, "has_costs": True}),
    "activations": (range(6, 8), {"is_recomputed": True}),
    "activations, slices, from costs": (
        range(8, 9),
        {"is_recomputed": True, "is_sliced": True, "has_costs": True},
    ),
    "activations of a whole step": (range(9, 10), {"is_recomputed": True, "is_step": True}),
}


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize("case", CASES)
def test_what_is_compiled_fits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_fsdp.planning.plan_fields.LEAST_BUDGET", 0)
    monkeypatch.delenv("COMPILED_FSDP_VERIFY")  # every pass, as often as there are budgets
    seeds, options = CASES[case]
    defaults = {"is_step": False, "has_costs": False, "is_sliced": False}
    least_by_keeping = []
    for seed in seeds:
        subject = Subject(seed, **{**defaults, **options})
        peaks = [subject.compiled(1 << 40, n)[0] for n in range(len(subject.candidates) + 1)]
        least, greatest = min(peaks), max(peaks)
        least_by_keeping.append(least < peaks[0])
        for room in {least, (least + greatest) // 2, max(least, peaks[0] - 1)}:
            peak, said = subject.compiled(room)
            assert peak <= room, (seed, room, peaks)
            assert not said, (seed, room, peaks)
        peak, said = subject.compiled(least - 1)
        assert peak == least, (seed, peaks)
        assert "and a step needs at least" in said[0], (seed, peaks)
        for share in (0.0, 0.5) if not subject.budgeted else ():
            peak, said = subject.compiled(share)
            room = peaks[0] + share * max(0, peaks[-1] - peaks[0])
            assert peak <= 1.05 * room, "the greatest peak is as expected, not tried"
            assert not said, (seed, share, peaks)
    assert any(least_by_keeping) or case != "halves", "nothing that could have gone wrong"


@pytest.mark.usefixtures("four")
def test_parts_of_forward_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first trial, for the others and for what is compiled; counted."""
    monkeypatch.setattr("compiled_fsdp.planning.plan_fields.LEAST_BUDGET", 0)
    subject = Subject(3, is_step=False, has_costs=True, is_sliced=False)
    peak, _ = subject.compiled(1 << 40, 0)
    tried, decided = [], []
    original, fit_split = splitting._tried, driver.fit_split

    def counted(gm: GraphModule, *arguments: Any) -> GraphModule:
        tried.append(phase_of(gm.graph))
        return original(gm, *arguments)

    def noted(gm: GraphModule, plan: Plan, **executor: Any) -> Plan:
        fitted = fit_split(gm, plan, **executor)
        decided.append((phase_of(gm.graph), fitted.split_bytes))
        return fitted

    monkeypatch.setattr(splitting, "_tried", counted)
    monkeypatch.setattr(driver, "fit_split", noted)
    splitting._decided.clear()
    subject.compiled(peak - 1)
    assert tried.count("forward") == 1, tried
    assert tried.count("backward") > 1, tried
    assert dict(decided)["forward"] in splitting._decided.values()


@pytest.mark.usefixtures("four")
def test_what_trials_do_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a user's needs more."""
    monkeypatch.setattr("compiled_fsdp.planning.plan_fields.LEAST_BUDGET", 0)
    subject = Subject(0, is_step=False, has_costs=False, is_sliced=False)
    peak, _ = subject.compiled(1 << 40, 0)

    def waste(gm: GraphModule, _: Plan) -> None:
        end = next(iter(reversed(gm.graph.nodes)))
        first = end.all_input_nodes[0]
        with gm.graph.inserting_before(end):
            big = gm.graph.call_function(torch.ops.aten.clone.default, (first,))
        big.meta["val"] = first.meta["val"].new_empty(1 << 16)

    with compiled_fsdp.pipeline(waste, before="free"):
        _, said = subject.compiled(peak)
    assert any("that was compiled needs" in text for text in said), said
    assert "passes of yours" in said[0]
