"""What is to happen around the steps of optimizers, of all in the process, be they traced by Dynamo
or not.

A step that runs as it is calls `before` and `after` what was registered. One that is traced must
not break its graph for us, the less so if it is somebody else's: each traced optimizer gets a mark
while it is traced, its compiled step sets the mark, and `catch_up` calls what was registered once a
mark is found set. That is before the next forward, the first moment at which anything of ours
depends on it.

Private torch used here (tried on 2.11, 2.13): `torch._dynamo.comptime`, and the hooks that all
optimizers have.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.comptime import comptime
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from compiled_fsdp.torch_private.dynamo import never_traced_alone, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    OnStep = Callable[[Optimizer], None]

_before: list[OnStep] = []
_before_writes: list[OnStep] = []
_after: list[OnStep] = []
_traced: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Mark:
    """On a traced optimizer: whether it has stepped since anybody looked."""

    def __init__(self) -> None:
        self.has_stepped = False


def before(call: OnStep) -> None:
    """Call this before every step, once registered."""
    if call not in _before:
        _before.append(call)


def before_writes(call: OnStep) -> None:
    """Call this before an optimizer writes, once registered: before every step, and in a whole
    step, whose forward reads what is there, before its first update.
    """
    if call not in _before_writes:
        _before_writes.append(call)


def after(call: OnStep) -> None:
    """Call this after every step, once registered."""
    if call not in _after:
        _after.append(call)


@contextmanager
def watched(call: OnStep) -> Iterator[None]:
    """Call this after every step inside: those that are a graph of ours (`compile_step`) included,
    which no hook of torch's sees.
    """
    _after.append(call)
    try:
        yield
    finally:
        _after.remove(call)


def begun(optimizer: Optimizer) -> None:
    """A step of an optimizer begins that its own hooks do not see."""
    _call(_before, optimizer)


def writing(optimizer: Optimizer) -> None:
    """In such a step, its first update is next."""
    _call(_before_writes, optimizer)


def ended(optimizer: Optimizer) -> None:
    """It has ended."""
    _call(_after, optimizer)


def hooks_of_others() -> list[str]:
    """What others than torch and we want to be called around every step of every optimizer."""
    hooks = [
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    modules = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks]
    names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
    return [
        f"{module}.{name}"
        for module, name in zip(modules, names, strict=True)
        if module.partition(".")[0] not in ("torch", "compiled_fsdp")
    ]


def catch_up() -> None:
    """Make the calls for compiled steps since the last time; several steps of an optimizer count as
    one.
    """
    for optimizer in list(_traced):
        mark: Mark = optimizer._fsdp_mark  # type: ignore[attr-defined]
        if mark.has_stepped:
            mark.has_stepped = False
            _call([*_before, *_before_writes], optimizer)
            _call(_after, optimizer)


@untraced
def _call(calls: list[OnStep], optimizer: Optimizer) -> None:
    for call in calls:
        call(optimizer)


def _pre_hook(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_dynamo_compiling():
        comptime(_mark)
    else:
        _call([*_before, *_before_writes], optimizer)


def _post_hook(optimizer: Optimizer, *_: object) -> None:
    if torch.compiler.is_dynamo_compiling():
        mark = getattr(optimizer, "_fsdp_mark", None)
        if mark is not None:
            mark.has_stepped = True
    else:
        _call(_after, optimizer)


def _mark(tracing: Any) -> None:
    """While the first hook is traced: the optimizer that it is called with gets its mark."""
    variable = tracing.get_local("optimizer")._i_will_not_complain_if_bc_breaks_VariableTracker()
    optimizer = getattr(variable, "value", None)
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in _traced:
        optimizer._fsdp_mark = Mark()  # type: ignore[attr-defined]
        _traced.add(optimizer)


# Met by Dynamo as frames of their own, outside any trace of the step, they run as they stand.
never_traced_alone(_pre_hook)
never_traced_alone(_post_hook)
register_optimizer_step_pre_hook(_pre_hook)
register_optimizer_step_post_hook(_post_hook)
