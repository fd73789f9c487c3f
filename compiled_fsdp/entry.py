"""The frames with which compiling a unit begins: every sharded module has code objects of its own.

Dynamo keeps what it has compiled with the code object of a frame, and compiles at most so many times for one
(`torch._dynamo.config.recompile_limit`). Units differ in the constants of their gathers, so after a graph break every unit is a
graph of its own: with one code object for all, the ninth would run eagerly. `module.compile()` begins at such a frame too: torch's
own begins at `nn.Module._call_impl`, inside torch's files, where Dynamo starts no graph.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from .torch_private import compiled_again

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from torch import nn


def own_copy(function: Any, module: nn.Module) -> Any:
    """The same function with a code object of its own, named after the module's place among all sharded ones."""
    name = f"{function.__name__}_{module.__dict__['_fsdp_key'].split()[-1]}"
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def call_of(module: Any) -> Callable[..., Any]:
    """The module's own `_fsdp_call`, which takes the module too; what `module.compile()` made begins at our frames from now on."""
    compiled = module._compiled_call_impl
    if compiled is not None and _begins_in_torch(compiled):
        begin = MethodType(own_copy(_fsdp_compiled_call, module), module)
        module._compiled_call_impl = compiled_again(compiled, begin)
    found: Callable[..., Any] = module.__dict__.get("_fsdp_entry")
    if found is None:
        found = module.__dict__["_fsdp_entry"] = own_copy(type(module)._fsdp_call, module)
    return found


def codes_of(module: nn.Module) -> list[CodeType]:
    """Where compiling this module's calls has begun."""
    compiled = module._compiled_call_impl
    functions = (module.__dict__.get("_fsdp_entry"), getattr(compiled, "_torchdynamo_orig_callable", None))
    return [function.__code__ for function in functions if function is not None]


def _begins_in_torch(compiled: Any) -> bool:
    begin = getattr(compiled, "_torchdynamo_orig_callable", None)
    return getattr(begin, "__func__", None) is torch.nn.Module._call_impl


def _fsdp_compiled_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)
