"""The order in which a hook on a stream of the user's waits, and is awaited."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

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
