"""The frames with which compiling a unit begins: every sharded module has code objects of its own.

Dynamo keeps what it has compiled with the code object of a frame, and compiles at most so many times for one
(`torch._dynamo.config.recompile_limit`). Units differ in the constants of their gathers, so after a graph break every unit is a
graph of its own: with one code object for all, the ninth would run eagerly.

A unit that reaches the limit all by itself goes on with new code objects, `RENEWALS` times: on other ranks, which see other
inputs, it may be in a graph still, and what ranks communicate must not differ. That is said once.

`module.compile()` begins at such a frame too: torch's
own begins at `nn.Module._call_impl`, inside torch's files, where Dynamo starts no graph.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from .torch_private import compiled_again, num_compiled, untraced

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from torch import nn

RENEWALS = 3


class OverrunError(Exception):
    """A unit is about to run eagerly because Dynamo has reached its limit; nothing has happened yet, so it can begin again."""


def own_copy(function: Any, module: nn.Module) -> Any:
    """The same function with a code object of its own, named after the module's place among all sharded ones."""
    name = f"{function.__name__}_{module.__dict__['_fsdp_key'].split()[-1]}"
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def call_of(module: Any) -> Callable[..., Any]:
    """The module's own `_fsdp_call`, which takes the module too; what `module.compile()` made begins at our frames from now on."""
    if _begins_in_torch(module._compiled_call_impl):
        _begin_anew(module)
    found: Callable[..., Any] = module.__dict__.get("_fsdp_entry")
    if found is None:
        found = module.__dict__["_fsdp_entry"] = own_copy(type(module)._fsdp_call, module)
    return found


@untraced
def renewed(module: Any) -> Callable[..., Any]:
    """The same with new code objects, for which nothing is compiled yet."""
    del module.__dict__["_fsdp_entry"]
    if module._compiled_call_impl is not None:
        _begin_anew(module)
    return call_of(module)


def overrun(module: Any) -> CodeType | None:
    """The code object with which this module's call began, if Dynamo has reached its limit there and runs it as it is."""
    begin = getattr(module._compiled_call_impl, "_torchdynamo_orig_callable", None)
    codes = [f.__code__ for f in (module.__dict__.get("_fsdp_entry"), begin) if f is not None]
    full = [code for code in codes if num_compiled(code) >= torch._dynamo.config.recompile_limit]
    return next((code for code in full if _is_running(code)), None)


def _is_running(code: CodeType) -> bool:
    """Whether a frame of this very code is under way: what Dynamo made of it has another."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _begin_anew(module: Any) -> None:
    begin = MethodType(own_copy(_fsdp_compiled_call, module), module)
    module._compiled_call_impl = compiled_again(module._compiled_call_impl, begin)


def _begins_in_torch(compiled: Any) -> bool:
    begin = getattr(compiled, "_torchdynamo_orig_callable", None)
    return getattr(begin, "__func__", None) is torch.nn.Module._call_impl


def _fsdp_compiled_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)
