"""Random programs: every kind equals the unsharded model or stock, or says by name why not; planted
faults are found.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from kit.harness import IS_2_11
from kit.variants import VARIANTS
from programs.draw import (
    STEPS,
    make,
    make_alone,
    make_routed,
    make_script,
    make_step,
)
from programs.hunt import Hunter
from programs.kinds import Outcome
from programs.legal import is_legal
from programs.order import OPEN, as_always, words
from programs.planted import PLANTS, SHOWN_BY, can_show
from programs.program import LAYERS, Program
from programs.shrink import smaller, smallest
from programs.source import WAYS, Script, read, render, script
from programs.statements import FORWARD, LOOP, OPTIMIZERS, SETUP
from programs.verdict import TORCHS_OWN, Verdict, judge, quirk_of
from torch._dynamo.exc import Unsupported

if TYPE_CHECKING:
    from kit.pool import Pool

NUM_PROGRAMS, CHUNK = (
    int(os.environ.get("RANDOM_PROGRAMS", "100")),
    5,
)  # more: benchmarks/results/random_programs.md
# They say all that there is (`order.py`), and `make test` runs no more (`kit/variants.py`).
ALWAYS = (
    75, 300, 88, 52, 62, 84, 43, 208, 438, 498, 34, 80, 190, 98, 116, 249, 102, 113, 620, 44,
    175, 435, 158, 592, 38, 588, 89, 369, 378, 91, 10, 60, 702, 148, 228, 579, 117, 121, 200, 68,
)  # fmt: skip
NUM_ALWAYS = len(ALWAYS)
REST = (seed for seed in range(NUM_PROGRAMS + len(OPEN)) if seed not in {*ALWAYS, *OPEN})
SEEDS = [*ALWAYS, *REST][:NUM_PROGRAMS]
SEEDS_ROUTED = (0, 2, 3)  # more: python tests/programs --routed
SEEDS_ALONE = (1, 14)  # more: python tests/programs --alone
SEEDS_STEP = (0, 1)  # more: python tests/programs --step
SEEDS_SCRIPTS = (1,)  # more: python tests/programs --scripts
# What whole scripts are made of, a few of them at a time.
SCRIPTS = (
    Program(
        forward=("adapter@a", "mode@a", "call@a", "flex@b", "call@b", "flex_mask@b"),
        loop=("eval_loss", "merge"),
        units=("a", "base"),
        way="in_place",
    ),
    Program(setup=("shard_again",), loop=("modes", "adversary", "file"), optimizer="adamw"),
    Program(
        forward=("call@a", "adapter_of_weight@b", "call@b"),
        loop=("adversary_penalty", "averaged_ema"),
        units=(),
    ),
    Program(loop=("eval_trains",), cells=True),
    Program(loop=("averaged",)),
    Program(
        forward=("gradient_in_hook@a", "call@b", "checkpoint_itself@b"), steps=1, kinds=("eager",)
    ),
)
# Seeds of programs, or programs, in which a planted fault was found, and without it none.
FOUND: dict[str, int | Program] = {
    "substitutions_are_ignored": 300,
    "ties_after_sharding_are_forgotten": Program(setup=("tie_after",)),
    "iterating_yields_sharded_parameters": 75,
    "every_backward_counts_as_whole": 342,
    "full_parameters_outlive_a_step": 795,
    "collectives_of_the_user_are_judged": 176,
    "compiling_in_place_begins_in_torch": 300,
    "reads_stay_inside_of_branches": 300,
    "whole_steps_keep_gradients": 49,
    "writes_in_a_trace_are_not_settled": Program(
        forward=("read@a", "clamp_@a", "call@a"), layers=("linear",), units=()
    ),
    "writes_without_a_version_are_missed": Program(
        forward=("momentum_data_mul_@a", "call@a"), units=("a", "slow")
    ),
    "what_is_transformed_is_not_reduced": Program(
        forward=("vmap@a", "call@a"), layers=("linear",), units=("a",)
    ),
    "unused_heads_get_zeros": Program(heads=True, optimizer="adamw"),
    "a_traced_backward_leaves_nothing": Program(way="train_traced", fullgraph=True),
}
# Whose programs another check refuses by now, where they are equal without the fault.
REFUSED = ("ties_after_sharding_are_forgotten",)
RAISE_ON_2_11 = ("what_is_transformed_is_not_reduced", "a_traced_backward_leaves_nothing")


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> dict[int, Pool]:
    return {2: request.getfixturevalue("two"), 4: request.getfixturevalue("four")}


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, CHUNK))
def test_random_programs(pools: dict[int, Pool], first: int, pytestconfig: pytest.Config) -> None:
    hunter = Hunter(pools)
    for seed in SEEDS[first : first + CHUNK]:
        program = make(seed)
        if not pytestconfig.getoption("--all"):
            program = as_always(program)
        for fault in hunter.check(script(program)).faults[:1]:
            small, verdict = hunter.shrink(program, fault.kind)
            raise AssertionError(
                f"seed {seed}: {fault.kind} {verdict.detail}\n"
                f"{script(small).header()}{render(small)}"
            )


@pytest.mark.parametrize("seed", SEEDS_ROUTED)
def test_random_routed_programs(pools: dict[int, Pool], seed: int) -> None:
    this = script(replace(make_routed(seed), kinds=("eager", "compiled")))
    assert not Hunter(pools).check(this).faults


@pytest.mark.parametrize("seed", SEEDS_ALONE)
def test_random_programs_of_which_one_rank_has_no_graph(pools: dict[int, Pool], seed: int) -> None:
    assert not Hunter(pools).check(script(make_alone(seed))).faults


@pytest.mark.parametrize("seed", SEEDS_STEP)
def test_random_steps(pools: dict[int, Pool], seed: int) -> None:
    assert not Hunter(pools).check(script(make_step(seed))).faults


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_fault_is_found(pools: dict[int, Pool], name: str) -> None:
    found = FOUND[name]
    program = found if isinstance(found, Program) else make(found)
    assert can_show(program, name)
    if IS_2_11 and name in RAISE_ON_2_11:
        pytest.skip("torch 2.11 raises in this program's backward, announced or as stock does")
    this = script(replace(program, kinds=("eager", "compiled")))
    if found not in SEEDS[:NUM_ALWAYS]:  # else `test_random_programs` sees that it has none
        assert not Hunter(pools).check(this).faults
    with_fault = Hunter(pools, name).check(this)
    if name in REFUSED:
        assert {verdict.word for verdict in with_fault.verdicts} == {"refused"}
    else:
        assert with_fault.faults


@pytest.mark.parametrize("which", range(len(SCRIPTS) + len(SEEDS_SCRIPTS)))
def test_what_scripts_are_made_of(pools: dict[int, Pool], which: int) -> None:
    program = [*SCRIPTS, *map(make_script, SEEDS_SCRIPTS)][which]
    assert is_legal(program)
    assert not Hunter(pools).check(script(program)).faults


def test_every_planted_fault_says_where_it_can_show() -> None:
    assert set(PLANTS) == set(SHOWN_BY)
    assert set(FOUND) <= set(PLANTS)


def test_the_programs_cover_everything() -> None:
    """Those that `make test` runs: each statement, way to compile, optimizer, backend, number of
    ranks and precision.
    """
    programs = [
        *(as_always(make(seed)) for seed in ALWAYS),
        *map(make_routed, SEEDS_ROUTED[:2]),
        *map(make_alone, SEEDS_ALONE[:1]),
        *SCRIPTS,
    ]
    said = set().union(*map(words, programs))
    kinds = {"eager", "compiled", "aot_eager", "inductor"}
    flags = {
        (name, on)
        for name in ("low", "heads", "fullgraph", "dynamic", "replicas", "step", "cells")
        for on in (True, False)
    }
    worlds = {("world", 2), ("world", 4)}
    assert not {*FORWARD, *SETUP, *LOOP, *WAYS, *OPTIMIZERS} - said
    assert not (kinds | flags | worlds) - said
    gone = {row for row in VARIANTS if "test_programs.py::test_random_programs[" in row}
    rest = range(NUM_ALWAYS, 100, CHUNK)
    names = {f"programs/test_programs.py::test_random_programs[{first}]" for first in rest}
    assert gone == names, "what variants.py leaves out is the rest"


def test_torch_transforms_nothing_that_is_compiled_by_itself() -> None:
    """What it says of a module that is sharded counts as torch's own (`verdict.TORCHS_OWN`)."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    layer = Layer()
    layer.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported) as caught:
        torch.vmap(layer)(torch.ones(2, 3))
    assert any(words in str(caught.value) for words in TORCHS_OWN)


def test_what_explains_a_difference() -> None:
    """Nothing that every script says; an announcement that is about it; what torch alone compiles
    to the same.
    """
    script = Script(
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
        "self.a = nn.Linear(4, 4)\n"
    )
    assert not quirk_of(script.source)
    right, wrong = (
        [Outcome([("grad a.weight", None)])],
        [Outcome([("grad a.weight", torch.ones(1))])],
    )
    lost = "compiled_fsdp: parameter a.weight is written to in place, so the write is lost"
    zeros = "compiled_fsdp: a graph gives parameter a.weight zeros for gradients instead of None"
    tied = "compiled_fsdp: parameter a.weight is tied. Sharded weights stay tied"
    assert (
        judge("aot_eager", {"aot_eager": wrong, "unsharded": right, "stock": wrong}, script).word
        == "fault"
    )
    # zeros where torch alone gives zeros, too, are what ours does not do;
    # other values may be torch's
    assert (
        judge("aot_eager", {"aot_eager": wrong, "unsharded": right, "plain": wrong}, script).word
        == "fault"
    )
    half = [Outcome([("grad a.weight", torch.full((1,), 0.5))])]
    assert (
        judge("aot_eager", {"aot_eager": half, "unsharded": wrong, "plain": half}, script).word
        == "torch"
    )
    assert (
        judge("aot_eager", {"aot_eager": wrong, "unsharded": right, "plain": right}, script).word
        == "fault"
    )
    for text, word in ((lost, "announced"), (zeros, "announced"), (tied, "fault")):
        said = [Outcome(wrong[0].entries, warnings=[text])]
        assert judge("aot_eager", {"aot_eager": said, "unsharded": right}, script).word == word
        missing = [Outcome(right[0].entries, warnings=[zeros])]
        assert (
            judge("aot_eager", {"aot_eager": missing, "unsharded": wrong}, script).word == "fault"
        )


def test_every_program_is_legal_and_can_be_read_back() -> None:
    for seed in range(150):
        program = make(seed)
        assert is_legal(program)
        this = script(program)
        compile(this.source, f"<seed {seed}>", "exec")
        assert read(this.header() + this.source) == this
    steps = [make_step(seed) for seed in range(len(STEPS))]
    assert {program.step for program in steps} == {*STEPS}
    for program in steps:
        this = script(program)
        compile(this.source, f"<step {program.seed}>", "exec")
        assert "take = whole_step(" in this.source
        assert ".backward(" not in this.source


def test_a_failure_shrinks_to_the_statement_that_is_to_blame() -> None:
    program = next(
        p for p in map(make, range(10_000)) if "substitute" in p.names() and len(p.names()) > 4
    )

    def fails(candidate: Program) -> Verdict | None:
        return (
            Verdict("compiled", "fault", "differs")
            if "functional_call" in render(candidate)
            else None
        )

    small, _ = smallest(program, Verdict("compiled", "fault", "differs"), fails, 1000)
    assert small.names() <= {"substitute", "call"}
    assert len(render(small).splitlines()) <= 20
    assert all(render(p) != render(small) for p in smaller(small) if p != small)


def test_programs_differ_in_everything() -> None:
    programs = [make(seed) for seed in range(150)]
    assert {p.world for p in programs} == {2, 4}
    assert len({p.way for p in programs}) > 8
    assert {len(p.layers) for p in programs} <= set(range(1, len(LAYERS) + 1))
    assert len({render(replace(p, seed=0)) for p in programs}) > 145
