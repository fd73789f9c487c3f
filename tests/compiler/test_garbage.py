"""Python's garbage collector while a model of ours is compiled: rarely,
and as before afterwards.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from compiled_fsdp import fully_shard, pipeline
from compiled_fsdp.torch_private.compiling import RARELY, collect_rarely

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import GraphModule

    from compiled_fsdp import Plan


@contextmanager
def thresholds(*values: int) -> Iterator[None]:
    """The user's own thresholds inside."""
    before = gc.get_threshold()
    gc.set_threshold(*values)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def model() -> nn.Module:
    torch._dynamo.reset()
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def step(backend: str | Callable[..., Any]) -> None:
    net = torch.compile(model(), backend=backend, fullgraph=True)
    net(torch.ones(2, 4)).sum().backward()


def young_ones(run: Callable[[], None]) -> int:
    """How often Python looks at young objects meanwhile."""
    seen = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        run()
    finally:
        gc.callbacks.remove(note)
    return len(seen)


def test_a_compilation_is_seldom_stopped(fake_world: None) -> None:
    """Counted: a model compiled with our ops, and as it would be with Python's thresholds."""
    step("compiled_fsdp_eager")
    with thresholds(700, 10, 10):
        rarely = young_ones(lambda: step("compiled_fsdp_eager"))
        assert gc.get_threshold() == (700, 10, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_fsdp.torch_private.compiling.RARELY", (701, 10, 10))
        with thresholds(700, 10, 10):
            often = young_ones(lambda: step("compiled_fsdp_eager"))
    assert 3 * rarely < often, (rarely, often)


def test_both_ways_and_after_errors(fake_world: None) -> None:
    seen = []

    def note(gm: GraphModule, plan: Plan) -> None:
        seen.append(gc.get_threshold()[0])

    with thresholds(700, 10, 10):
        with pipeline(note, after="free"):
            step("compiled_fsdp_eager")
        assert seen == [RARELY[0], RARELY[0]]
        assert gc.get_threshold() == (700, 10, 10)

        def failing(gm: GraphModule, _: object) -> GraphModule:
            assert gc.get_threshold()[0] == RARELY[0]
            raise RuntimeError("not today")

        with pytest.raises(Exception, match="not today"):
            step(failing)
        assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (100_000, 5, 5)])
def test_who_collects_rarely_already_is_left_alone(fake_world: None, own: tuple[int, ...]) -> None:
    seen = []

    def compiled(gm: GraphModule, _: object) -> GraphModule:
        seen.append(gc.get_threshold()[0])
        return gm

    with thresholds(*own):
        step(compiled)
        assert seen == [own[0]]
        assert gc.get_threshold() == own


def test_nothing_of_the_users_own_models(fake_world: None) -> None:
    seen = []

    def compiled(gm: GraphModule, _: object) -> GraphModule:
        seen.append(gc.get_threshold()[0])
        return gm

    model()
    with thresholds(700, 10, 10):
        collect_rarely()  # nothing is being compiled
        torch.compile(nn.Linear(4, 4), backend=compiled)(torch.ones(2, 4))
        assert seen == [700]
