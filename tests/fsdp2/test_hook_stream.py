"""The order in which a hook on a stream of the user's waits, and is awaited."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from kit.passes_harness import fake_ranks

from compiled_fsdp import fully_shard
from compiled_fsdp.fsdp2 import hook_stream


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def test_behind_the_reduction_and_before_its_use() -> None:
    log: list[str] = []
    module = mock.MagicMock()
    module.current_stream.return_value = Stream("current", log)
    hook = hook_stream.HookOnStream.of(lambda reduced: log.append("hook"), Stream("user's", log))
    with mock.patch.object(torch, "get_device_module", return_value=module):
        hook(torch.ones(1))
    assert log == ["user's waits for current", "hook", "current waits for user's"]
    module.stream.assert_called_once_with(hook.stream)


class Trainer:
    def __init__(self) -> None:
        self.model: Any = fully_shard(torch.nn.Linear(4, 4))
        self.model.set_all_reduce_hook(self.hook)
        self.num_called = 0

    def hook(self, reduced: torch.Tensor) -> None:
        self.num_called += 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_hook_goes_with_its_model(is_compiled: bool) -> None:
    with fake_ranks(1):
        trainer = Trainer()
        call = trainer.model
        if is_compiled:
            call = torch.compile(call, backend="compiled_fsdp_eager")
        call(torch.ones(2, 4)).sum().backward()
        assert trainer.num_called == 1
        held = weakref.ref(trainer)
        del trainer, call
        torch._dynamo.reset()
        gc.collect()
        assert held() is None
