"""Parameters that change behind a unit's back: writes that no version counts, between a gather and
its use, or between a graph's forward and its backward.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from compiled_fsdp.errors import warn_once
from compiled_fsdp.options import is_verifying
from compiled_fsdp.torch_private.autograd import backward_number, current_run, next_run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from .param import ShardedParam

COLUMNS = 512  # of a table of integers
ODD, MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
MOST_CALLS = 1024  # of a unit that is called again and again, and no backward comes
DEVICE_MESSAGE = 254  # characters that `_assert_async` takes on CUDA
# Where a write was missed, and what to do; see `check_unwritten`.
_INSTEAD = (
    "No version counts such writes, nor those through .numpy() or a detached local tensor: write "
    "to each parameter itself under torch.no_grad()"
)
BEFORE_FORWARD = (
    "between optimizer.step() and forward, and had been gathered already. "
    f"{_INSTEAD}, or pass max_ahead_bytes=0 to overlap_optimizer "
    "or compile_step"
)
IN_FORWARD = (
    "after the gather for their forward was started: ahead, by the unit before, by a prefetch "
    f"list, or by unshard(async_op=True). {_INSTEAD}, or run the unit's forward under "
    "torch.no_grad() if it is not trained"
)
WHILE_KEPT = (
    "while the full parameters were kept for another forward (reshard_after_forward=False, "
    f"set_reshard_after_backward(False), or unshard()). {_INSTEAD}, or call reshard() on the "
    "module afterwards"
)


def checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum of every bit and of its place, to notice also what no version counts, and
    what has only been moved: rows that change places.

    The bits are read as a table of 64-bit integers, and hashes of the sums of its rows and columns
    are added up. What leaves all of these sums as they are is not noticed. Two changed signs would
    be such a thing in 64-bit numbers, of which the halves are read instead.
    """
    words, ends = _words(tensor, torch.int32 if tensor.dtype.itemsize == 8 else torch.int64)
    num = words.numel() // COLUMNS * COLUMNS
    total = _hashed(words[num:], 0)
    if num:
        table = words[:num].view(-1, COLUMNS)
        total += _hashed(table.sum(1), 1) + _hashed(table.sum(0), 2)
    if ends.numel():
        total += _hashed(ends, 3)
    return total


def _hashed(values: Tensor, kind: int) -> Tensor:
    is_real = type(values) is torch.Tensor  # what a fake mode makes is not kept for others
    weights = _weights if is_real else _weights.__wrapped__
    mixed = values * weights(values.numel(), kind, values.device)
    mixed ^= mixed >> 32
    return (mixed * MIX).sum()


@lru_cache(maxsize=256)
def _weights(num: int, kind: int, device: torch.device) -> Tensor:
    """Odd numbers by which the sums of different places differ; a kind has its own."""
    with torch.inference_mode(mode=False):
        mixed = torch.arange(1, num + 1, device=device) * ODD + kind * MIX
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 29)) * MIX
        return mixed ^ (mixed >> 32) | 1


def plain_sum(tensor: Tensor) -> Tensor:
    """Returns a checksum of every bit that stays the same when words are only moved."""
    return torch.stack([part.sum() for part in _words(tensor, torch.int64)]).sum()


def _words(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bits of a tensor as integers of this dtype, and the bytes behind the last of them."""
    if 0 in tensor.stride():  # of parameters that are apart (`no_memory`)
        tensor = tensor.as_strided((1,), (1,))
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // dtype.itemsize * dtype.itemsize
    return data[:whole].view(dtype), data[whole:]


def check_unwritten(
    name: str, data: Tensor, before: Tensor, why: str, plain: Tensor | None = None
) -> None:
    """Fail if a unit's buffer has changed without a new version: other ranks may not know, so
    gathering again could hang.

    name: of the unit.
    before: the checksum of `data` then.
    why: one of the texts above.
    plain: its `plain_sum` then, where all ranks find what has changed that, and say so together.
    """
    text = f"parameters of {name} were written to through .data, or by a foreach op, {why}"
    is_fine = checksum(data) == before
    if plain is not None:
        is_fine |= plain_sum(data) != plain
    torch._assert_async(is_fine, _for_device(text, before.device))


def _for_device(text: str, device: torch.device) -> str:
    """The text, cut to what a failing kernel can print."""
    return text if device.type == "cpu" else text[:DEVICE_MESSAGE]


@dataclass
class ReadByGraphs:
    """What the first graph of a forward has read of one flat buffer, until its backward has come.

    total: with COMPILED_FSDP_VERIFY, a checksum of it.
    versions: those that its trained parameters had.
    is_read_back: a backward has come for it, since when the next graph reads anew.
    calls: those that have read so, by the runs that autograd recorded in each, from the first to
        behind the last; none while a call lasts. Of these the last `MOST_CALLS`; what others have
        read is not known.
    """

    total: Tensor | None = None
    versions: list[tuple[ShardedParam, int]] | None = None
    is_read_back: bool = False
    calls: deque[tuple[int, int | None]] = field(default_factory=lambda: deque(maxlen=MOST_CALLS))

    def forget(self) -> None:
        """Another forward begins, or parameters change as they are to."""
        self.total = self.versions = None
        self.calls.clear()

    def begin(self, data: Tensor, trained: Iterable[ShardedParam]) -> None:
        """Remember what a graph that records for a backward is going to read,
        if it is the first.
        """
        if not torch.is_grad_enabled():
            return
        if backward_number() == -1 and (self.versions is None or self.is_read_back):
            self.is_read_back = False
            self.versions = [(p, p.sharded._version) for p in trained]
            self.total = checksum(data) if is_verifying() else None
            self.calls.clear()
        self.calls.append((next_run(), None))

    def end(self) -> None:
        """The call that reads has ended."""
        for i in reversed(range(len(self.calls))):
            first, behind = self.calls[i]
            if behind is None:
                self.calls[i] = first, next_run()
                return

    def _is_known(self, run: int) -> bool:
        """Whether a run was recorded in a call that `versions` is about. A function that is
        compiled around a model, or instead of it, reads as well; one that has backward in it
        (`compile_step`) is run by no autograd, and reads what it is about itself.
        """
        return any(
            first <= run and (behind is None or run < behind) for first, behind in self.calls
        )

    def say_if_written(self, name: str, data: Tensor) -> None:
        """In a backward: announce that parameters have changed since; who wrote outside of graphs
        was seen by none. No version counts writes through `.data`.

        name: of the unit.
        """
        if not self._is_known(current_run()):
            return
        before, self.total, self.is_read_back = self.total, None, True
        is_written = any(p.sharded._version != version for p, version in self.versions or ())
        if is_written or (before is not None and before != checksum(data)):
            warn_once(
                f"compiled_fsdp: parameters of {name} were written to between a graph "
                "that read them and its backward, in code that no graph sees. That backward finds "
                "the old value where the full parameter was kept and the new one where it is "
                "gathered again; the plan decides which. Write to them after backward, or freeze "
                "them if they are not trained"
            )
