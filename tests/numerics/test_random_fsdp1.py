"""Random models through `FullyShardedDataParallel`: as stock FSDP1 and compiled as eager, bit for
bit, and as unsharded.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal, plain
from kit.oracle_fsdp1 import (
    Api,
    grads,
    params,
)
from kit.random_fsdp1 import HYBRID, Wrapped, legal, shard, unreduced, whole, wrapped
from kit.random_models import batch, build, problem_of, shrink
from kit.regions import in_regions

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool
    from torch import Tensor

NUM_MODELS, CHUNK = (
    int(os.environ.get("RANDOM_MODELS", "6")),
    3,
)  # 100 take minutes: benchmarks/results/random_models.md
STEPS = 2
# Of parameters, after two steps. fp32: sums over ranks in another order than one process adds. 16
# bits: that one computes in fp32.
AGAINST_ONE_PROCESS = {False: 2e-5, True: 0.05}


def train(kind: str, program: Wrapped) -> dict[str, Any]:
    """Two steps: losses, this rank's gradients and parameters, norms, evaluations, and at the end
    whole parameters.
    """
    api = Api(kind)
    model = shard(api, build(program), program)
    call = api.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, Any] = {
        "losses": [],
        "grads": [],
        "params": [],
        "norms": [],
        "evaluations": [],
    }
    for step in range(STEPS):
        for micro in range(program.micro_batches):
            with unreduced(model, program, micro):
                found["losses"].append(backward(call, 10 * step + micro))
        if program.max_norm is not None:
            found["norms"].append(plain(model.clip_grad_norm_(program.max_norm)))
        found["grads"].append(plain(grads(model)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=program.set_to_none)
        found["params"].append(plain(params(model)))
        if program.evaluate:
            model.eval()
            with torch.no_grad():
                found["evaluations"].append(plain(call(batch(99))))
            model.train()
    found["whole"] = whole(api, model)
    return found


def backward(call: Any, number: int) -> Tensor:
    loss: Tensor = call(batch(number)).float().square().mean()
    loss.backward()
    return loss.detach()


def unsharded(program: Wrapped) -> dict[str, Any]:
    """The model in one process on this rank's batches, with gradients averaged over the ranks."""
    model = build(program)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        losses += [backward(model, 10 * step + micro) for micro in range(program.micro_batches)]
        for p in trained:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if program.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, program.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "whole": plain(params(model))}


def fails(program: Wrapped) -> str | None:
    """What is wrong with a program on any rank; None if nothing is."""
    return problem_of(compare, legal(program))


def compare(program: Wrapped) -> None:
    """Raises: AssertionError, with the first differences."""
    expected, stock, eager, compiled = (
        unsharded(program),
        *(train(kind, program) for kind in ("stock", "eager", "compiled")),
    )
    check_equal(compiled, eager, "compiled against eager")
    tolerance = 0.0 if is_exact(program) else (0.02 if program.is_low else 1e-5)
    check_equal(eager, stock, "eager against stock", tolerance, tolerance / 10)
    gap = AGAINST_ONE_PROCESS[program.is_low]
    for part in ("losses", "whole"):
        check_equal(eager[part], expected[part], "eager against unsharded", gap, gap)


def with_regions(program: Wrapped) -> int:
    """The same numbers with all between collectives in calls; how many there were.

    Raises:
        AssertionError: with the first differences.
    """
    eager = train("eager", program)
    torch._dynamo.reset()
    with in_regions() as calls:
        check_equal(train("compiled", program), eager, "with regions against eager")
    return calls.num


def check_regions(first: int, number: int) -> int:
    """How many calls there were."""
    num_calls = 0

    def compare_regions(program: Wrapped) -> None:
        nonlocal num_calls
        num_calls += with_regions(legal(program))

    check(first, number, partial(problem_of, compare_regions))
    return num_calls


def is_exact(program: Wrapped) -> bool:
    """Whether stock adds the same in the same order.

    Not over four ranks in one group: gloo's reduce-scatter adds in another order than our
    all-to-all and local sum. Not under NO_SHARD when gradients are reduced twice: stock reduces
    what it has reduced before once more. Not where a unit is called twice in 16 bits on top of
    retained gradients: its dtype changes in between, so that stock has two accumulators, and adds
    one gradient after the other where ours (and both in fp32) adds their sum.
    """
    is_again = program.strategy == "NO_SHARD" and program.micro_batches > 1 and not program.no_sync
    is_split = (
        program.computes_low and program.retains and any(spec.twice for spec in program.specs)
    )
    return (
        (dist.get_world_size() == 2 or program.strategy in HYBRID) and not is_again and not is_split
    )


def check(first: int, number: int, fails: Callable[[Any], str | None] = fails) -> None:
    for seed in range(first, first + number):
        program = wrapped(seed, dist.get_world_size())
        if fails(program):
            small, reason = shrink(program, fails)
            raise AssertionError(f"seed {seed}: {reason}\n{legal(small)}")


@pytest.mark.parametrize("first", range(0, NUM_MODELS, CHUNK))
def test_random_models(request: pytest.FixtureRequest, first: int) -> None:
    """Every third chunk on four ranks."""
    pool = request.getfixturevalue("four" if first % (3 * CHUNK) == 2 * CHUNK else "two")
    pool.run(check, first, number_from(first, request.config), timeout=600.0)


def number_from(first: int, config: pytest.Config) -> int:
    """How many of a chunk: in `make test` two."""
    return min(CHUNK if config.getoption("--all") else 2, NUM_MODELS - first)


@pytest.mark.parametrize("first", range(0, NUM_MODELS, CHUNK))
def test_with_regions(two: Pool, first: int, pytestconfig: pytest.Config) -> None:
    number = number_from(first, pytestconfig)
    called, _ = two.run(check_regions, first, number, timeout=600.0)
    assert called > 0
