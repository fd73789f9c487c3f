"""The frames with which compiling a unit begins: every sharded module has code objects of its own.

Dynamo keeps what it has compiled with the code object of a frame, and looks through all of that at
each call. Units differ in the constants of their gathers, so after a graph break every unit is a
graph of its own: with one code object for all, each call would look through the graphs of all
units, and the ninth unit would be over Dynamo's limit (`limits.py`).

`module.compile()` begins at such a frame too: torch's own begins at `nn.Module._call_impl`, inside
torch's files, where Dynamo starts no graph.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.compiled import compiled_again
from compiled_fsdp.torch_private.dynamo import is_refused, never_traced_alone

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from torch import nn


def own_copy(function: Any, module: nn.Module) -> Any:
    """The same function with a code object of its own, named after the module's place among all
    sharded ones.
    """
    name = f"{function.__name__}_{module.__dict__['_fsdp_key'].split()[-1]}"
    code = function.__code__.replace(co_name=name)
    return FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )


def call_of(module: Any) -> Callable[..., Any]:
    """The module's own `_fsdp_call`, which takes the module too; what `module.compile()` made
    begins at our frames from now on. Of a module that Dynamo refuses, one that it leaves alone.
    """
    if is_refused(module):
        return _untraced(module)
    if _begins_in_torch(module._compiled_call_impl):
        _begin_anew(module)
    found: Callable[..., Any] = module.__dict__.get("_fsdp_entry")
    if found is None:
        found = module.__dict__["_fsdp_entry"] = own_copy(type(module)._fsdp_call, module)
    return found


def _untraced(module: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = module.__dict__.get("_fsdp_untraced")
    if found is None:
        found = module.__dict__["_fsdp_untraced"] = own_copy(type(module)._fsdp_call, module)
        never_traced_alone(found)
    return found


def compiled_from_here(module: Any, backend: str) -> Callable[..., Any]:
    """What `module.compile(backend=backend)` would make the module's call, but not put in place."""
    begin = MethodType(own_copy(_fsdp_compiled_call, module), module)
    compiled: Callable[..., Any] = torch.compile(begin, backend=backend)
    return compiled


def is_entry(code: CodeType, module: Any) -> bool:
    """Whether compiling this module's call begins with a frame of this code object."""
    return any(code is own for own in _entries(module))


def entry_names(module: Any) -> set[str]:
    """The names of those frames, which Dynamo's own code for them has too."""
    return {code.co_name for code in _entries(module)}


def _entries(module: Any) -> list[CodeType]:
    begin = getattr(module._compiled_call_impl, "_torchdynamo_orig_callable", None)
    own = module.__dict__.get("_fsdp_entry")
    return [f.__code__ for f in (own, begin) if f is not None]


def _begin_anew(module: Any) -> None:
    begin = MethodType(own_copy(_fsdp_compiled_call, module), module)
    module._compiled_call_impl = compiled_again(module._compiled_call_impl, begin)


def _begins_in_torch(compiled: Any) -> bool:
    begin = getattr(compiled, "_torchdynamo_orig_callable", None)
    return getattr(begin, "__func__", None) is torch.nn.Module._call_impl


def _fsdp_compiled_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)
