"""A step that runs out of memory at any of its ops, on all ranks: the script catches it, drops the
gradients, and goes on, as many do with a smaller batch.

Ops of a step, in forward, in backward and at its end, raise in turn, in one model; the step after
each has the gradients that the first one had, and nothing is announced that did not happen.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from kit.beside import WIDTH, Net, Side
from kit.compare import check_equal, whole
from kit.oracle import BACKENDS
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_fsdp import compile_step, errors, overlap_optimizer
from compiled_fsdp.units.flat import FlatBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.pool import Pool
    from torch import Tensor


class Failing(TorchDispatchMode):
    """Runs out of memory at an op; counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count, self.where = at, 0, "nowhere"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            self.where = f"op {self.at}, {func}"
            raise torch.OutOfMemoryError("not really")
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as without it."""
        return True


class Even(Net):
    """Each rank has as much of it as the other, so that their ops are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDTH, 4)


class Checkpointed(Even):
    """Computes two layers again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(
            lambda x: self.b(self.a(x).tanh()).tanh(), x, use_reentrant=False
        )
        result: Tensor = self.c(hidden)
        return result


def plain(side: Side) -> Any:
    return side.shard(Even(), "a", "b")


def kept(side: Side) -> Any:
    return side.shard(Even(), "a", "b", reshard_after_forward=False)


def offloaded(side: Side) -> Any:
    return side.shard(Even(), "a", "b", offload_policy=CPUOffloadPolicy(pin_memory=False))


def checkpointed(side: Side) -> Any:
    return side.shard(Checkpointed(), "a", "b")


def overlapped(side: Side) -> Any:
    model = side.shard(Even(), "a", "b")
    overlap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def fsdp1(side: Side) -> Any:
    return side.wrap(Even(), "a", "b", use_orig_params=False)  # whose ops are the same on all ranks


def finalizing(side: Side) -> Any:
    model = side.shard(Even(), "a", "b")
    model.set_manual_backward_finalization(True)
    return model


def accumulating(side: Side) -> Any:
    return side.shard(Even(), "a", "b")


EVERY = 8  # faults are as wide as what is between two changes of state
MAKERS = (plain, kept, offloaded, checkpointed, overlapped, fsdp1, finalizing, accumulating)


class Run:
    """A model of ours, and how a step of it goes; `num_parts` micro-batches in each."""

    def __init__(self, kind: str, maker: Callable[[Side], Any]) -> None:
        torch._dynamo.reset()
        side = Side(kind)
        self.side, self.maker = side, maker
        self.model = maker(side)
        self.call = side.compile(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_parts = 2 if maker is accumulating else 1

    def backward(self, start: int = 0) -> None:
        """The gradients of one step."""
        for part in range(self.num_parts):
            if self.num_parts > 1:
                self.model.set_requires_gradient_sync(part == self.num_parts - 1)
            self.call(self.side.batch(start + part)).square().mean().backward()
        if self.maker is finalizing:
            self.model.finalize_backward()

    def losses(self) -> list[Tensor]:
        """Of two batches, one forward behind the other."""
        return [self.call(self.side.batch(step)).square().mean() for step in range(2)]

    def drop(self) -> None:
        """What a script does behind an exception."""
        self.optimizer.zero_grad()
        if self.num_parts > 1:
            self.model.reset_iter_state()  # as announced

    def grads(self) -> list[Tensor | None]:
        """Those of this step; of FSDP1, what this rank has of each."""
        return [None if p.grad is None else whole(p.grad) for p in self.model.parameters()]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_any_op_runs_out_of_memory(two: Pool, kind: str, maker: Any) -> None:
    two.run(any_op_fails, kind, maker)


def any_op_fails(kind: str, maker: Callable[[Side], Any]) -> None:
    run = Run(kind, maker)
    run.backward()
    expected = run.grads()
    run.drop()
    with Failing(at=0) as counting:
        run.backward()
    check_equal(run.grads(), expected, "twice the same")
    count = 0
    first = 1 + MAKERS.index(maker) % EVERY
    for at in range(first, counting.count + 1, EVERY * run.num_parts):
        run.drop()
        with nothing_else_said(run), Failing(at) as failing:
            try:
                run.backward()
            except torch.OutOfMemoryError:
                count += 1
            failing.at = 0
            run.drop()
            run.backward()
        check_equal(run.grads(), expected, f"behind {failing.where}")
    assert count > 5, "the first steps look at more than later ones"


@pytest.mark.parametrize("maker", [plain, kept, checkpointed, fsdp1], ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", ["eager", "compiled"])
def test_another_backward_goes_on(two: Pool, kind: str, maker: Any) -> None:
    two.run(another_goes_on, kind, maker)


def another_goes_on(kind: str, maker: Callable[[Side], Any]) -> None:
    """Two losses: the backward of one fails, and that of the other comes, without a forward between
    them.
    """
    run = Run(kind, maker)
    losses = run.losses()
    losses[1].backward()
    expected = run.grads()
    run.drop()
    losses = run.losses()
    with Failing(at=0) as counting:
        losses[0].backward()
    for at in range(1, counting.count + 1, EVERY):
        run.drop()
        losses = run.losses()
        with nothing_else_said(run):
            with contextlib.suppress(torch.OutOfMemoryError), Failing(at) as failing:
                losses[0].backward()
            run.drop()
            losses[1].backward()
        check_equal(run.grads(), expected, f"behind {failing.where}")


@contextlib.contextmanager
def nothing_else_said(run: Run) -> Iterator[None]:
    """Where backwards keep gradients, that an exception left some is said, and nothing else is."""
    errors._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in caught]
    if run.num_parts > 1:
        texts = [text for text in texts if "an exception left a" not in text]
    assert not texts


@pytest.mark.parametrize("maker", [plain, fsdp1], ids=lambda m: m.__name__)
def test_an_interrupt_where_a_graph_delivers(two: Pool, maker: Any) -> None:
    two.run(interrupted_at_delivery, maker)


def interrupted_at_delivery(maker: Callable[[Side], Any]) -> None:
    """Ctrl-C between autograd's accumulating and our taking a flat gradient."""
    run = Run("compiled", maker)
    run.backward()
    expected = run.grads()
    run.drop()
    with mock.patch.object(FlatBuffer, "_take_leaf_grad", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run.backward()
    run.drop()
    run.backward()
    check_equal(run.grads(), expected, "behind an interrupt")


@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_a_whole_step_that_fails(two: Pool, ahead: int) -> None:
    two.run(whole_step_fails, ahead)


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def whole_step_fails(ahead: int) -> None:
    """Before the first update nothing has changed; behind it, the step says that it has ended
    halfway. With parameters as they were, the next one is as if nothing had been.
    """
    torch._dynamo.reset()
    side = Side("compiled")
    model = side.shard(Even(), "a", "b")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = compile_step(
        model, optimizer, mean_square, max_ahead_bytes=ahead, backend=BACKENDS["compiled"]
    )
    params = list(model.parameters())

    def values() -> list[Tensor]:
        return [p.to_local().detach().clone() for p in params]

    def restore(saved: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(params, saved, strict=True):
                p.to_local().copy_(value)

    before = values()
    step(side.batch(0))
    expected = values()
    restore(before)
    with Failing(at=0) as counting:
        step(side.batch(0))
    check_equal(values(), expected, "twice the same")
    halfway = 0
    for at in range(1, counting.count + 1, EVERY):
        restore(before)
        errors._said.clear()
        with warnings.catch_warnings(record=True) as caught, Failing(at) as failing:
            warnings.simplefilter("always")
            with contextlib.suppress(torch.OutOfMemoryError):
                step(side.batch(1))
        is_changed = not all(torch.equal(*pair) for pair in zip(values(), before, strict=True))
        is_said = any("some units were updated" in str(each.message) for each in caught)
        if failing.where != "nowhere":
            assert is_said or not is_changed, failing.where
            halfway += is_changed
        restore(before)
        step(side.batch(0))
        check_equal(values(), expected, f"behind {failing.where}")
    assert halfway
