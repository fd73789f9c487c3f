"""Calls of sharded modules, of either front end:
what happens outside any graph, before and after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn  # classes of users ask for the annotations of their bases

from compiled_fsdp.torch_private.dynamo import is_call_compiled, never_traced_alone, untraced
from compiled_fsdp.torch_private.modules import on_device
from compiled_fsdp.wire.leaving import LeftGraph

from .entry import call_of
from .leave import leave_graph
from .limits import watch_calls
from .state import module_by_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_fsdp.eager.runtime import Runtime


class Called:
    """A module whose calls its unit knows of. Stands before the module's own class.

    _fsdp_key: names the module, in a trace too.
    _fsdp_watched: parameters whose `requires_grad` a graph around the call is to guard on.
    _fsdp_inputs_on: where a graph around the call moves what tensors it is given; None: nowhere.
    """

    _fsdp_key: str
    _fsdp_watched: list[nn.Parameter]
    _fsdp_inputs_on: torch.device | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; two frames of our own: this one stays outside any graph, `_fsdp_call`
        begins one, hooks included.

        If this one is traced after all, from a larger function that is compiled, then what else
        happens before each call happens while tracing, and the graph guards on what it looked at.
        """
        if torch.compiler.is_dynamo_compiling():
            _before_trace(self._fsdp_key)
            for parameter in self._fsdp_watched:
                parameter.requires_grad  # noqa: B018  # the graph guards on it
            if self._fsdp_inputs_on is not None:
                args, kwargs = on_device((args, kwargs), self._fsdp_inputs_on)
            return self._fsdp_call(args, kwargs)
        call = _before_call(self, is_call_compiled(self))
        under_way, depth = _under_way(self)
        try:
            under_way.append(self)
            args, kwargs = _moved(self, args, kwargs)
            while True:
                try:
                    return call(self, args, kwargs)
                except LeftGraph as error:
                    leave_graph(self, error)
        except BaseException as error:  # an interrupt ends a call halfway, too
            _after_error(self, error)
            raise
        finally:
            del under_way[depth:]  # an interrupt may have come before it was appended
            _after_call(self)

    def _fsdp_call(self, args: Any, kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _fsdp_before_call(self, *, is_compiled: bool) -> None:
        """Outside any graph; is_compiled: whether it is a call that `torch.compile` traces."""
        raise NotImplementedError

    def _fsdp_before_trace(self) -> None:
        """As before a call, while a larger function is traced, which is not called yet. Leaves
        `_fsdp_watched`, and `_fsdp_inputs_on`.
        """
        raise NotImplementedError

    def _fsdp_device_of_inputs(self) -> torch.device | None:
        """Where a call outside any graph is to find the tensors that it is given; None: where they
        are.
        """
        return None

    def _fsdp_runtime(self) -> Runtime:
        """What gathers its unit in eager mode."""
        raise NotImplementedError

    def _fsdp_after_error(self, error: BaseException) -> None:
        """The call has raised; may raise something clearer."""
        raise NotImplementedError

    def _fsdp_after_call(self) -> None:
        """Of each `_fsdp_before_call` outside any graph, also if the call has raised."""
        raise NotImplementedError


watch_calls(Called.__call__.__code__)
never_traced_alone(Called.__call__)


def call_method(module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what gathers and frees as the module's forward does, with what is done around each call
    of the module; inside a call of it, that one has done so, and frees at its end.

    Traced, it is part of a larger function.
    """
    if torch.compiler.is_dynamo_compiling():
        _before_method_in_trace(module._fsdp_key)
        for parameter in module._fsdp_watched:
            parameter.requires_grad  # noqa: B018  # the graph guards on it
        if module._fsdp_inputs_on is not None:
            args, kwargs = on_device((args, kwargs), module._fsdp_inputs_on)
        return method(args, kwargs)
    if _is_under_way(module):
        under_way, depth = _under_way(module)
        try:
            under_way.append(module)
            return method(args, kwargs)
        finally:
            del under_way[depth:]
    _before_method(module)
    under_way, depth = _under_way(module)
    try:
        under_way.append(module)
        return method(*_moved(module, args, kwargs))
    except BaseException as error:
        _after_error(module, error)
        raise
    finally:
        del under_way[depth:]
        _after_call(module)


never_traced_alone(call_method)


@untraced
def _before_call(module: Any, is_compiled: bool) -> Callable[..., Any]:
    module._fsdp_before_call(is_compiled=is_compiled)
    return call_of(module)


@untraced
def _before_method(module: Any) -> None:
    module._fsdp_before_call(is_compiled=False)


@untraced
def _under_way(module: Any) -> tuple[list[Any], int]:
    """The modules of its unit whose calls are under way, and how many they are."""
    under_way: list[Any] = module._fsdp_runtime().under_way
    return under_way, len(under_way)


@untraced
def _moved(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, on the device that computes, as torch's FSDP moves them."""
    device = module._fsdp_device_of_inputs()
    return (args, kwargs) if device is None else on_device((args, kwargs), device)


@untraced
def _is_under_way(module: Any) -> bool:
    return any(called is module for called in module._fsdp_runtime().under_way)


@untraced
def _after_error(module: Any, error: BaseException) -> None:
    module._fsdp_after_error(error)


@untraced
def _after_call(module: Any) -> None:
    module._fsdp_after_call()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _before_trace(key: str) -> None:
    module: Any = module_by_key(key)
    module._fsdp_before_trace()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _before_method_in_trace(key: str) -> None:
    module: Any = module_by_key(key)
    if _is_under_way(module):
        module.__dict__.setdefault("_fsdp_watched", [])
        module.__dict__["_fsdp_inputs_on"] = None
    else:
        module._fsdp_before_trace()
