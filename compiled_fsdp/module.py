"""The classes that sharded modules get: `FSDPX` for the modules of a call, and reads of parameters that trace to ops.

[Note: how a parameter is read]
The class of every module that owns a sharded parameter is replaced by a subclass with one property per parameter. While Dynamo
traces, the property yields an `fsdp::unshard` of the unit's flat buffer; otherwise it yields what is registered under the
name: the unsharded parameter inside an eager forward, the sharded DTensor outside. So it does not matter how a compiled
region is reached, or how much of the model it covers: what is read is gathered, exactly once after `dedup_unshard`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle

from .ops import UNSHARD
from .runtime import Runtime, with_tensors
from .spec import CONSTANTS
from .torch_private import cast_floating

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .unit import Unit


class State:
    """What one `fully_shard` call left behind: its unit and the eager runtime that serves it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.runtime = Runtime(unit)
        unit.on_gradients = self.runtime.reshard_if_idle


_states: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()


def get_state(module: object) -> State | None:
    """The state of the `fully_shard` call that was given this very module, or None."""
    return _states.get(module) if isinstance(module, nn.Module) else None


class _PreForward:
    """Forward pre-hook of a unit's module: casts inputs, and in eager mode gathers."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        policy = self.state.unit.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args = cast_floating(args, policy.param_dtype)
            kwargs = cast_floating(kwargs, policy.param_dtype)
        if torch.compiler.is_dynamo_compiling():
            return args, kwargs
        return with_tensors(self.state.runtime, module, args, kwargs)


class _PostForward:
    """Forward hook of a unit's module: in eager mode frees, then casts the output."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self.state.runtime.post_forward(module, output)
        dtype = self.state.unit.mp_policy.output_dtype
        return output if dtype is None else cast_floating(output, dtype)


class UnshardHandle(StockUnshardHandle):
    """What `FSDPModule.unshard(async_op=True)` returns; `wait` makes the full parameters the registered ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime: Runtime | None = runtime

    def wait(self) -> None:
        """Finish the unshard; calling it again does nothing."""
        if self._runtime is not None:
            self._runtime.unshard()
            self._runtime = None


class FSDPModule(StockFSDPModule):
    """A sharded module: what `fully_shard` makes of the modules it is given. Subclasses torch's own `FSDPModule`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a plain object of the original class: slicing a sharded `nn.Sequential` does this."""
        original, _ = _originals[cls]
        plain: Any = object.__new__(original)
        plain.__init__(*args, **kwargs)
        return plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; a frame of our own, so that `torch.compile(model)` traces the hooks with it."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _get_fsdp_state(self) -> Any:
        state = get_state(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self).__name__}")
        return state

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit now, not those below; with `async_op`, the registration switches at `wait()`.

        The gather itself is not asynchronous yet.
        """
        runtime = self._get_fsdp_state().runtime
        if async_op:
            return UnshardHandle(runtime)
        runtime.unshard()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters, not those of units below."""
        self._get_fsdp_state().runtime.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change whether parameters are dropped after forward; compiled code that read the old value recompiles.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: got {reshard_after_forward!r}; only a bool can be set here. "
                "Pass an int to fully_shard(reshard_after_forward=...)"
            )
        for state in _states_below(self, recurse):
            state.unit.set_reshard(reshard_after_forward)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Before `to`, `to_empty` and the like: reshard; after: bring the parameters back into the flat buffers."""
        states = _states_below(self, recurse=True)
        for state in states:
            state.runtime.reshard()
        result = super(StockFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for state in states:
            for flat in state.unit.flats:
                flat.refresh()
            state.unit.publish()
        return result


def _states_below(module: Any, recurse: bool) -> list[State]:
    modules = module.modules() if recurse else [module]
    found = (get_state(m) for m in modules if isinstance(m, FSDPModule))
    return list({id(s): s for s in found if s is not None}.values())


_NOT_YET = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_is_last_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_post_optim_event",
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_unshard_in_backward",
    "set_reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group",
    "set_reduce_scatter_unused_params",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
    "reset_iter_state",
    "_set_unshard_async_op",
)


def _not_yet(name: str) -> Callable[..., NoReturn]:
    def method(self: FSDPModule, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"FSDPModule.{name}: not supported yet; nothing was changed. Use torch.distributed.fsdp.fully_shard if the "
            "training loop needs it"
        )

    method.__name__ = name
    method.__doc__ = "Not there yet: raises NotImplementedError."
    return method


for _name in _NOT_YET:
    setattr(FSDPModule, _name, _not_yet(_name))


def shard_classes(roots: Sequence[nn.Module], managed: Sequence[nn.Module], unit: Unit, state: State) -> None:
    """Swap classes so that parameters are read through properties, and hook the roots."""
    for root in roots:
        _states[root] = state
    names: dict[nn.Module, list[str]] = {}
    for param in unit.params:
        for module, name in param.owners:
            names.setdefault(module, []).append(name)
    for module, owned in names.items():
        _swap_class(module, tuple(owned), is_root=isinstance(module, FSDPModule))
    for root in roots:
        owned_here = tuple(names.get(root, ()))
        _swap_class(root, owned_here, is_root=True)
        root.register_forward_pre_hook(_PreForward(state), prepend=True, with_kwargs=True)
        root.register_forward_hook(_PostForward(state))
    for module in names:
        module.register_state_dict_pre_hook(_reshard_first(state))
        module.register_load_state_dict_pre_hook(_reshard_first(state))
        module.register_load_state_dict_post_hook(_adopt_loaded(state))
    for module in managed:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = True  # type: ignore[assignment]


_classes: dict[tuple[type, frozenset[str], bool], type] = {}
_originals: dict[type, tuple[type, frozenset[str]]] = {}


def _swap_class(module: nn.Module, names: tuple[str, ...], *, is_root: bool) -> None:
    """Give `module` the subclass of its original class that reads `names` (and those of earlier calls) as ops."""
    original, before = _originals.get(type(module), (type(module), frozenset()))
    wanted = before | frozenset(names)
    key = (original, wanted, is_root)
    if key not in _classes:
        body: dict[str, Any] = {name: property(_reader(name)) for name in sorted(wanted)}
        body |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
        bases: tuple[type, ...] = (original,)
        name = original.__name__
        if is_root:
            name = f"FSDP{name}"
            body |= {"__qualname__": name, "__deepcopy__": _no_deepcopy}
            bases = (FSDPModule, original)
        _classes[key] = type(name, bases, body)
        _originals[_classes[key]] = (original, wanted)
    module.__class__ = _classes[key]


def _reshard_first(state: State) -> Callable[..., None]:
    """A hook before `state_dict` and `load_state_dict`: both are about the sharded parameters."""

    def hook(*_: object) -> None:
        state.runtime.reshard()

    return hook


def _adopt_loaded(state: State) -> Callable[..., None]:
    """A hook after `load_state_dict`: with `assign=True` it replaced the parameters."""

    def hook(*_: object) -> None:
        state.unit.adopt_replaced()

    return hook


def _reader(name: str) -> Callable[[nn.Module], Any]:
    def read(self: nn.Module) -> Any:
        if torch.compiler.is_dynamo_compiling():
            owner: Any = self
            handle = owner._fsdp_handles[name]
            return UNSHARD(handle.flat, *CONSTANTS[handle.key])
        return self._parameters[name]

    return read


def _no_deepcopy(*_: object) -> NoReturn:
    raise AssertionError(
        "FSDP does not support deepcopy: a sharded module shares flat buffers and process groups. Copy its state_dict"
    )
