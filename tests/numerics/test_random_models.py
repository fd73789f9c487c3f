"""Random models: eager = compiled bit for bit, and both as unsharded; a failure is shrunk to a
small printed model. Each also with no memory for what is saved: computed again, or on the host;
and with all that is computed between collectives as calls of regions.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.offload import beside_host
from kit.random_models import Program, Spec, batch, build, make, problem_of, shard, shrink, smaller
from kit.regions import in_regions
from torch import Tensor

from compiled_fsdp import planned
from compiled_fsdp.planning import consensus
from compiled_fsdp.planning.costs import Costs, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool

NUM_MODELS, CHUNK = (
    int(os.environ.get("RANDOM_MODELS", "12")),
    4,
)  # 100 take minutes: benchmarks/results/random_models.md
STEPS = 2
# fp32: sums over ranks in another order than one process adds. bf16: the unsharded model computes
# in fp32.
TOLERANCE = {False: 2e-5, True: 0.05}
# By the number of the model. A host so fast that everything could be there.
BUDGETS: tuple[dict[str, Any], ...] = (
    {"memory_budget": 0.0, "offload": "budget"},
    {"memory_budget": 0.0, "offload": "budget", "recompute": "budget"},
    {"memory_budget": 0.4, "offload": "budget", "recompute": "budget"},
    {"memory_budget": 0.0, "recompute": "budget"},
)
COSTS = Costs(1e9, 1e9, 1e-6, (("", Link(1e-6, 1e9)),), host=1e13)


def gradients(program: Program, kind: str) -> list[Tensor | None]:
    """Of two steps; whole tensors."""
    model = build(program)
    call = model
    if kind != "unsharded":
        shard(model, program)
    if kind == "compiled":
        call = torch.compile(model, backend="compiled_fsdp_eager", fullgraph=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found: list[Tensor | None] = []
    for step in range(STEPS):
        for micro in range(program.micro_batches):
            if kind != "unsharded":
                model.set_requires_gradient_sync(micro == program.micro_batches - 1)
            call(batch(10 * step + micro)).float().square().mean().backward()
        for p in model.parameters():
            if kind == "unsharded" and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            found.append(p.grad if p.grad is None or kind == "unsharded" else p.grad.full_tensor())
        found = [None if g is None else g.clone() for g in found]
        optimizer.step()
        optimizer.zero_grad()
    return found


def fails(program: Program) -> str | None:
    """What is wrong with a program on any rank; None if nothing is."""
    return problem_of(compare, program)


def compare(program: Program) -> None:
    """Raises: AssertionError, with the first difference."""
    expected, eager, compiled = (
        gradients(program, kind) for kind in ("unsharded", "eager", "compiled")
    )
    for i, (a, b, c) in enumerate(zip(expected, eager, compiled, strict=True)):
        if a is None or b is None or c is None:
            assert a is b is c, (
                f"gradient {i}: None is unsharded {a is None}, eager {b is None}, compiled "
                f"{c is None}"
            )
            continue
        is_close = torch.allclose(a, b, atol=TOLERANCE[program.low_precision], rtol=1e-4)
        assert is_close, (
            f"gradient {i}: eager differs from unsharded by {(a - b).abs().max().item():.2e}"
        )
        assert torch.equal(b, c), (
            f"gradient {i}: compiled differs from eager by {(b - c).abs().max().item():.2e}"
        )


def in_budget(program: Program) -> int:
    """The same numbers with little memory; how many copies there were to the host and back.

    Raises:
        AssertionError: with the first difference.
    """
    eager = gradients(program, "eager")
    torch._dynamo.reset()
    consensus._settled.clear()  # by the structure of parameters, which eager and compiled share
    plan = BUDGETS[program.seed % len(BUDGETS)]
    with beside_host() as copies, planned(**plan, costs=COSTS):
        compiled = gradients(program, "compiled")
    for i, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        is_same = a is b if a is None or b is None else torch.equal(a, b)
        assert is_same, f"gradient {i}: with {plan} it differs from eager"
    return copies.num_begun


def check_budgets(first: int, number: int) -> int:
    """How many copies there were."""
    num_copies = 0

    def compare_budget(program: Program) -> None:
        nonlocal num_copies
        num_copies += in_budget(program)

    check(first, number, partial(problem_of, compare_budget))
    return num_copies


def called_regions(program: Program) -> int:
    """The same numbers with all between collectives in calls; how many there were.

    Raises:
        AssertionError: with the first difference.
    """
    eager = gradients(program, "eager")
    torch._dynamo.reset()
    with in_regions() as calls:
        compiled = gradients(program, "compiled")
    for i, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        is_same = a is b if a is None or b is None else torch.equal(a, b)
        assert is_same, f"gradient {i}: with regions it differs from eager"
    return calls.num


def check_regions(first: int, number: int) -> int:
    """How many calls there were."""
    num_calls = 0

    def compare_regions(program: Program) -> None:
        nonlocal num_calls
        num_calls += called_regions(program)

    check(first, number, partial(problem_of, compare_regions))
    return num_calls


def check(first: int, number: int, fails: Callable[[Program], str | None] = fails) -> None:
    for seed in range(first, first + number):
        program = make(seed)
        if fails(program):
            small, reason = shrink(program, fails)
            raise AssertionError(f"seed {seed}: {reason}\n{small}")


@pytest.mark.parametrize("first", range(0, NUM_MODELS, CHUNK))
def test_random_models(request: pytest.FixtureRequest, first: int) -> None:
    """Every third chunk on four ranks."""
    pool = request.getfixturevalue("four" if first % (3 * CHUNK) == 2 * CHUNK else "two")
    pool.run(check, first, number_from(first, request.config), timeout=600.0)


def number_from(first: int, config: pytest.Config) -> int:
    """How many of a chunk: in `make test` half of it."""
    return min(CHUNK if config.getoption("--all") else CHUNK // 2, NUM_MODELS - first)


@pytest.mark.parametrize("first", range(0, NUM_MODELS, CHUNK))
def test_in_a_budget(two: Pool, first: int) -> None:
    """Each chunk has all of `BUDGETS`."""
    copied, _ = two.run(check_budgets, first, min(CHUNK, NUM_MODELS - first), timeout=600.0)
    assert copied > 0


@pytest.mark.parametrize("first", range(0, NUM_MODELS, CHUNK))
def test_with_regions(two: Pool, first: int, pytestconfig: pytest.Config) -> None:
    number = number_from(first, pytestconfig)
    called, _ = two.run(check_regions, first, number, timeout=600.0)
    assert called > 0


def test_a_failure_shrinks() -> None:
    """To the one thing that is wrong."""
    program = Program(
        0,
        (Spec(width=3, twice=True), Spec(is_frozen=True, width=5), Spec(kind="normed")),
        micro_batches=3,
    )
    small, reason = shrink(
        program, lambda p: "frozen" if any(s.is_frozen for s in p.specs) else None
    )
    assert reason == "frozen"
    assert small == Program(0, (Spec(is_frozen=True, width=5, unit=False),))
    assert all(p != program for p in smaller(program))
