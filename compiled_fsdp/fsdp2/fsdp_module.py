"""`FSDPModule`: calls, parameters and the end of backward, and the free functions that go with it;
semantics and errors as torch's. Its settings: `setters.py` and `communication_setters.py`.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle

from compiled_fsdp.eager.finalization import GradientReductionHandle
from compiled_fsdp.frontend.arguments import check_bool
from compiled_fsdp.frontend.beside_stock import NotInsideTheWrapper
from compiled_fsdp.frontend.called import Called, call_method
from compiled_fsdp.frontend.entry import own_copy
from compiled_fsdp.frontend.moved import follow_moved
from compiled_fsdp.frontend.quantizing import check_supported
from compiled_fsdp.frontend.state import get_state, states_below
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.torch_private.modules import forgets_gradients
from compiled_fsdp.units.param import kept_grads
from compiled_fsdp.units.registered import named_in_trace
from compiled_fsdp.units.unit import originals

from .communication_setters import CommunicationSetters
from .setter_base import states_of
from .setters import Setters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compiled_fsdp.eager.runtime import Runtime
    from compiled_fsdp.frontend.state import State


class UnshardHandle(StockUnshardHandle):
    """The result of `FSDPModule.unshard(async_op=True)`; `wait` makes the full parameters the
    registered ones.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._before = None if runtime is None else _counted(runtime)

    @untraced
    def wait(self) -> None:
        """Finish the unshard; does nothing when called again, or if the unit's forward has done it,
        and may have resharded, or has run as a graph, which gathers for itself.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is not None and _counted(runtime) == self._before:
            runtime.unshard()
            runtime.keep()


def _counted(runtime: Runtime) -> tuple[int, int]:
    return runtime.num_gathered, runtime.num_compiled


class FSDPModule(Called, NotInsideTheWrapper, Setters, CommunicationSetters, StockFSDPModule):
    """A sharded module: what `fully_shard` makes of the modules it is given. Subclasses torch's own
    `FSDPModule`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a plain object of the original class: slicing a sharded `nn.Sequential` does
        this.
        """
        plain: Any = object.__new__(originals[cls])
        plain.__init__(*args, **kwargs)
        return plain

    # -- calls

    def _fsdp_before_call(self, *, is_compiled: bool) -> None:
        self._fsdp_own().before_call(is_compiled=is_compiled)

    def _fsdp_before_trace(self) -> None:
        self._fsdp_own().before_trace(self)  # type: ignore[arg-type]

    def _fsdp_runtime(self) -> Runtime:
        return self._fsdp_own().runtime

    def _fsdp_device_of_inputs(self) -> torch.device | None:
        return self._fsdp_own().device_of_inputs()

    def _fsdp_after_error(self, error: BaseException) -> None:
        self._fsdp_own().after_error(error)

    def _fsdp_after_call(self) -> None:
        self._fsdp_own().end_call()

    # -- parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Any:
        """As any module's; in a trace, tied parameters come once, as they do in eager mode."""
        if torch.compiler.is_dynamo_compiling():
            return named_in_trace(self, prefix, recurse, remove_duplicate)  # type: ignore[arg-type]
        return super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]

    @untraced
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit now, not those below; with `async_op`, in the background until
        `wait()` or its forward.
        """
        runtime = self._fsdp_own().runtime
        follow_moved(runtime)
        check_supported(runtime.unit)
        runtime.start_unshard()
        handle = UnshardHandle(runtime)
        if async_op:
            return handle
        handle.wait()
        return None

    @untraced
    def reshard(self) -> None:
        """Free this module's unsharded parameters, not those of units below."""
        self._fsdp_own().runtime.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: await what is under way, free everything, drop
        unreduced gradients.

        As in stock, all gradients are dropped on torch 2.15 and later.

        Raises:
            RuntimeError: called on a module inside another sharded one.
        """
        state = self._fsdp_root("reset_iter_state")
        state.runtime.tree.reset()
        for below in states_below(self):  # type: ignore[arg-type]
            below.unit.drop_gradients()
            if forgets_gradients():
                for param in below.unit.params:
                    param.sharded.grad = None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Before `to`, `to_empty` and the like: reshard; after: bring the parameters back into the
        flat buffers, with gradients as they were where they have a dtype of their own.
        """
        states = states_below(self)  # type: ignore[arg-type]
        for state in states:
            state.runtime.drop_pending()
            state.runtime.reshard()
            state.unit.follow_grad_dtype()
        with kept_grads(param for state in states for param in state.unit.params):
            return self._apply_sharded(states, *args, **kwargs)

    def _apply_sharded(self, states: Sequence[State], *args: Any, **kwargs: Any) -> Any:
        buffers = dict(self.named_buffers())  # type: ignore[attr-defined]
        on_meta = {name for name, buffer in buffers.items() if buffer.device.type == "meta"}
        result = super(StockFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        buffers = dict(self.named_buffers())  # type: ignore[attr-defined]
        now_real = [
            (n, weakref.ref(buffers[n])) for n in on_meta if buffers[n].device.type != "meta"
        ]
        self._fsdp_own().buffers_from_meta.extend(now_real)
        for state in states:
            state.unit.take_over()
        return result

    # -- backward

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = ...) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    @untraced
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what is left of the backwards since the last call, await it, and free; before the
        first forward, nothing.

        With `async_op` it is started only; the handle's `wait()` must come before the gradients are
        used, and before the next forward.

        Raises:
            RuntimeError: called on a module inside another sharded one, while a backward runs,
                without `set_manual_backward_finalization(True)`, before the handle of the last call
                was awaited, or with gradients that are not all-reduced (HSDP).
        """
        check_bool("finalize_backward", async_op=async_op)
        state = self._fsdp_root("finalize_backward")
        if not state.is_checked:
            return GradientReductionHandle() if async_op else None
        state.unit.options.consume("finalize_backward", "set_manual_backward_finalization")
        return state.runtime.tree.finalization.finalize(state.runtime, is_async=async_op)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` gather and free as `forward` does; it compiles too. No-op on a
    module that is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    state = get_state(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    def gathered(args: Any, kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(module, args, kwargs)
        return state.post_forward(module, args, method(*args, **kwargs))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_method(module, gathered, args, kwargs)

    setattr(module, method_name, functools.wraps(method)(own_copy(wrapped, module)))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let these modules share the order of prefetching and the bound on reductions under way, as
    parts of one model.

    Raises:
        ValueError: an entry is not an FSDPModule.
    """
    states = states_of(modules)
    for state in states[1:]:
        if state.runtime.tree is not states[0].runtime.tree:
            states[0].runtime.tree.absorb(state.runtime.tree)
