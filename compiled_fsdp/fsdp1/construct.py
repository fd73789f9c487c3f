"""The steps of the wrapper's constructor: stock's, in stock's order, and checks of its arguments
before anything is changed.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from compiled_fsdp.eager.containers import map_tensors
from compiled_fsdp.errors import shortened, warn_once
from compiled_fsdp.frontend.beside_stock import check_no_stock_unit
from compiled_fsdp.frontend.stepped import ignore
from compiled_fsdp.units.hooks import say_lost

from . import stock
from .at_rest import Keeper
from .stock import clean_tensor_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

TYPES: dict[str, type] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
}


def check_arguments(module: object, options: Mapping[str, Any]) -> None:
    """Refuse what no later step understands.

    Raises:
        TypeError: `module` is no module, or an option has the wrong type.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel: module must be an nn.Module, got {module!r}")
    for name, kind in TYPES.items():
        if options[name] is not None and not isinstance(options[name], kind):
            raise TypeError(
                f"FullyShardedDataParallel: {name} must be a "
                f"torch.distributed.fsdp.{kind.__name__} or None, got {options[name]!r}. "
                f"{type(module).__name__} is as it was"
            )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"{module}",
            stacklevel=3,
        )


def settle_groups(
    wrapper: Any,
    module: nn.Module,
    policy: Any,
    options: Mapping[str, Any],
    ignored_modules: Any,
    ignored_states: Any,
) -> None:
    """Work out what is ignored, the device and the process groups."""
    stock.init_ignored(wrapper, module, ignored_modules, ignored_states)
    ignore(wrapper._ignored_params)
    managed = [m for m in module.modules() if m not in wrapper._ignored_modules]
    ignored = {id(parameter) for parameter in wrapper._ignored_params}
    check_no_stock_unit("FullyShardedDataParallel", [module], managed, ignored)
    _check_grad_dtypes(managed, ignored, has_originals=options["use_orig_params"])
    with _hinted():
        stock.init_device_handle(wrapper, module, wrapper._ignored_params, options["device_id"])
    # Dynamo asks: both ways can be traced.
    stock.annotate_modules(module, wrapper._ignored_modules, True)
    mesh = wrapper._device_mesh = options["device_mesh"]
    with _hinted():
        stock.init_process_groups(
            wrapper, options["process_group"], options["sharding_strategy"], policy, mesh
        )


def _check_grad_dtypes(
    managed: Iterable[nn.Module], ignored: Collection[int], *, has_originals: bool
) -> None:
    """A flat parameter has none but its own dtype.

    Raises:
        NotImplementedError: an original parameter asks for another, and is there to be asked; in
            stock the first backward raises.
    """
    asked = dict.fromkeys(
        f"{type(module).__name__}.{name} of {p.dtype}: {p.grad_dtype}"
        for module in managed
        for name, p in module._parameters.items()
        if p is not None and id(p) not in ignored and p.is_leaf and p.grad_dtype != p.dtype
    )
    if not asked:
        return
    told = (
        f"grad_dtype is set on {shortened([*asked])}, and gradients of FSDP1 have the dtype of the"
    )
    if has_originals:
        raise NotImplementedError(
            f"FullyShardedDataParallel: {told} flat parameter: with use_orig_params=True backward "
            "could not put them there. Use fully_shard, which keeps them so, or leave it as it is"
        )
    warn_once(
        f"compiled_fsdp: FullyShardedDataParallel: {told} flat parameter, as with torch's: it is "
        "ignored. fully_shard keeps gradients so",
        about="grad_dtype with FSDP1",
    )


# What is to be done about errors of stock's that people meet first, by what they say.
HINTS = {
    "needs a non-CPU accelerator": "On a CPU, pass device_id=torch.device('cpu')",
    "process group has not been initialized": "Start the script with torchrun --nproc-per-node N, "
    "and call torch.distributed.init_process_group() before FullyShardedDataParallel",
}


@contextmanager
def _hinted() -> Iterator[None]:
    """Put what is to be done under what stock says."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        hint = next((text for words, text in HINTS.items() if words in str(error)), None)
        if hint is None:
            raise
        raise type(error)(f"{error}\n{hint}") from error


def wrap_children(
    wrapper: Any, module: nn.Module, policy: Any, options: Mapping[str, Any], make: type
) -> None:
    """Wrap the submodules that the policy chooses; they get the options of the wrapper, its groups
    and what it ignores.
    """
    inherited = {**options, "ignored_states": wrapper._ignored_params}
    if (
        options["sharding_strategy"] in stock.HYBRID_SHARDING_STRATEGIES
        and options["device_mesh"] is None
    ):
        inherited["process_group"] = (wrapper.process_group, wrapper._inter_node_pg)
    hooks = [
        (m, kept, set(kept))
        for m in module.modules()
        for kept in (m._forward_pre_hooks, m._forward_hooks)
    ]
    stock.auto_wrap(
        module, policy, wrapper._ignored_modules, wrapper._ignored_params, inherited, make
    )
    for owner, kept, before in hooks:
        for key in kept.keys() - before:
            kept[key] = _to_full_precision if kept is owner._forward_pre_hooks else _to_input_dtype


def _to_full_precision(module: nn.Module, args: Any) -> Any:
    """Pre-hook of a module that keeps full precision in a low-precision model, as stock's: fp32 in,
    what came in out.

    Stock's keeps the dtype in a dict of all modules, whose every change would compile a graph
    around the module again.
    """
    low = [x.dtype for x in _tensors(args) if x.is_floating_point() and x.dtype != torch.float32]
    module._fsdp_input_dtype = low[-1] if low else None  # type: ignore[assignment]
    return map_tensors(lambda x: x.float() if x.is_floating_point() else x, args)


def _to_input_dtype(module: nn.Module, args: Any, output: Any) -> Any:
    """Its hook after forward."""
    dtype: Any = module._fsdp_input_dtype
    return (
        output
        if dtype is None
        else map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, output)
    )


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def flatten(wrapper: Any, module: nn.Module, options: Mapping[str, Any]) -> list[nn.Parameter]:
    """Make the flat parameter and what stock keeps beside it; the originals that it replaced."""
    use_orig_params = options["use_orig_params"]
    stock.init_core_state(
        wrapper,
        options["sharding_strategy"],
        options["mixed_precision"],
        options["cpu_offload"],
        options["limit_all_gathers"],
        use_orig_params,
        1,
        1,
    )
    stock.init_runtime_state(wrapper)
    stock.init_prefetching(wrapper, options["backward_prefetch"], options["forward_prefetch"])
    stock.init_buffer_state(wrapper, module)
    stock.init_extension(wrapper, options["device_mesh"])
    originals = list(module.parameters())
    names = {id(p): clean_tensor_name(name) for name, p in module.named_parameters()}
    stock.init_param_handle(
        wrapper,
        module,
        options["device_id"],
        options["param_init_fn"],
        options["sync_module_states"],
    )
    if wrapper._handle is not None:
        wrapper._handle.__class__ = Keeper
    wrapper._fsdp_wrapped_module = module
    if not use_orig_params:
        stock.check_all_flattened(wrapper, wrapper._ignored_params)
        stock.register_flat_param(wrapper, wrapper)
    replaced = _without(originals, module.parameters())
    say_lost([names[id(p)] for p in replaced], replaced, is_flat=True)
    return replaced


def _without(
    originals: Iterable[nn.Parameter], others: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    kept = {id(parameter) for parameter in others}
    return [parameter for parameter in originals if id(parameter) not in kept]
