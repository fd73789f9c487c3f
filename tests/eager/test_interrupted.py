"""A step that an exception ends, which the script catches on all ranks, and goes on."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.beside import WIDTH, Net, Side, beside
from torch import Tensor
from torch.distributed.tensor import DTensor

import compiled_fsdp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kit.pool import Pool


def dropped(side: Side) -> None:
    """The backward of a last micro-batch raises. With what the warning says, the step is as if it
    had not begun.
    """
    model = side.shard(Net(), "a", "b")
    fails = False

    def hook(grad: torch.Tensor) -> None:
        if fails:
            raise ValueError("a bad gradient")

    def watch(module: object, args: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(hook)

    model.b.register_forward_hook(watch)
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        try:
            for part in range(2):
                if side.is_ours:
                    model.set_requires_gradient_sync(part == 1)
                fails = (step, part) == (1, 1)
                model(side.batch(2 * step + part)).square().mean().backward()
        except ValueError:
            optimizer.zero_grad()
            texts = evaluated(side, model)
            if side.is_ours:
                assert any("an exception left a backward while" in text for text in texts)
                model.reset_iter_state()
            continue
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


def evaluated(side: Side, model: Any) -> list[str]:
    """What is said in a forward, which finds that the backward before has not ended."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        side.note("evaluated", model(side.batch(9)))
    return [str(warning.message) for warning in caught]


def test_a_backward_that_raises(two: Pool) -> None:
    two.run(beside_eagerly, dropped)


def stopped(side: Side, by: type[BaseException], front_end: str) -> None:
    """A forward is ended by this: the step of the gradients that were there is taken, and the next
    forward finds what it has made.
    """
    model, is_stopped = Net(), False

    def stop(module: object, args: object) -> None:
        if is_stopped:
            raise by

    model.b.register_forward_pre_hook(stop)
    model = getattr(side, front_end)(model, "a", "b")
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        model(side.batch(step)).square().mean().backward()
        is_stopped = step == 1
        if is_stopped:
            with pytest.raises(by):
                model(side.batch(10 + step))
        is_stopped = False
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            side.note("evaluated", model(side.batch(20 + step)))
        side.note_params(model)


@pytest.mark.parametrize("front_end", ["shard", "wrap"])
@pytest.mark.parametrize("by", [ValueError, KeyboardInterrupt])
def test_a_forward_that_is_ended(two: Pool, by: type[BaseException], front_end: str) -> None:
    """Ctrl-C is no Exception."""
    two.run(beside_eagerly, stopped, by, front_end)


class Dropping(Net):
    """Leaves out a layer, or raises behind the first."""

    does = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).tanh()
        if self.does == "raise":
            raise ValueError("a bad batch")
        result: torch.Tensor = self.c(x if self.does == "drop" else self.b(x).tanh())
        return result


def unused(side: Side) -> None:
    """What a forward has started to gather and not used is not for the next, before which foreach
    ops write: no version counts these.
    """
    model: Any = side.shard(Dropping(), "a", "b", "c").eval()
    for model.does in ("", "drop", "", "raise", "", "drop", ""):
        with torch.no_grad():
            try:
                side.note("evaluated", model(side.batch(0)))
            except ValueError:
                side.note("raised", 0)
            torch._foreach_mul_(list(model.parameters()), 0.9)


def test_a_gather_that_a_forward_did_not_use(two: Pool) -> None:
    two.run(beside_eagerly, unused)


def goes_on_with_what_it_has(side: Side, front_end: str) -> None:
    """The forward of a second micro-batch raises: the script clips what the first one gave, saves
    the model, and steps.
    """
    model: Any = getattr(side, front_end)(Dropping(), "a", "b")
    inner = model.module if side.is_ours and front_end == "wrap" else model
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        batch = torch.full((4, WIDTH), step + 1.0)  # the same on all ranks
        model(batch).square().mean().backward()
        inner.does = "raise"
        with pytest.raises(ValueError, match="a bad batch"):
            model(batch)
        inner.does = ""
        if side.is_ours and front_end == "wrap":
            side.note("norm", model.clip_grad_norm_(0.01))
            with model.no_sync():
                pass
        else:
            side.note("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        for name, value in sorted(model.state_dict().items()):
            side.note(name, value)
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("front_end", ["shard", "wrap"])
def test_a_step_with_what_there_is(two: Pool, front_end: str) -> None:
    two.run(beside_eagerly, goes_on_with_what_it_has, front_end)


class Stop(Exception):
    """By which a hook ends a forward, once it has what it wants."""


def stopped_on_purpose(side: Side, front_end: str, at: str) -> None:
    """The loss is of what the hook took, whose backward comes to units that were in forward."""
    model: Any = getattr(side, front_end)(Net(), "b", "c")
    inner = model.module if side.is_ours and front_end == "wrap" else model
    taken = []

    def take(module: object, args: object, output: torch.Tensor) -> None:
        taken.append(output)
        raise Stop

    layer = getattr(inner, at)
    getattr(layer, "module", layer).register_forward_hook(take)
    optimizer = side.sgd(model.parameters())
    for step in range(3):
        with pytest.raises(Stop):
            model(side.batch(step))
        taken.pop().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


@pytest.mark.parametrize("at", ["a", "b"])
@pytest.mark.parametrize("front_end", ["shard", "wrap"])
def test_a_forward_that_a_hook_ends(two: Pool, front_end: str, at: str) -> None:
    two.run(beside_eagerly, stopped_on_purpose, front_end, at)


class Recursive(Net):
    """Calls itself, and does without where that raises; a weight is that of a unit inside."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if self.fails and not depth:
            raise ValueError("a bad part")
        if depth:
            try:
                x = x + self(x * 0.5, depth - 1).sum(1, keepdim=True)
            except ValueError:
                x = x * 2
        return super().forward(x)


def inner_call_raises(side: Side) -> None:
    model: Any = side.shard(Recursive(), "a")
    optimizer = side.sgd(model.parameters())
    for step in range(4):
        model.fails = step % 2 == 1
        loss = model(side.batch(step)).square().mean()
        loss.backward()
        side.note("loss", loss)
        optimizer.step()
        optimizer.zero_grad()
        side.note_params(model)


def test_a_call_of_itself_that_raises(two: Pool) -> None:
    """The call around it needs what was gathered."""
    two.run(beside_eagerly, inner_call_raises)


OURS = str(Path(compiled_fsdp.__file__).parent)


@contextmanager
def interrupted(at: int, within: str) -> Iterator[list[str]]:
    """Ctrl-C where the function of this number of ours begins to run, of a file with this in its
    name: where Python looks for signals. Yields its name, once it has come.
    """
    left, where = at, list[str]()

    def watch(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        name = frame.f_code.co_filename
        if name.startswith(OURS) and within in name:
            left -= 1
            if not left:
                where.append(f"{name}:{frame.f_lineno} ({frame.f_code.co_name})")
                raise KeyboardInterrupt

    sys.settrace(watch)
    try:
        yield where
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(
    ("within", "every"), [("deferred.py", 5), ("called.py", 1), ("classes.py", 5), ("", 151)]
)
@pytest.mark.parametrize("front_end", ["shard", "wrap"])
@pytest.mark.usefixtures("fake_world")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in generators
def test_an_interrupt_anywhere(front_end: str, within: str, every: int) -> None:
    """A step, and an evaluation, are interrupted; the next step has the gradients of any other."""
    side = Side("eager")
    model: Any = getattr(side, front_end)(Net(), "a", "b")

    def step() -> list[Tensor]:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        found = [whole.clone() for p in model.parameters() if (whole := local(p.grad)) is not None]
        model.zero_grad()
        return found

    step()
    expected, at, where = step(), 0, [""]
    gathers = all(map(torch.equal, step(), expected))  # a fake group of 2.11 fills nothing in
    while where:
        at += every
        with suppress(KeyboardInterrupt), interrupted(at, within) as where:
            step()
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        torch.set_grad_enabled(mode=True)  # an interrupt can keep no_grad() from ending
        model.zero_grad()
        try:
            for _ in range(2):
                found = step()
                assert len(found) == len(expected)
                assert not gathers or all(map(torch.equal, found, expected))
        except (RuntimeError, AttributeError, AssertionError) as error:  # frames hold freed memory
            pytest.fail(f"behind an interrupt at {where}: {error}", pytrace=False)
    assert at > 10 * every


def local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def beside_eagerly(script: Callable[..., None], *args: Any) -> None:
    beside(script, *args, kinds=("eager",))
