"""The third executor of `collectives.py`: record the ops, run them up to the next wait, and the
rest later.

So the eager runtime communicates in the background with the very arithmetic that graphs get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.ir import collectives as comm
from compiled_fsdp.ir.schema import ADD_RETAINED, COPY_TO, HOOK, RETAIN, START_COPY

from . import launch, ranges
from .agreement import lost
from .kernels import owner_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Value:
    """The result of a recorded op; `tensor` is set once it ran."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: Any = None


def _retain(grads: Any, flat: Any, *args: Any) -> None:
    owner_of(flat, "retain_").retain(grads, *args)


def _add_retained(grads: Any, flat: Any, *args: Any) -> None:
    owner_of(flat, "add_retained_").add_retained(grads, *args)


# As ops these ask whether the backward reaches the flat buffer; an eager one has reached the full
# parameters, or had no gradients.
KEPT: dict[Any, Callable[..., None]] = {RETAIN: _retain, ADD_RETAINED: _add_retained}


class Deferred:
    """Ops to run: call it like `launch.call`, then `advance`, then `finish`.

    what, group: what is communicated, and over which group, for errors.
    """

    def __init__(self, what: str, group: str) -> None:
        self.what, self.group = what, group
        self._started = "collective"  # the last op that was started, for profiles
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Value]] = []
        self._copies: list[Value] = []

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Record `op(*args, **kwargs)`."""
        if op is COPY_TO:
            self._copies.append(self(START_COPY, *args))
            return self(comm.WAIT, self._copies[-1])
        result = Value()
        self._steps.append((op, args, kwargs, result))
        return result

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to run."""
        return not self._steps

    @property
    def is_local(self) -> bool:
        """Whether what is left starts no communication: waits and arithmetic. A user's hook may."""
        return not any(op in comm.STARTS or op is HOOK for op, *_ in self._steps)

    def advance(self) -> None:
        """Run what can be run without waiting."""
        self._run(lambda is_copy: True)

    def pass_copies(self) -> None:
        """Run what can be run without waiting for another rank: copies to the device are awaited by
        its stream.
        """
        self._run(lambda is_copy: not is_copy)

    def come_to_copy(self) -> Any:
        """Run what stands before the wait for the only copy, and give its result, which is not
        there yet.
        """
        (copied,) = self._copies
        self._run(lambda is_copy: is_copy)
        return copied.tensor

    def finish(self) -> None:
        """Run everything, waits included."""
        self._run(lambda is_copy: False)

    def drop(self) -> None:
        """Await what was started, and start nothing more."""
        if self._steps and self._is_copy(self._steps[0]):
            launch.call(comm.WAIT, *_tensors(self._steps[0][1]))
            self._steps = []
        self.finish()

    def _is_copy(self, step: Any) -> bool:
        """Whether a wait is for a copy."""
        return any(step[1][0] is started for started in self._copies)

    def _run(self, stops: Callable[[bool], bool]) -> None:
        steps = self._steps
        stop = (n for n, s in enumerate(steps) if s[0] is comm.WAIT and stops(self._is_copy(s)))
        count = next(stop, len(steps))
        if not count:
            return  # an interrupt leaves what was started to whoever drops it
        self._steps = []  # if one raises, the rest is not run
        for op, args, kwargs, result in steps[:count]:
            if op is comm.WAIT:
                result.tensor = self._wait(*_tensors(args))
            elif op in comm.STARTS:
                self._started = op._opname
                with self._range(self._started):
                    result.tensor = launch.call(op, *_tensors(args), **kwargs)
            elif op in KEPT:
                KEPT[op](*_tensors(args), **kwargs)
            else:
                result.tensor = launch.call(op, *_tensors(args), **kwargs)
        self._steps = steps[count:]

    def _wait(self, started: Any) -> Any:
        try:
            with self._range(f"wait {self._started}"):
                return launch.call(comm.WAIT, started)
        except torch.OutOfMemoryError:  # of this rank, which others may hear of
            raise
        except RuntimeError as error:
            raise lost(self.what, self.group, error) from error

    def _range(self, op: str) -> AbstractContextManager[object]:
        kind, _, carried = self.what.partition(" of ")
        return ranges.around(op, "backward" if kind == "reduction" else ranges.phase_now(), carried)


def _tensors(values: Any) -> Any:
    """Tensors instead of recorded results, also inside lists."""
    if isinstance(values, Value):
        return values.tensor
    if isinstance(values, list | tuple) and any(
        isinstance(v, Value | list | tuple) for v in values
    ):
        return type(values)(_tensors(v) for v in values)
    return values
