"""`overlap_optimizer`: the same numbers bit for bit, the same collectives in order, and nobody sees
a gradient too early.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.compare import check_equal
from kit.harness import SLOW, Options, batch_of, build, compiled, local, shard
from kit.models import loss_of
from kit.overlap import (
    BF16,
    OPTIMIZERS,
    Run,
    changed_by_hand,
    compare,
    evaluated,
    plain_training,
    start,
    with_groups,
)
from torch import nn

from compiled_fsdp import fully_shard, overlap_optimizer
from compiled_fsdp.frontend import overlap as overlapping
from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.wire import gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.pool import Pool

KINDS = ("compiled", "eager")

# -- the same numbers


def train(run: Run) -> list[float]:
    """Plain training; with the overlap, something really is in flight after each backward, and
    ahead after each step.
    """
    losses = []
    is_ours = hasattr(run.optimizer, "_fsdp_overlap")
    for step in range(4):
        losses.append(run.backward(step))
        assert bool(run.in_flight()) == is_ours
        run.optimizer.step()
        assert not run.in_flight()
        run.optimizer.zero_grad()
        assert bool(run.num_ahead()) == is_ours
    assert len(set(losses)) == 4
    return losses


def compare_optimizers(names: list[str], kind: str) -> None:
    for name in names:
        compare(train, kind, Options("odd"), OPTIMIZERS[name])


def test_optimizers(two: Pool) -> None:
    two.run(compare_optimizers, list(OPTIMIZERS), "eager", timeout=SLOW)


def test_optimizers_compiled(two: Pool) -> None:
    two.run(compare_optimizers, ["adamw_fused"], "compiled", timeout=SLOW)


def compare_models(kind: str) -> None:
    for model in ("tied", "called_twice", "list_units"):
        compare(train, kind, Options(model))
    compare(train, kind, Options("frozen", policies=(BF16,)), OPTIMIZERS["sgd"])
    compare(train, kind, Options("unused", reshard=False))


@pytest.mark.parametrize("kind", KINDS)
def test_models(two: Pool, kind: str) -> None:
    two.run(compare_models, kind, timeout=SLOW)


def compare_hsdp(kind: str) -> None:
    compare(train if kind == "compiled" else plain_training, kind, Options("odd", mesh="hsdp"))


@pytest.mark.parametrize("kind", KINDS)
def test_hsdp(four: Pool, kind: str) -> None:
    four.run(compare_hsdp, kind, timeout=SLOW)


def scheduled(run: Run) -> list[float]:
    """A schedule, hooks, clipping in a hook."""
    seen: list[str] = []
    run.optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    run.optimizer.register_step_pre_hook(lambda *_: clip(run))
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 0.5**epoch)
    losses = []
    for step in range(4):
        losses.append(run.step(step))
        schedule.step()
    assert seen == ["pre", "post"] * 4
    return losses


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def scaled(run: Run) -> list[float]:
    """A scaler that once meets an infinite gradient, and skips that step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        loss = loss_of(run.call(*batch_of(run.name, step)))
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales != sorted(scales), "no step was skipped"
    return scales


def accumulated(run: Run) -> list[float]:
    """Backwards that add up in `.grad`, backwards without communication, and gradients that are
    zeroed instead of dropped.
    """
    losses = []
    for step in range(6):
        model: Any = run.model
        model.set_requires_gradient_sync(step < 2 or step % 2 == 1)
        losses.append(run.backward(step))
        if step % 2:
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=step != 3)
    return losses


def looked_at(run: Run) -> list[Any]:
    """Every way to look at gradients between backward and step."""
    found: list[Any] = []
    looks: list[Callable[[Any], Any]] = [
        lambda p: p.grad.to_local().clone(),
        lambda p: p.grad.full_tensor(),
        lambda p: p.grad.norm().item(),
        lambda p: (p.grad * 2 + p.grad).to_local(),
        lambda p: torch.tensor(numpy_of(p.grad)),
        lambda p: p.grad.mul_(2).to_local().clone(),
        lambda p: repr(p.grad),
        lambda p: (p.grad.dtype, p.grad.shape, p.grad.placements),
        lambda p: setattr(p, "grad", p.grad + 1),
        lambda p: setattr(p, "grad", None),
    ]
    for step, look in enumerate(looks):
        run.backward(step)
        held = [p.grad for p in run.model.parameters()]
        found += [look(p) for p in run.model.parameters()]
        run.optimizer.step()
        run.optimizer.zero_grad()
        found += [grad.to_local().clone() for grad in held]
    found.append(total_norm(run))
    return found


def numpy_of(grad: Any) -> Any:
    with torch.no_grad():
        return grad.to_local().numpy().copy()


def total_norm(run: Run) -> float:
    run.backward(100)
    return float(nn.utils.get_total_norm([p.grad for p in run.model.parameters()]).full_tensor())  # type: ignore[attr-defined]


def dropped(run: Run) -> list[float]:
    """Gradients that nobody reads, steps without gradients, two steps in a row."""
    losses = []
    for step in range(4):
        losses.append(run.backward(step))
        run.optimizer.zero_grad()
        run.optimizer.step()
        for group in run.optimizer.param_groups:
            group["foreach"] = bool(step % 2)
        losses.append(run.backward(step))
        run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


def written_through_data(kind: str, moved: bool) -> None:
    """What no version counts is an error, not a stale parameter; also where all values are still
    there, in other places.
    """
    run = start(True, kind, Options("odd"))
    run.step(0)
    for p in run.model.parameters():
        if moved:
            shard = p.detach().to_local().numpy()
            shard[...] = shard.reshape(-1)[::-1].reshape(shard.shape).copy()
        else:
            p.data.mul_(2)
    assert run.num_ahead()
    with pytest.raises(
        RuntimeError,
        match=r"written to through .data, or by a foreach op, between optimizer.step\(\)",
    ):
        run.call(*batch_of(run.name, 1))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_writes_through_data_are_noticed(two: Pool, kind: str, moved: bool) -> None:
    two.run(written_through_data, kind, moved)


def interrupted(run: Run) -> list[float]:
    """Forwards and backwards that raise, on every rank."""
    losses = []
    for step in range(4):
        losses.append(run.step(step))
        handle = run.model.register_forward_pre_hook(raises) if step == 1 else None
        if handle is not None:
            with pytest.raises(ZeroDivisionError):
                run.model(*batch_of(run.name, step))
            handle.remove()
        if step == 2:
            loss = loss_of(run.call(*batch_of(run.name, step)))
            loss.register_hook(raises)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
    return losses


def raises(*_: object) -> None:
    raise ZeroDivisionError


SCRIPTS: dict[str, Callable[[Run], Any]] = {
    script.__name__: script
    for script in (
        scheduled,
        accumulated,
        looked_at,
        dropped,
        evaluated,
        changed_by_hand,
        interrupted,
        scaled,
    )
}


def compare_script(name: str, kind: str) -> None:
    optimizer = with_groups if name == "scheduled" else OPTIMIZERS["adamw"]
    compare(SCRIPTS[name], kind, Options("odd"), optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(two: Pool, name: str, kind: str) -> None:
    two.run(compare_script, name, kind)


def compare_conversion(kind: str) -> None:
    """After `.to(dtype)` the parameters live in another buffer: writes to them are still
    noticed.
    """

    def script(run: Run) -> list[float]:
        losses = [run.step(0)]
        run.model.double()
        for step in range(1, 4):
            loss = loss_of(run.call(*(x.double() for x in batch_of(run.name, step))))
            loss.backward()
            losses.append(float(loss))
            run.optimizer.step()
            run.optimizer.zero_grad()
            with torch.no_grad():
                next(run.model.parameters()).mul_(2)
        return losses

    compare(script, kind, Options("odd"), OPTIMIZERS["sgd"])


@pytest.mark.parametrize("kind", KINDS)
def test_conversion(two: Pool, kind: str) -> None:
    two.run(compare_conversion, kind)


# -- what communicates, and when


@contextmanager
def named_gathers() -> Iterator[None]:
    """Make every gather over gloo an entry of the profile, however it is started."""
    original = gloo.start

    def named(tensor: torch.Tensor, *rest: Any) -> Any:
        with torch.profiler.record_function(f"gather {tuple(tensor.shape)}"):
            return original(tensor, *rest)

    gloo.start = named
    try:
        yield
    finally:
        gloo.start = original


def order_of_collectives(overlap: bool, kind: str, options: Options) -> list[str]:
    """Of two steps and a forward."""
    run = start(overlap, kind, options)
    run.step(0)
    with named_gathers(), torch.profiler.profile(record_shapes=True) as profile:
        for step in range(1, 3):
            run.step(step)
        run.call(*batch_of(run.name, 9))
    reductions = ("fsdp::all_to_all", "_c10d_functional::all_reduce")
    events = [e for e in profile.events() if e.name in reductions or e.name.startswith("gather ")]
    return [f"{e.name} {e.input_shapes}" for e in sorted(events, key=lambda e: e.time_range.start)]


def compare_collectives(kind: str, options: Options) -> None:
    plain, ours = [order_of_collectives(overlap, kind, options) for overlap in (False, True)]
    first_step = next(i for i, entry in enumerate(ours) if not entry.startswith("gather"))
    num_ahead = (
        next(i for i, entry in enumerate(plain) if not entry.startswith("gather")) - first_step
    )
    assert num_ahead > 0, "nothing was gathered before the first step that is recorded"
    assert plain[num_ahead:] == ours, (plain, ours)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_collectives_in_the_same_order(two: Pool, kind: str) -> None:
    two.run(compare_collectives, kind, Options("odd", policies=(BF16,)))


def test_hsdp_collectives(four: Pool) -> None:
    four.run(compare_collectives, "compiled", Options("odd", mesh="hsdp"))


def backward_without_the_others(kind: str) -> list[str]:
    """Rank 1 begins its last backward only after rank 0's has returned: so rank 0's cannot have got
    its gradients.
    """
    run = start(True, kind, Options("one_unit", reshard=False))
    run.step(0)
    loss = loss_of(run.call(*batch_of(run.name, 1)))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([f"backward has returned {kind}"])
    loss.backward()
    store.set(f"backward has returned {kind}", "")
    in_flight = run.in_flight()
    run.optimizer.step()
    return in_flight


@pytest.mark.parametrize("kind", KINDS)
def test_backward_returns_while_reducing(two: Pool, kind: str) -> None:
    names = [
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
    ]
    assert (
        two.run(backward_without_the_others, kind, timeout=60.0)
        == [[*names, "last.weight", "last.bias"]] * 2
    )


def step_without_waiting(kind: str) -> list[list[str]]:
    """Which unit's gradients are still in flight while which unit steps."""
    run = start(True, kind, Options("odd"))
    run.step(0)
    seen: list[list[str]] = []
    original = overlapping.step_part

    def noting(*args: Any) -> None:
        before = run.in_flight()
        original(*args)
        seen.append(sorted({name.rpartition(".")[0] for name in before}))

    with mock.patch.object(overlapping, "step_part", noting):
        run.step(1)
    return seen


def test_units_step_while_others_are_reduced(two: Pool) -> None:
    seen, other = two.run(step_without_waiting, "compiled")
    assert seen == other
    assert seen[0], "the first unit steps while gradients are in flight"
    assert [bool(names) for names in seen] == sorted((bool(names) for names in seen), reverse=True)


def ahead_is_bounded(kind: str) -> list[tuple[int, int]]:
    found = []
    for limit in (4 * 8000, 1 << 20):
        run = start(True, kind, Options("equal_units"), max_ahead_bytes=limit)
        run.step(0)
        held = [
            under_way.gathered
            for s in states_below(run.model)
            for f in s.unit.flats
            for under_way in f.ahead.pieces.values()
        ]
        assert sum(g.nbytes for g in held) <= limit
        found.append((limit, run.num_ahead()))
        run.step(1)
    return found


def test_gathers_ahead_are_bounded(two: Pool) -> None:
    """A unit of 64 x 64 + 64 floats has 16,640 bytes."""
    assert two.run(ahead_is_bounded, "compiled")[0] == [(32000, 1), (1 << 20, 4)]


def gives_back() -> None:
    """What was gathered ahead and not used is dropped by the next step, `to`, and an eager
    forward.
    """
    for give_back in (
        lambda r: r.optimizer.step(),
        lambda r: r.model.float(),
        lambda r: r.model(*batch_of(r.name, 7)),
    ):
        run = start(True, "compiled", Options("odd"))
        run.step(0)
        assert run.num_ahead() > 1
        give_back(run)
        assert not [f for s in states_below(run.model) for f in s.unit.flats if f.ahead]
        run.step(1)


def test_gives_back(two: Pool) -> None:
    two.run(gives_back)


def two_optimizers(in_backward: bool) -> None:
    """A unit that two optimizers share is gathered ahead after both of them have stepped, not after
    the first, nor stepped inside backward.
    """
    results = []
    for overlap in (False, True):
        model = build("odd")
        shard(model, Options("odd"), fully_shard)
        params = list(model.parameters())
        both = [torch.optim.SGD(params[::2], lr=0.1), torch.optim.AdamW(params[1::2], lr=0.02)]
        if overlap:
            for optimizer in both:
                overlap_optimizer(model, optimizer, in_backward=in_backward)
        call = compiled(model)
        for step in range(3):
            loss_of(call(*batch_of("odd", step))).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
                ahead = [f for s in states_below(model) for f in s.unit.flats if f.ahead]
                assert bool(ahead) == (overlap and optimizer is both[1])
        results.append([local(p) for p in model.parameters()])
    check_equal(*results, "two optimizers")


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_optimizers(two: Pool, in_backward: bool) -> None:
    two.run(two_optimizers, in_backward)


# -- mistakes


def mistakes() -> None:
    options = Options("odd")
    model = build("odd")
    with pytest.raises(ValueError, match="no sharded module"):
        overlap_optimizer(model, torch.optim.SGD(model.parameters()))
    before = list(model.parameters())
    shard(model, options, fully_shard)
    with pytest.raises(ValueError, match="holds no parameter of the model"):
        overlap_optimizer(model, torch.optim.SGD(before))
    with pytest.raises(
        TypeError, match=r"LBFGS is not an optimizer whose step can be taken unit by unit"
    ):
        overlap_optimizer(model, torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"max_ahead_bytes=-1"):
        overlap_optimizer(model, optimizer, max_ahead_bytes=-1)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(late, 1)
    with pytest.raises(RuntimeError, match="then build the scheduler"):
        overlap_optimizer(model, late)
    assert overlap_optimizer(torch.compile(model), optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.SGD)
    with pytest.raises(ValueError, match="overlaps already"):
        overlap_optimizer(model, optimizer)
    with pytest.raises(ValueError, match=r"SGD.step\(closure\): not with overlap_optimizer"):
        optimizer.step(lambda: 0.0)


def test_mistakes(two: Pool) -> None:
    two.run(mistakes)


def late_call() -> None:
    """After the first steps: the graph compiles again, and the numbers go on."""
    plain, ours = [start(False, kind, Options("odd")) for kind in ("eager", "compiled")]
    check_equal([plain.step(0)], [ours.step(0)], "before")
    overlap_optimizer(ours.model, ours.optimizer)
    for step in range(1, 4):
        check_equal([plain.step(step)], [ours.backward(step)], "after")
        assert ours.in_flight()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    check_equal(plain.state(), ours.state(), "after")


def test_may_come_late(two: Pool) -> None:
    two.run(late_call)


def inductor() -> None:
    compare(train, "inductor", Options("odd", policies=(BF16,)))


def test_inductor(two: Pool) -> None:
    two.run(inductor, timeout=SLOW)
