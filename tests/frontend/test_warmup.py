"""`warmup` and `measure_kernels` leave no trace, whenever they are called, and if they fail."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import Net, Side, beside

from compiled_fsdp import fully_shard, measure_kernels, warmup
from compiled_fsdp.planning.plan import current_plan, use

if TYPE_CHECKING:
    from kit.pool import Pool

WHEN = ("without synchronization", "between", "before backward", "before step")
FAILS = ("forward", "backward")


def script(side: Side, front_end: str, when: str, fails: str) -> None:
    """Two micro-batches in a step, of which the first is not reduced, and a warmup somewhere."""
    options = {"use_orig_params": False} if front_end == "wrap flat" else {}
    front_end = front_end.partition(" ")[0]
    model: Any = getattr(side, front_end)(Net(), "a", "b", **options)
    inner = model.module if side.is_ours and front_end == "wrap" else model
    call = side.compile(model)
    optimizer = side.sgd(model.parameters())
    is_failing = False

    def fail(module: object, args: object, output: torch.Tensor) -> None:
        if is_failing and fails == "forward":
            raise ValueError("a bad example")
        if is_failing and output.requires_grad:
            output.register_hook(refuse)

    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("a bad gradient")

    if fails:
        inner.b.register_forward_hook(fail)

    def warm(now: str) -> None:
        nonlocal is_failing
        if not side.is_ours or now != when:
            return
        is_failing = bool(fails)
        for _ in range(2):
            with pytest.raises(ValueError) if fails else contextlib.nullcontext():  # noqa: PT011
                warmup(call, side.batch(9))
        is_failing = False

    for step in range(2):
        with without_sync(side, model):
            call(side.batch(step)).square().mean().backward()
            warm("without synchronization")
        warm("between")
        loss = call(side.batch(10 + step)).square().mean()
        warm("before backward")
        loss.backward()
        warm("before step")
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@contextlib.contextmanager
def without_sync(side: Side, model: Any) -> Any:
    if not side.is_ours:
        yield
    elif hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("front_end", ["shard", "wrap", "wrap flat"])
def test_no_trace(two: Pool, front_end: str, when: str) -> None:
    two.run(beside, script, front_end, when, "")


@pytest.mark.parametrize("fails", FAILS)
@pytest.mark.parametrize("front_end", ["shard", "wrap"])
def test_no_trace_of_one_that_fails(two: Pool, front_end: str, fails: str) -> None:
    two.run(failing, front_end, fails)


def failing(front_end: str, fails: str) -> None:
    for when in WHEN:
        beside(script, front_end, when, fails, kinds=("eager",))


def test_measured_kernels(two: Pool) -> None:
    two.run(measured)


def measured() -> None:
    """Beside a step that does not measure: with gradients there, reduced and not."""
    found = []
    before = current_plan()
    for measures in (False, True):
        side = Side("eager")
        model = side.shard(Net(), "a", "b")
        for part in range(3):
            model.set_requires_gradient_sync(part != 1)
            model(side.batch(part)).square().mean().backward()
            if measures:
                measure_kernels(model, side.batch(9))
        found.append([p.grad.full_tensor() for p in model.parameters()])
    use(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_backward_that_is_not_finalized(fake_world: None) -> None:
    model = fully_shard(Net())
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="warmup: the backward of Net is not finalized"):
        warmup(model, torch.ones(2, 6))
    model.finalize_backward()
    warmup(model, torch.ones(2, 6))
    model.finalize_backward()
