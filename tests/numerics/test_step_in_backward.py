"""`overlap_optimizer(in_backward=True)`: the same numbers bit for bit; units are stepped and
gathered while backward runs.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit import overlap
from kit.compare import check_equal
from kit.graphs import captured
from kit.harness import SLOW, Options, batch_of
from kit.models import loss_of
from kit.overlap import (
    BF16,
    OPTIMIZERS,
    Run,
    changed_by_hand,
    evaluated,
    plain_training,
    start,
    with_groups,
)
from torch import nn

from compiled_fsdp.frontend.state import states_below
from compiled_fsdp.ir.graph import find
from compiled_fsdp.ir.schema import MARK_GRADS, REDUCE_LATER, STEP
from compiled_fsdp.units.in_flight import is_stepped_grad

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.pool import Pool


def begin(
    options: Options, optimizer: Any = OPTIMIZERS["adamw"], kind: str = "compiled", **more: Any
) -> Run:
    return start(True, kind, options, optimizer, in_backward=True, **more)


def compare(script: Callable[[Run], Any], options: Options, *rest: Any, **more: Any) -> None:
    """As `overlap.compare`, with a step inside backward; compiled, but for another `kind`."""
    kind = more.pop("kind", "compiled")
    overlap.compare(script, kind, options, *rest, in_backward=True, **more)


def stepped_grads(run: Run) -> list[str]:
    return [name for name, p in run.model.named_parameters() if is_stepped_grad(p.grad)]


def is_early(run: Run) -> bool:
    """Whether gathers of the next forward are under way."""
    return any(flat.ahead for state in states_below(run.model) for flat in state.unit.flats)


def train(run: Run) -> list[float]:
    losses = []
    is_ours = hasattr(run.optimizer, "_fsdp_overlap")
    for step in range(4):
        before = [p.to_local().clone() for p in run.model.parameters()]  # type: ignore[attr-defined]
        losses.append(run.backward(step))
        after = [p.to_local() for p in run.model.parameters()]  # type: ignore[attr-defined]
        changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert any(changed) == bool(stepped_grads(run)) == is_early(run) == is_ours
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert not stepped_grads(run)
    assert len(set(losses)) == 4
    return losses


def compare_optimizers() -> None:
    for name in ("sgd", "adamw_fused"):
        compare(train, Options("deep"), OPTIMIZERS[name])


def test_optimizers(two: Pool) -> None:
    two.run(compare_optimizers, timeout=SLOW)


def compare_models() -> None:
    compare(train, Options("deep", policies=(BF16,)))
    compare(train, Options("deep unused", reshard=False))
    for model in ("tied", "frozen", "called_twice"):
        compare(plain_training, Options(model))
    compare(
        plain_training, Options("deep"), kind="eager"
    )  # units that run eagerly are stepped by step()


def test_models(two: Pool) -> None:
    two.run(compare_models, timeout=SLOW)


def compare_hsdp() -> None:
    compare(plain_training, Options("deep", mesh="hsdp"))


def test_hsdp(four: Pool) -> None:
    four.run(compare_hsdp)


def compare_inductor() -> None:
    compare(train, Options("deep", policies=(BF16,)), kind="inductor")


def test_inductor(two: Pool) -> None:
    two.run(compare_inductor, timeout=SLOW)


# -- what scripts do between


def accumulated(run: Run) -> list[float]:
    """Three backwards make a step, of which the last reduces."""
    losses = []
    model: Any = run.model
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 == 2)
        losses.append(run.backward(step))
        if hasattr(run.optimizer, "_fsdp_overlap"):
            assert bool(stepped_grads(run)) == (step % 3 == 2)
        if step % 3 == 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    return losses


def scheduled(run: Run) -> list[float]:
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 0.5**epoch)
    losses = []
    for step in range(4):
        losses.append(run.step(step))
        schedule.step()
    return losses


def zeroed_first(run: Run) -> list[float]:
    losses = []
    for step in range(3):
        run.optimizer.zero_grad()
        losses.append(run.backward(step))
        run.optimizer.step()
    return losses


def frozen_later(run: Run) -> list[float]:
    """A part of a unit, then a whole one."""
    losses = [run.step(0)]
    params = list(run.model.parameters())
    params[0].requires_grad_(False)
    losses.append(run.step(1))
    params[1].requires_grad_(False)
    return [*losses, run.step(2), run.step(3)]


def hooked(run: Run) -> list[float]:
    """Hooks see gradients before they are used up, and may change them; one is on one rank only."""
    seen: list[float] = []
    params = list(run.model.parameters())

    def look(p: Any) -> None:
        seen.append(float(p.grad.to_local().sum()))

    params[-1].register_post_accumulate_grad_hook(look)
    params[-2].register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        params[-3].register_post_accumulate_grad_hook(look)
    losses = [run.step(step) for step in range(3)]
    assert len(seen) == 6 - 3 * dist.get_rank()
    return [*losses, *sorted(seen)]


def called_for_two_inputs(run: Run) -> list[float]:
    """Two forwards, whose gradients are added up by one backward."""
    losses = []
    for step in range(3):
        loss = sum(loss_of(run.call(*batch_of(run.name, 2 * step + n))) for n in range(2))
        loss.backward()  # type: ignore[union-attr]
        losses.append(float(loss))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


SCRIPTS = {
    script.__name__: script
    for script in (
        accumulated,
        scheduled,
        zeroed_first,
        frozen_later,
        hooked,
        called_for_two_inputs,
        evaluated,
        changed_by_hand,
    )
}


def compare_script(name: str) -> None:
    optimizer = with_groups if name == "scheduled" else OPTIMIZERS["adamw"]
    # of two forwards' gradients, the eager runtime adds in another order
    oracle = "compiled" if name == "called_for_two_inputs" else None
    compare(SCRIPTS[name], Options("deep"), optimizer, oracle=oracle)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(two: Pool, name: str) -> None:
    two.run(compare_script, name)


# -- what is in the graph, and what is bounded


def ops_of(**more: Any) -> tuple[int, int, int]:
    with captured() as halves:
        begin(Options("equal_units"), **more).step(0)
    return tuple(
        sum(len(find(h, target)) for h in halves) for target in (STEP, REDUCE_LATER, MARK_GRADS)
    )  # type: ignore[return-value]


def test_steps_are_nodes(two: Pool) -> None:
    """Every unit is stepped in the graph, but for the last ones, which are left in flight."""
    steps, left, marks = two.run(ops_of)[0]
    assert steps >= 2
    assert left >= 1
    assert marks == 0


def early_bytes(limit: int) -> tuple[int, int]:
    """Gathered ahead when backward ends, and when the step does."""
    run = begin(Options("equal_units"), max_ahead_bytes=limit)
    found = []
    for what in (lambda: run.backward(0), run.optimizer.step):
        what()
        flats = [flat for state in states_below(run.model) for flat in state.unit.flats]
        found.append(
            sum(
                under_way.gathered.nbytes
                for flat in flats
                for under_way in flat.ahead.pieces.values()
            )
        )
    run.optimizer.zero_grad()
    run.step(1)
    return found[0], found[1]


@pytest.mark.parametrize("limit", [0, 40_000, 1 << 20])
def test_early_gathers_are_bounded(two: Pool, limit: int) -> None:
    """A unit of 64 x 64 + 64 floats has 16,640 bytes; half of the limit may be gathered inside
    backward.
    """
    in_backward, in_step = two.run(early_bytes, limit)[0]
    assert in_backward <= limit // 2
    assert in_backward <= in_step <= limit
    assert bool(in_backward) == (limit > 2 * 16_640)


# -- mistakes


def read_too_late() -> None:
    run = begin(Options("deep"))
    run.backward(0)
    name = stepped_grads(run)[0]
    param = dict(run.model.named_parameters())[name]
    message = (
        rf"the gradient of {name} was read after backward, and the optimizer has used it up "
        "inside backward already"
    )
    for read in (
        lambda: param.grad.to_local().sum(),  # type: ignore[union-attr]
        lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
        lambda: run.optimizer.zero_grad(set_to_none=False),
    ):
        with pytest.raises(RuntimeError, match=message):
            read()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step(1)


def added_up() -> None:
    run = begin(Options("deep"))
    run.backward(0)
    with pytest.raises(
        RuntimeError,
        match=r"which still has a gradient of an earlier backward\. Each backward is a step",
    ):
        run.backward(1)


def with_step_hooks() -> None:
    run = begin(Options("deep"))
    run.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(
        RuntimeError,
        match="the AdamW has hooks on its step, which is taken in parts inside backward",
    ):
        run.backward(0)


@pytest.mark.parametrize("mistake", [read_too_late, added_up, with_step_hooks])
def test_mistakes(two: Pool, mistake: Callable[[], None]) -> None:
    two.run(mistake)


def said(options: Options) -> list[str]:
    """What is said of units that are left to step(), in three steps with an evaluation between."""
    run = begin(options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.step(0)
        with torch.no_grad():
            run.call(*batch_of(run.name, 50))
        run.step(1)
        run.step(2)
    return [str(w.message) for w in caught if "in_backward" in str(w.message)]


def test_what_is_left_to_step_is_said_once(two: Pool) -> None:
    (text,) = two.run(said, Options("deep"))[0]
    assert (
        "is stepped by optimizer.step(), not inside backward, since forward has read it more than "
        "once since the last" in text
    )


# -- units that several graphs read


class Twice(nn.Module):
    """Two graphs read `both`; the first needs no gradient for it, and its backward gathers it all
    the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.both = nn.ParameterList([nn.Parameter(torch.randn(8, 8))])
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(torch.tanh(self.before(x)) @ self.both[0].detach())
        torch._dynamo.graph_break()
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return x @ self.both[0]


class Halves(nn.Module):
    """Two graphs: the root's own weights, `first` and `last`, are read by one each; tied, they are
    one that both read.
    """

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 6))
        self.middle = nn.Linear(6, 6)
        self.last = self.first if is_tied else nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.first)
        torch._dynamo.graph_break()
        return torch.tanh(self.middle(x) @ self.last)


def train_halves(make: Callable[[], nn.Module], in_backward: bool | None) -> list[torch.Tensor]:
    from compiled_fsdp import fully_shard, overlap_optimizer

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    for child in [
        c for top in model.children() for c in (top if isinstance(top, nn.ModuleList) else [top])
    ]:
        fully_shard(child)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if in_backward is not None:
        overlap_optimizer(model, optimizer, in_backward=in_backward)
    call = torch.compile(model, backend="compiled_fsdp_eager")
    for step in range(4):
        x = torch.randn(
            8, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(step)
        )
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def compare_halves() -> None:
    for make in (lambda: Halves(False), lambda: Halves(True), Twice):
        plain, ours = (train_halves(make, in_backward) for in_backward in (None, True))
        check_equal(plain, ours, "two graphs")


def test_units_that_several_graphs_read(two: Pool) -> None:
    two.run(compare_halves)
