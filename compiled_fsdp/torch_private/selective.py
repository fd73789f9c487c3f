"""Private torch: selective activation checkpoints (`create_selective_checkpoint_contexts`), and the
stack of dispatch modes that they are on. Tried on torch 2.11, 2.13, 2.14 and 2.15.

[Note: selective checkpoints]
Such a checkpoint is a dispatch mode. In forward it keeps the results of the ops that its policy
names, by op and by the number of the call; when the region is computed again, in backward, the n-th
call of such an op is given the n-th result. Our runtime calls ops, too, where it gathers: `mul` for
a checksum, `slice` for a shard. These differ from the one time to the other, since in backward what
is kept is not gathered again, and the program's own call would be given another's result. So ours
are called without these modes. Others (counters, loggers, fakes) see them.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")

SELECTIVE = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
_num_modes = torch._C._len_torch_dispatch_stack


def unselected(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep what this function computes, and all that it calls, out of selective checkpoints."""

    @functools.wraps(fn)
    def aside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _num_modes():
            return fn(*args, **kwargs)
        with _outside():
            return fn(*args, **kwargs)

    return aside


@contextmanager
def _outside() -> Iterator[None]:
    """Take these modes off the stack, and put them back. Modes of torch's own (fakes, proxies)
    are kept beside it.
    """
    stack = (torch._C._get_dispatch_stack_at(i) for i in range(_num_modes()))
    modes = [mode for mode in stack if getattr(mode, "_mode_key", None) is None]
    first = next((i for i, mode in enumerate(modes) if isinstance(mode, SELECTIVE)), None)
    if first is None:
        yield
        return
    above = modes[first:]
    others = [mode for mode in above if not isinstance(mode, SELECTIVE)]
    _exchange(above, others)
    try:
        yield
    finally:
        _exchange(others, above)


def _exchange(old: list[object], new: list[object]) -> None:
    """Put modes in the place of the last ones of the stack."""
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)  # type: ignore[arg-type]
