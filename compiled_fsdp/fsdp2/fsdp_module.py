"""`FSDPModule`, its methods, and the free functions that go with them; semantics and errors as
torch's.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.distributed.fsdp import UnshardHandle as StockUnshardHandle
from typing_extensions import deprecated

from compiled_fsdp.eager.finalization import GradientReductionHandle
from compiled_fsdp.frontend.arguments import check_bool, check_callable, check_factor
from compiled_fsdp.frontend.beside_stock import NotInsideTheWrapper
from compiled_fsdp.frontend.entry import call_of
from compiled_fsdp.frontend.limits import CALLS
from compiled_fsdp.frontend.state import State, get_state, module_by_key, states_below
from compiled_fsdp.ir.collectives import CUSTOM
from compiled_fsdp.ir.spec import REGISTRY
from compiled_fsdp.torch_private.dynamo import is_call_compiled, never_traced_alone, untraced
from compiled_fsdp.torch_private.modules import forgets_gradients
from compiled_fsdp.units.registered import named_in_trace
from compiled_fsdp.units.settings import Settings
from compiled_fsdp.units.unit import originals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from compiled_fsdp.eager.runtime import Runtime

DEFAULTS = {f.name: f.default for f in fields(Settings)}
# What users call the fields of `Settings` that a setter changes by `_fsdp_set`.
SETTERS = {
    "reshard_after_backward": "set_reshard_after_backward",
    "unshard_in_backward": "set_unshard_in_backward",
    "divide_factor": "set_gradient_divide_factor",
    "force_sum": "set_force_sum_reduction_for_comms",
    "reduce_unused": "set_reduce_scatter_unused_params",
    "max_reductions_in_flight": "set_reduce_scatter_max_input_buffers",
    "keep_unsharded_storage": "set_keep_unsharded_storage",
    "all_reduce_hook": "set_all_reduce_hook",
    "all_gather": "set_custom_all_gather",
    "reduce_scatter": "set_custom_reduce_scatter",
}


class UnshardHandle(StockUnshardHandle):
    """What `FSDPModule.unshard(async_op=True)` returns; `wait` makes the full parameters the
    registered ones.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime
        self._before = 0 if runtime is None else runtime.num_gathered

    def wait(self) -> None:
        """Finish the unshard; does nothing when called again, or if the unit's forward has done it,
        and may have resharded.
        """
        runtime, self._runtime = self._runtime, None
        if runtime is not None and runtime.num_gathered == self._before:
            runtime.unshard()
            runtime.keep()


class FSDPModule(NotInsideTheWrapper, StockFSDPModule):
    """A sharded module: what `fully_shard` makes of the modules it is given. Subclasses torch's own
    `FSDPModule`.
    """

    _fsdp_watched: list[nn.Parameter]
    _fsdp_key: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a plain object of the original class: slicing a sharded `nn.Sequential` does
        this.
        """
        plain: Any = object.__new__(originals[cls])
        plain.__init__(*args, **kwargs)
        return plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; two frames of our own: this one stays outside any graph, `_fsdp_call`
        begins one, hooks included.

        If this one is traced after all, from a larger function that is compiled, then what else
        happens before each call happens while tracing, and the graph guards on what it looked at.
        """
        if torch.compiler.is_dynamo_compiling():
            _before_trace(self._fsdp_key)
            for parameter in self._fsdp_watched:
                parameter.requires_grad  # noqa: B018
            return self._fsdp_call(args, kwargs)
        call = _before_call(self, is_call_compiled(self))
        try:
            return call(self, args, kwargs)
        except Exception as error:
            _after_error(self, error)
            raise

    def _fsdp_call(self, args: Any, kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Any:
        """As any module's; in a trace, tied parameters come once, as they do in eager mode."""
        if torch.compiler.is_dynamo_compiling():
            return named_in_trace(self, prefix, recurse, remove_duplicate)  # type: ignore[arg-type]
        return super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]

    def _get_fsdp_state(self) -> Any:
        state = get_state(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self).__name__}")
        return state

    def _fsdp_own(self) -> State:
        state: State = self._get_fsdp_state()
        return state

    def _fsdp_root(self, method: str) -> State:
        state = self._fsdp_own()
        if not state.unit.is_outermost:
            raise RuntimeError(
                f"{method}: called on {state.unit.name!r}, which is inside another sharded module. "
                "Call it on the outermost one"
            )
        return state

    # -- parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit now, not those below; with `async_op`, in the background until
        `wait()` or its forward.
        """
        runtime = self._fsdp_own().runtime
        runtime.start_unshard()
        handle = UnshardHandle(runtime)
        if async_op:
            return handle
        handle.wait()
        return None

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
        flat buffers.
        """
        states = states_below(self)  # type: ignore[arg-type]
        for state in states:
            state.runtime.drop_pending()
            state.runtime.reshard()
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

    # -- settings

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """With False, backward keeps unreduced gradients; the next one with True adds and reduces
        them. FSDP1's `no_sync`.

        Also sets whether gradients are all-reduced (HSDP). Under `torch.compile` each value is a
        graph of its own, compiled once.
        """
        check_bool(
            "set_requires_gradient_sync",
            requires_gradient_sync=requires_gradient_sync,
            recurse=recurse,
        )
        for state in self._fsdp_below(recurse):
            settings = state.unit.settings
            settings.requires_gradient_sync = settings.requires_all_reduce = requires_gradient_sync
            settings.is_accumulating |= not requires_gradient_sync
            state.unit.options.ask("set_requires_gradient_sync", requires_gradient_sync, True)
            state.unit.publish()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False, HSDP's backward stops after the reduce-scatter; the next one with True adds
        and all-reduces.
        """
        check_bool(
            "set_requires_all_reduce", requires_all_reduce=requires_all_reduce, recurse=recurse
        )
        for state in self._fsdp_below(recurse):
            state.unit.settings.requires_all_reduce = requires_all_reduce
            state.unit.settings.is_accumulating |= not requires_all_reduce
            state.unit.options.ask("set_requires_all_reduce", requires_all_reduce, True)
            state.unit.publish()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change whether parameters are dropped after forward; each value is a graph of its own,
        compiled once.

        Raises:
            ValueError: not a bool.
            AssertionError: `dp_mesh_dims` names only dims that replicate.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: got {reshard_after_forward!r}; reshard_after_forward "
                "should be a bool. Pass an int to fully_shard(reshard_after_forward=...)"
            )
        for state in self._fsdp_below(recurse):
            _check_sharding(state, "set_reshard_after_forward")
            state.unit.options.ask("reshard_after_forward", reshard_after_forward)
            state.unit.set_reshard(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """With False, full parameters stay after backward, until the optimizer's step: for several
        backwards before one.

        In a graph, for units that do not reshard after forward: they are gathered before the call
        instead of inside it.
        """
        check_bool(
            "set_reshard_after_backward",
            reshard_after_backward=reshard_after_backward,
            recurse=recurse,
        )
        self._fsdp_set(recurse, reshard_after_backward=reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, the end of a backward keeps the order that prefetching goes by; reductions
        are awaited all the same.
        """
        check_bool("set_is_last_backward", is_last_backward=is_last_backward)
        state = self._fsdp_own()
        state.runtime.tree.is_last_backward = is_last_backward
        state.unit.options.ask("set_is_last_backward", is_last_backward, True)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """With True, the end of a backward is up to the caller: `finalize_backward`, after all
        backwards that belong together.

        Until then gradients may be missing, and full parameters still be there. It supersedes
        `set_is_last_backward`. A graph reduces what it computes inside backward, as ever; what
        backwards without synchronization have kept waits for the call. Once a call has found that
        all had kept theirs, as a pipeline schedule's do, graphs leave reducing to the calls that
        follow.

        Raises:
            RuntimeError: called on a module inside another sharded one, or between a backward and
                its finalization.
        """
        check_bool("set_manual_backward_finalization", enabled=enabled)
        state = self._fsdp_root("set_manual_backward_finalization")
        state.runtime.tree.finalization.set_manual(state.runtime, enabled=enabled)
        state.unit.options.ask("set_manual_backward_finalization", enabled, False)

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

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """With True, the storage of full parameters stays allocated when they are dropped, at the
        same addresses.

        In eager mode. A graph has buffers of its own, whose addresses Inductor's CUDA graphs keep;
        there it changes nothing.
        """
        check_bool("set_keep_unsharded_storage", keep=keep, recurse=recurse)
        self._fsdp_set(recurse, keep_unsharded_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not gather this module's parameters: for those that no gradient
        depends on.

        A graph gathers in backward only what gradients depend on, so that False is what it does
        anyway.
        """
        check_bool("set_unshard_in_backward", unshard_in_backward=unshard_in_backward)
        self._fsdp_set(recurse=False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Start the gathers of these when this module's forward begins, instead of what the plan
        would start there.

        Raises:
            ValueError: an entry is not an FSDPModule.
        """
        self._fsdp_prefetch("forward", _states_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Start the gathers of these when this module's backward begins, instead of what the plan
        would start there.

        Raises:
            ValueError: an entry is not an FSDPModule.
        """
        self._fsdp_prefetch("backward", _states_of(modules))

    # -- reduction

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum over ranks by `factor` instead of by their number; on every backend (stock
        fails on gloo).
        """
        self._fsdp_set(
            recurse=False, divide_factor=check_factor("set_gradient_divide_factor", factor)
        )

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reduce by sums and divide afterwards."""
        check_bool("set_force_sum_reduction_for_comms", enable=enable)
        self._fsdp_set(recurse=False, force_sum=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Trainable parameters without a gradient contribute zeros, so that ranks may use different
        ones.

        A unit that is set so breaks the graph and runs eagerly: a graph knows only what it reads.
        """
        check_bool(
            "set_reduce_scatter_unused_params",
            reduce_scatter_unused_params=reduce_scatter_unused_params,
            recurse=recurse,
        )
        self._fsdp_set(recurse, reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be under way at once; unless set, one in eager mode and
        `Plan.reduces_in_flight` in a graph.

        Raises:
            TypeError: not an int.
            ValueError: less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._fsdp_set(recurse, max_reductions_in_flight=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, with the same ranks; collective: makes the group
        at first use.

        Raises:
            AssertionError: `dp_mesh_dims` names only dims that replicate.
        """
        check_bool("set_separate_reduce_scatter_group", enable=enable, recurse=recurse)
        for state in self._fsdp_below(recurse):
            _check_sharding(state, "set_separate_reduce_scatter_group")
            state.unit.separate_reduce_groups(enable)
            state.unit.options.ask("set_separate_reduce_scatter_group", enable, False)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook(reduced)` with the unit's flat reduced gradient, before the last division; it
        may change it in place.

        Raises:
            ValueError: several meshes in the unit, or a `stream` with HSDP.
            NotImplementedError: `stream` without HSDP.
        """
        unit = self._fsdp_single_mesh("set_all_reduce_hook", "The hook").unit
        check_callable("set_all_reduce_hook", "hook", hook)
        if stream is not None:
            if unit.mesh_info.replicate_size > 1:
                raise ValueError("stream cannot be set when using native HSDP")
            raise NotImplementedError(
                "set_all_reduce_hook: stream is not supported yet; the hook runs on the current "
                "stream"
            )
        self._fsdp_set(recurse=False, all_reduce_hook=REGISTRY.key(hook))

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with `comm`: `allocate(size, dtype=, device=)` and `comm(output_tensor=,
        input_tensor=, group=, async_op=)`.

        Raises:
            ValueError: several meshes in the unit.
        """
        self._fsdp_single_mesh("set_custom_all_gather", "The custom comm")
        check_callable("set_custom_all_gather", "comm", comm, "allocate")
        self._fsdp_set(recurse=False, all_gather=CUSTOM + REGISTRY.key(comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with `comm`: `allocate(size, dtype=, device=)` and `comm(output_tensor=,
        input_tensor=, group=, op=)`.

        Raises:
            ValueError: several meshes in the unit.
        """
        self._fsdp_single_mesh("set_custom_reduce_scatter", "The custom comm")
        check_callable("set_custom_reduce_scatter", "comm", comm, "allocate")
        self._fsdp_set(recurse=False, reduce_scatter=CUSTOM + REGISTRY.key(comm))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accepted, and nothing more: gathers wait for the current stream, which is never too
        early.
        """
        self._fsdp_own().unit.options.ask("set_post_optim_event", event)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Buffers from the process group's allocator, where it has one: gloo has none.

        Raises:
            AssertionError: a custom communication is installed.
            NotImplementedError: the backend has an allocator.
        """
        check_bool("set_allocate_memory_from_process_group_for_comm", enable=enable)
        self._fsdp_no_custom("set_allocate_memory_from_process_group_for_comm")
        self._fsdp_only_without_nccl("set_allocate_memory_from_process_group_for_comm")
        self._fsdp_own().unit.options.ask(
            "set_allocate_memory_from_process_group_for_comm", enable, False
        )

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Not there: needs NCCL's symmetric memory.

        Raises:
            AssertionError: a custom communication is installed.
            NotImplementedError: always, otherwise.
        """
        self._fsdp_no_custom("set_symm_mem_for_comm")
        raise NotImplementedError(
            f"FSDPModule.set_symm_mem_for_comm({backend!r}): not supported; nothing was changed. "
            "Leave it out"
        )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are asynchronous anyway."""

    # -- helpers

    def _fsdp_below(self, recurse: bool) -> list[State]:
        return states_below(self, recurse=recurse)  # type: ignore[arg-type]

    def _fsdp_set(self, recurse: bool, **changes: object) -> None:
        for state in self._fsdp_below(recurse):
            settings: Settings = state.unit.settings
            for name, value in changes.items():
                setattr(settings, name, value)
                state.unit.options.ask(SETTERS[name], value, DEFAULTS[name])
            state.unit.publish()

    def _fsdp_prefetch(
        self, direction: Literal["forward", "backward"], states: list[State]
    ) -> None:
        own = self._fsdp_own()
        own.runtime.set_prefetch(direction, [state.runtime for state in states])
        own.unit.options.ask(
            f"set_modules_to_{direction}_prefetch", [state.unit.name for state in states], []
        )

    def _fsdp_single_mesh(self, method: str, what: str) -> State:
        state = self._fsdp_own()
        if len({flat.mesh_info for flat in state.unit.flats}) > 1:
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param mesh via "
                f"shard_placement_fn). {what} would be ambiguous across groups with different "
                "meshes."
            )
        return state

    def _fsdp_no_custom(self, method: str) -> None:
        settings = self._fsdp_own().unit.settings
        if settings.all_gather or settings.reduce_scatter:
            raise AssertionError(
                f"{method} cannot be called after set_custom_all_gather or "
                "set_custom_reduce_scatter"
            )

    def _fsdp_only_without_nccl(self, method: str) -> None:
        if dist.get_backend(self._fsdp_own().unit.mesh_info.shard_group) == "nccl":
            raise NotImplementedError(
                f"FSDPModule.{method}: not supported on NCCL yet; nothing was changed. Leave it out"
            )


CALLS.add(FSDPModule.__call__.__code__)
never_traced_alone(FSDPModule.__call__)


@untraced
def _after_error(module: FSDPModule, error: Exception) -> None:
    module._fsdp_own().after_error(error)


@untraced
def _before_call(module: FSDPModule, is_compiled: bool) -> Callable[..., Any]:
    module._fsdp_own().before_call(is_compiled=is_compiled)
    return call_of(module)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _before_trace(key: str) -> None:
    module: Any = module_by_key(key)
    module._fsdp_own().before_trace(module)


def _check_sharding(state: State, method: str) -> None:
    if not state.unit.mesh_info.is_sharding:
        raise AssertionError(
            f"{method}: {state.unit.name!r} is not sharded, only replicated: its dp_mesh_dims "
            "names no dim to shard over. Leave it out"
        )


def _states_of(modules: Iterable[object]) -> list[State]:
    found = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        found.append(module._fsdp_own())
    return found


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

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(module, args, kwargs)
        return state.post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let these modules share the order of prefetching and the bound on reductions under way, as
    parts of one model.

    Raises:
        ValueError: an entry is not an FSDPModule.
    """
    states = _states_of(modules)
    for state in states[1:]:
        if state.runtime.tree is not states[0].runtime.tree:
            states[0].runtime.tree.absorb(state.runtime.tree)
