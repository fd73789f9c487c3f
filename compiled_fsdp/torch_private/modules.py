"""Private torch: what torch's FSDP and `nn.Module` keep to themselves. Tried on torch 2.11, 2.13
and 2.15.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable


# Since torch 2.15; before, there is nothing that a handle could be taken for.
StockGradientReductionHandle: type = getattr(
    torch.distributed.fsdp, "GradientReductionHandle", object
)


def reduces_in_grad_dtype() -> bool:
    """Whether stock reduces in a gradient's own dtype where `reduce_dtype` is None, and leaves
    gradients until then in the dtype in which autograd yields them, if that is wider than the one
    it computes in: since torch 2.15; before, as it computes.
    """
    return hasattr(FSDPParam, "unsharded_grad_dtype")


def widens_sums() -> bool:
    """Whether stock adds up gradients over axes beside the data-parallel ones in the dtype in which
    it reduces: since torch 2.15; before, as it computes.
    """
    return hasattr(FSDPParam, "may_reduce_grad_outside_dp")


def forgets_gradients() -> bool:
    """Whether stock's `reset_iter_state` drops also gradients that are reduced: since torch 2.15,
    with what else is new there.
    """
    return hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward")


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside nested containers; everything else is the same object
    (stock's rule).
    """

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x if not x.is_floating_point() or x.dtype == dtype else x.to(dtype)

    return _each_tensor(cast, values)


def on_device(values: Any, device: torch.device) -> Any:
    """Move every tensor inside nested containers that is elsewhere; everything else is the same
    object.
    """
    return _each_tensor(lambda x: x if x.device == device else x.to(device), values)


_LEAVES: tuple[type, ...] = (int, float, complex, str, type, slice, torch.Size)
try:
    import numpy
except ImportError:  # torch needs none
    pass
else:
    _LEAVES = (*_LEAVES, numpy.ndarray, numpy.generic)


def _each_tensor(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """What torch's `_apply_to_tensors` does, which asks any leaf whether it is a dataclass. Dynamo
    cannot ask that of a number that has changed from call to call, a slice, or what is numpy's, and
    would lose the graph; of a dataclass itself, no instance, torch makes an error. So these are
    returned before.
    """
    if isinstance(values, torch.Tensor):
        return change(values)
    if values is None or isinstance(values, _LEAVES):
        return values
    each = functools.partial(_each_tensor, change)
    if dataclasses.is_dataclass(values):
        fields = {f.name: each(getattr(values, f.name)) for f in dataclasses.fields(values)}
        return dataclasses.replace(values, **fields)  # type: ignore[type-var]
    if isinstance(values, OrderedDict):
        made = type(values)()
        for key, value in values.items():
            made[key] = each(value)
        return made
    if isinstance(values, dict):
        return {key: each(value) for key, value in values.items()}
    is_collection = isinstance(values, list | tuple | set)
    return _of_items(each, values) if is_collection else values


def _of_items(each: Callable[[Any], Any], values: Any) -> Any:
    """A list, tuple or set of the same type; of packed sequences the same object."""
    if isinstance(values, PackedSequence):
        return values
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(each(value) for value in values))
    return type(values)(each(value) for value in values)


def hooked_on_backward(model: torch.nn.Module) -> list[str]:
    """The names of modules around whose backward something is to be called; "all modules" for
    hooks of all. Tried on 2.13.
    """
    all_modules = torch.nn.modules.module
    if all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks:
        return ["all modules"]
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]


def is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied: such modules, and those inside, are not
    sharded.
    """
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def plain_name(path: str) -> str:
    """A name without what wrappers add to it."""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    return ".".join(parts)


def register_first(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Register a pre-forward hook that runs before those that are there.

    The guards of Dynamo 2.11 count a module's hooks in the order in which they were put into the
    dict, its traces in the order of the `OrderedDict`, which `prepend` changes. Hence the dict is
    filled again.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    hooks = list(module._forward_pre_hooks.items())
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks.update(hooks)
