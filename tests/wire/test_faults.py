"""A rank that dies, raises, stalls or runs out of memory: the others say whom they waited for and
for what, and nothing hangs.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kit.pool import Pool, WorkerError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compiled_fsdp import fully_shard
from compiled_fsdp.wire import gloo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S, LONG_S = (
    4,
    60,
)  # of a group for whose end a test waits, and of one that nothing is to break


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A fresh one for each test: faults break connections."""
    pool = Pool(2)
    yield pool
    pool.close()


class Trip(torch.autograd.Function):
    """Identity that does something in forward or in backward, on rank 1 and once it is armed."""

    armed: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _trip("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _trip("backward")
        return grad


def _trip(place: str) -> None:
    if Trip.armed is not None and Trip.armed[0] == place and dist.get_rank() == 1:
        Trip.armed[1]()


class Between(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Trip.apply(x)


def model(patience: float = PATIENCE_S) -> Any:
    """Two units with a trip wire between them, over a group of little patience."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=patience))
    mesh = DeviceMesh.from_group(group, "cpu")
    made = nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4))
    for layer in (made[0], made[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def step(call: Any) -> None:
    call(torch.ones(2, 4)).sum().backward()


def stall() -> None:
    time.sleep(PATIENCE_S + 2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no memory for 64 bytes")


def go_wrong() -> None:
    raise ValueError("wrong on this rank")


def tripped(place: str, what: str) -> str:
    """The second step goes wrong on rank 1; what this rank is told."""
    made = model()
    step(made)
    Trip.armed = place, globals()[what]
    original = gloo.start
    if place == "collective" and dist.get_rank() == 1:
        gloo.start = lambda *_: globals()[what]()
    try:
        step(made)
    except (RuntimeError, torch.OutOfMemoryError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Trip.armed, gloo.start = None, original
    return ""


def all_tripped(cases: list[tuple[str, str]]) -> list[str]:
    """One fault after the other, each over a group of its own."""
    return [tripped(*case) for case in cases]


IN_BACKWARD = "(0.weight, 0.bias)"
TOLD = [
    ("forward", "stall", "all-gather of 2 (2.weight, 2.bias)"),
    ("backward", "stall", IN_BACKWARD),
    ("forward", "go_wrong", "all-gather of 2 (2.weight, 2.bias)"),
    ("backward", "go_wrong", IN_BACKWARD),
    ("collective", "out_of_memory", "all-gather of 0 (0.weight, 0.bias)"),
]


def test_a_rank_that_stalls_or_raises(pool: Pool) -> None:
    """The others learn which collective of which unit they waited for, how long, and for whom."""
    first, second = pool.run(all_tripped, [case[:2] for case in TOLD])
    for (place, what, waited_for), told, own in zip(TOLD, first, second, strict=True):
        assert told.startswith("CommunicationError: compiled_fsdp: "), (place, what, told)
        assert waited_for in told, (place, what)
        assert "waiting for rank 1" in told, (place, what)
        assert f"stalls for longer than {PATIENCE_S} s" in told, (place, what)
        if what != "stall":
            assert own.startswith(
                {"go_wrong": "ValueError", "out_of_memory": "OutOfMemoryError"}[what]
            )


def told_of_death(place: str, folder: str) -> None:
    text = tripped(place, "die")
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(text)


@pytest.mark.parametrize("place", ["forward", "backward", "collective"])
def test_a_rank_that_dies(pool: Pool, place: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 1: died"):
        pool.run(told_of_death, place, str(tmp_path), timeout=60.0)
    assert (tmp_path / "0").read_text().startswith("CommunicationError: compiled_fsdp: ")


def gather_fails() -> str:
    """Rank 1 finds no memory for a gather of a graph; the other waits for it no longer than the
    group allows.
    """
    made = model()
    made[1] = nn.Tanh()
    call = torch.compile(made, backend="compiled_fsdp_eager", fullgraph=True)
    step(call)
    original = gloo.start
    if dist.get_rank() == 1:
        gloo.start = lambda *_: out_of_memory()
    try:
        step(call)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gloo.start = original
    return ""


def test_out_of_memory_in_a_gather_of_a_graph(pool: Pool) -> None:
    first, second = pool.run(gather_fails)
    assert first.startswith(
        "CommunicationError: compiled_fsdp: all-gather of 0 (0.weight, 0.bias)"
    ), first
    assert "OutOfMemoryError" in second


def nan_gradients(compiled: bool) -> str:
    """NaN on one rank reaches every rank's gradient, and all refuse alike."""
    made = model(LONG_S)
    made[1] = nn.Tanh()
    call = torch.compile(made, backend="compiled_fsdp_eager", fullgraph=True) if compiled else made
    value = float("nan") if dist.get_rank() == 1 else 1.0
    call(torch.full((2, 4), value)).sum().backward()
    try:
        nn.utils.clip_grad_norm_(made.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("compiled", [False, True])
def test_nan_gradients_are_refused_on_every_rank(two: Pool, compiled: bool) -> None:
    for text in two.run(nan_gradients, compiled):
        assert "non-finite" in text


def killed_in_save(out: str) -> None:
    """A good checkpoint; then rank 1 dies while the next is written."""
    from pathlib import Path

    import checkpoint

    made = model(LONG_S)
    optimizer = torch.optim.AdamW(made.parameters())
    step(made)
    optimizer.step()
    run = {"job": "", "options": {}, "step": 1, "text": "x", "history": {}}
    checkpoint.save(Path(out), made, optimizer, run)
    dist.barrier()
    if dist.get_rank() == 1:
        checkpoint.save_shards = lambda *_, **__: die()
    checkpoint.save(Path(out), made, optimizer, {**run, "step": 2})


def test_a_rank_that_dies_while_saving(pool: Pool, tmp_path: Path) -> None:
    import checkpoint

    with pytest.raises(WorkerError, match="rank 1: died"):
        pool.run(killed_in_save, str(tmp_path), timeout=60.0)
    checkpoint.verify(tmp_path)
    assert checkpoint.read_run(tmp_path)["step"] == 1
    (tmp_path / checkpoint.FOLDER).rename(
        tmp_path / f"{checkpoint.FOLDER}.old"
    )  # killed between the two renames
    checkpoint.verify(tmp_path)
    assert checkpoint.read_run(tmp_path)["step"] == 1
