"""A device beside the host, played by the CPU: what is missing between them gives wrong numbers.

`beside_host()` says that the CPU has memory of its own. What rests on the host is held as its
negative: a copy negates, so that whatever reads one memory for the other, or copies twice, computes
with the wrong sign, and SGD and Adam step what rests bit for bit as they would (each is odd).
Copies are late: NaN until they are awaited, and only then is the source read. What reads too early,
or writes to the source too early, computes NaN or something else.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

from compiled_fsdp.fsdp2 import api
from compiled_fsdp.ir.collectives import HOST
from compiled_fsdp.torch_private.dtensors import local_tensor
from compiled_fsdp.torch_private.groups import PythonWork
from compiled_fsdp.wire import copies

if TYPE_CHECKING:
    from collections.abc import Iterator


class Late(PythonWork):  # type: ignore[misc]
    """A copy that happens when it is awaited."""

    under_way: ClassVar[set[Late]] = set()

    def __init__(self, source: Tensor, copied: Tensor, is_to_host: bool) -> None:
        super().__init__()
        self.source, self.copied, self.is_to_host = source, copied, is_to_host
        Late.under_way.add(self)

    def wait(self, timeout: object = None) -> bool:
        with torch.inference_mode(mode=False), torch.no_grad():
            self.copied.copy_(turned(self.source))
        Late.under_way.discard(self)
        return True


def turned(values: Tensor) -> Tensor:
    """What stands for values in the other memory."""
    return -values if values.is_floating_point() or values.is_complex() else ~values


class Copies:
    """How many were begun, the most that were under way at once, and the most bytes of activations
    that were on the host.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self.most_under_way = 0
        self.most_on_host = 0
        self._on_host = 0

    def begin(
        self,
        source: Tensor,
        device: str,
        pins: bool,
        *,
        is_for_device: bool = False,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        copied = into
        if copied is None:
            copied = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        copied.fill_(torch.nan if source.is_floating_point() else 1)
        work = Late(source.detach(), copied, device == HOST)
        self.num_begun += 1
        if is_for_device and into is None:
            num_bytes = copied.nbytes
            self._on_host += num_bytes
            self.most_on_host = max(self.most_on_host, self._on_host)
            weakref.finalize(copied.untyped_storage(), self._gone, num_bytes)
        self.most_under_way = max(self.most_under_way, len(Late.under_way))
        return copied, work

    def _gone(self, num_bytes: int) -> None:
        self._on_host -= num_bytes


@contextmanager
def beside_host() -> Iterator[Copies]:
    """For units that are made inside."""
    seen = Copies()
    with (
        mock.patch.object(copies, "is_apart", return_value=True),
        mock.patch.object(copies, "begin", seen.begin),
        mock.patch.object(torch.Tensor, "pin_memory", Tensor.clone),
        mock.patch.object(api, "can_pin", return_value=True),
    ):
        yield seen
    assert not Late.under_way, "copies that nobody awaits"


@torch.no_grad()
def negate(model: nn.Module) -> None:
    """From values to what rests on the host for them, or back; gradients too."""
    for param in model.parameters():
        local_tensor(param).neg_()
        if param.grad is not None:
            local_tensor(param.grad).neg_()
