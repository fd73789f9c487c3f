"""A long compilation says what it does and how far it is, by a clock of the test's;
a short one says nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function
from kit.stems import HALF_NAMES
from torch import nn

from compiled_fsdp import fully_shard, log, pipeline, progress
from compiled_fsdp.progress import Progress
from compiled_fsdp.torch_private import compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ticked(progress: Progress, clock: Clock, until: int, each: Callable[[int], None]) -> None:
    for second in range(1, until + 1):
        clock.now = 100.0 + second
        each(second)
        progress.tick()


def compilation(seconds: int, *, is_live: bool = False) -> list[tuple[str, bool]]:
    """What is said of one: tracing for 15 s, passes for 10, code from then on."""
    said: list[tuple[str, bool]] = []
    clock, where = Clock(), ["Dynamo traces"]
    made = Progress(lambda: where[0], lambda *line: said.append(line), is_live, clock)

    def each(second: int) -> None:
        if second <= 15:
            made.units.add(f"layers.{second}")
        else:
            where[0] = "passes of compiled_fsdp" if second <= 25 else "Inductor generates code"
            made.ours = f"backward graph, pass {min(second - 15, 10)} of 10 done"

    ticked(made, clock, seconds, each)
    made.end()
    return said


def test_nothing_is_said_of_a_short_one() -> None:
    assert compilation(9) == []


def test_a_log_gets_few_lines_of_a_long_one() -> None:
    assert compilation(60) == [
        ("compiled_fsdp: compiling for 10 s: Dynamo traces, 10 units seen", False),
        (
            "compiled_fsdp: compiling for 20 s: passes of compiled_fsdp, backward graph, pass 5 of "
            "10 done",
            False,
        ),
        (
            "compiled_fsdp: compiling for 40 s: Inductor generates code, backward graph, pass 10 "
            "of 10 done",
            False,
        ),
        (
            "compiled_fsdp: compiled in 60 s; longest: Inductor generates code 35 s, Dynamo traces "
            "15 s, passes of compiled_fsdp 10 s",
            True,
        ),
    ]


def test_a_terminal_gets_one_line_that_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(compilation(30, is_live=True)) == 22  # each second from the tenth on, and the sum
    with mock.patch.object(log, "is_terminal", return_value=True):
        log.say_progress("half", False)
        log.say_progress("done", True)
    assert capsys.readouterr().err == "\r\x1b[Khalf\r\x1b[Kdone\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Compilations are looked at only where the test says so."""
    torch._dynamo.reset()
    clock = Clock()
    monkeypatch.setattr(progress, "PERIOD", threading.TIMEOUT_MAX)
    monkeypatch.setattr(progress, "clock", clock)
    yield clock
    assert progress._now is None


def stack() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def looking(clock: Clock) -> Callable[..., None]:
    """A pass by which a compilation has taken ten seconds more."""

    def look(gm: torch.fx.GraphModule, plan: object) -> None:
        clock.now += 10
        assert progress._now is not None
        progress._now.tick()

    return look


@pytest.mark.usefixtures("fake_world")
class TestACompilation:
    def test_each_phase_is_told(self, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        model = torch.compile(stack(), backend="compiled_fsdp_eager")
        with (
            caplog.at_level(logging.INFO, "compiled_fsdp"),
            pipeline(looking(clock), before="free"),
        ):
            model(torch.ones(2, 4)).sum().backward()
        said = [r.getMessage() for r in caplog.records if "compil" in r.getMessage()]
        first, sum_up, second, _ = said  # backward is compiled where it first runs
        assert first.startswith("compiled_fsdp: compiling for 10 s: passes of compiled_fsdp, "), (
            first
        )
        assert f", forward graph, pass {HALF_NAMES.index('free')} of " in first
        assert sum_up.endswith("compiled in 10 s; longest: passes of compiled_fsdp 10 s")
        assert f", backward graph, pass {HALF_NAMES.index('free')} of " in second

    def test_other_ranks_are_silent(self, clock: Clock) -> None:
        watched = []

        def look(gm: torch.fx.GraphModule, plan: object) -> None:
            watched.append(progress._now)

        model = torch.compile(stack(), backend="compiled_fsdp_eager")
        with mock.patch.object(dist, "get_rank", return_value=1), pipeline(look, before="free"):
            model(torch.ones(2, 4))
        assert watched == [None]

    def test_one_that_fails_ends_too(self, clock: Clock) -> None:
        def fail(gm: torch.fx.GraphModule, plan: object) -> None:
            raise ZeroDivisionError

        model = torch.compile(stack(), backend="compiled_fsdp_eager")
        with pipeline(fail, after="lower"), pytest.raises(Exception, match="ZeroDivisionError"):
            model(torch.ones(2, 4))
        assert progress._now is None

    def test_a_trace_by_hand_is_none(self, clock: Clock) -> None:
        progress.seen("layers.0#0")
        progress.at("forward graph")
        assert progress._now is None


def test_what_torch_does_is_read_from_the_stack() -> None:
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.append(compiling.doing(sys._getframe()))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert seen == ["Dynamo traces"]
    assert compiling.doing(None) == ""


def test_what_stands_around_a_function_does_nothing() -> None:
    """`torch.compiler.disable` is Dynamo's code, wherever it is met: in AOTAutograd, mostly."""
    seen: list[str] = []

    @torch.compiler.disable
    def look() -> None:
        seen.append(compiling.doing(sys._getframe()))

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            look()
            return x.clone()

    look()
    aot_function(lambda x: Looks.apply(x), fw_compiler=lambda gm, _: gm)(torch.ones(2))
    assert seen[0] == ""
    assert set(seen[1:]) == {"AOTAutograd traces forward and backward"}
