"""A CUDA graph played by the CPU: the ops on tensors that a captured step runs, written down once,
and run again on the same memory with no Python of ours between.

What an op computes comes into the tensor that it came into when it was written down. Before each
replay those are filled with NaN, so that what the host has put there does not stay. As on a device,
to capture changes nothing: what was written meanwhile is put back.

Ops of ours that reach a unit are written down as what they are made of. Collectives are one op,
awaited where they are started.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_fsdp.ir.collectives import STARTS, WAIT
from compiled_fsdp.ir.schema import AGREE, MARK_GRADS, SHARD_NORMS, UPDATE
from compiled_fsdp.wire import captured, ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS: dict[Any, Callable[..., Any]] = {
    AGREE: ops._agree,
    MARK_GRADS: ops._mark_grads,
    SHARD_NORMS: ops._shard_norms,
    UPDATE: ops._update,
}
CAPTURABLE = ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop")


class Tape(TorchDispatchMode):
    """Writes down what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in KERNELS:
            with self:
                return KERNELS[func](*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("operation not permitted when stream is capturing")
        written = [
            arg
            for place, given in zip(func._schema.arguments, args, strict=False)
            if place.alias_info is not None and place.alias_info.is_write
            for arg in tree_leaves(given)
        ]
        written += [
            arg
            for place in func._schema.arguments
            if place.alias_info is not None and place.alias_info.is_write and place.name in kwargs
            for arg in tree_leaves(kwargs[place.name])
        ]
        self.before += [(x.detach(), x.detach().clone()) for x in written if x is not None]
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        return found

    def undo(self) -> None:
        for tensor, before in reversed(self.before):
            tensor.copy_(before)
        self.before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for _, args, kwargs, found in self.calls:
            for own in fresh(found, (args, kwargs)):
                if own.is_floating_point():
                    own.fill_(torch.nan)
        for func, args, kwargs, found in self.calls:
            new = func(*args, **kwargs)
            own = {id(x) for x in fresh(found, (args, kwargs))}
            for to, value in zip(tree_leaves(found), tree_leaves(new), strict=True):
                if id(to) in own:
                    to.copy_(WAIT(value) if func in STARTS else value)


def fresh(found: Any, given: Any) -> list[Tensor]:
    """Results that are no views of what was given."""
    known = {memory(x) for x in tree_leaves(given) if isinstance(x, Tensor)}
    return [x for x in tree_leaves(found) if isinstance(x, Tensor) and memory(x) not in known]


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tapes:
    """In the place of `CudaGraphs`."""

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        drawn, tape = torch.get_rng_state(), Tape()
        try:
            with tape:
                found = function()
        finally:
            torch.set_rng_state(drawn)
            with torch.no_grad():
                tape.undo()
        return found, tape.replay

    def settle(self) -> None:
        """Nothing runs beside the host."""


@contextmanager
def taped() -> Iterator[None]:
    """Let the CPU have CUDA graphs, and optimizers be capturable on it."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(captured.RECORDERS, {"cpu": Tapes}))
        for name in CAPTURABLE:
            module = import_module(f"torch.optim.{name}")
            stack.enter_context(
                mock.patch.object(module, "_get_capturable_supported_devices", return_value=["cpu"])
            )
        yield
