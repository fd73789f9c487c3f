"""The setters of `FSDPModule`: each checks its arguments, notes what was asked for, and publishes
it to the unit; semantics and errors as torch's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import deprecated

from compiled_fsdp.errors import named
from compiled_fsdp.frontend.arguments import check_bool, check_callable, check_factor
from compiled_fsdp.frontend.state import State, get_state, states_below
from compiled_fsdp.ir.collectives import CUSTOM, asked_by
from compiled_fsdp.ir.spec import REGISTRY
from compiled_fsdp.torch_private.groups import group_named, is_alone
from compiled_fsdp.units.settings import Settings
from compiled_fsdp.wire import symmetric

from .hook_stream import HookOnStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
COMMUNICATIONS = ("all_gather", "reduce_scatter")  # those of them that say how bytes travel


class Setters:
    """The setters, for `FSDPModule` to inherit; methods with `_fsdp_` are for both classes."""

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
        self._fsdp_prefetch("forward", states_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Start the gathers of these when this module's backward begins, instead of what the plan
        would start there.

        Raises:
            ValueError: an entry is not an FSDPModule.
        """
        self._fsdp_prefetch("backward", states_of(modules))

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

        stream: to call it on, behind the reduction; as in stock, hooks that are set later without
            one run on it too.

        Raises:
            ValueError: several meshes in the unit, or a `stream` with HSDP.
            TypeError: `hook` cannot be called, or `stream` is none.
        """
        unit = self._fsdp_single_mesh("set_all_reduce_hook", "The hook").unit
        check_callable("set_all_reduce_hook", "hook", hook)
        if stream is not None and unit.mesh_info.replicate_size > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        stream = unit.hook_stream if stream is None else stream
        called = hook if stream is None else HookOnStream.of(hook, stream)
        unit.hook_stream = stream
        self._fsdp_set(recurse=False, all_reduce_hook=REGISTRY.key(called))

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
        """Let the next forward of the outermost module wait for `event`, which is recorded behind
        an optimizer's step on a stream of its own, before anything is gathered; once.

        The current stream waits, which gathers are behind. Stock's gathers then wait for the event
        alone, and run before what else the current stream still has to do. Where a larger function
        is compiled, the current stream waits right here.

        Raises:
            TypeError: `event` has no `wait()`.
        """
        if not callable(getattr(event, "wait", None)):
            raise TypeError(
                f"set_post_optim_event: event is {named(event)}, which has no wait(); should be a "
                "torch.Event, recorded behind the optimizer's step"
            )
        self._fsdp_own().set_post_optim_event(event)

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
        """Gather to symmetric memory, which lets NCCL copy by engines of its own
        (`NCCL_CTA_POLICY=2`) or by kernels that need fewer of the device's processors; collective.
        Also reduce from and to it, if `set_force_sum_reduction_for_comms(True)` was called before.

        In a graph its gathers are nodes apart, in no bucket and in no memory that the compiler
        plans, as those of `set_custom_all_gather`. `python -m compiled_fsdp simulate` accepts it.

        Raises:
            AssertionError: a custom communication is installed.
            ValueError: `backend` is not "NCCL".
            RuntimeError: parameters are not on a CUDA device, or this torch cannot allocate so.
        """
        state = self._fsdp_no_custom("set_symm_mem_for_comm")
        unit = state.unit
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: backend={backend!r}; should be 'NCCL'")
        groups = list(dict.fromkeys(flat.mesh_info.shard_group for flat in unit.flats))
        groups = [group for group in groups if not is_alone(group)]
        if not groups:
            return
        kind = unit.mesh_info.device.type
        if not symmetric.is_on(kind):
            raise RuntimeError(
                f"set_symm_mem_for_comm({backend!r}): the parameters of {unit.name!r} are gathered "
                f"on {kind!r}, and NCCL's symmetric memory is CUDA memory; nothing was changed. "
                "Leave it out: the numbers are the same"
            )
        symmetric.begin(
            backend, [*groups, *(group_named(name) for name in unit.reduce_groups.values())]
        )
        changed = {"all_gather": CUSTOM + REGISTRY.key(symmetric.ALL_GATHER)}
        if unit.settings.force_sum:
            changed["reduce_scatter"] = CUSTOM + REGISTRY.key(symmetric.REDUCE_SCATTER)
        self._fsdp_set(recurse=False, **changed)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are asynchronous anyway."""

    # -- helpers

    def _fsdp_below(self, recurse: bool) -> list[State]:
        return states_below(self, recurse=recurse)  # type: ignore[arg-type]

    def _fsdp_set(self, recurse: bool, **changes: object) -> None:
        for state in self._fsdp_below(recurse):
            settings: Settings = state.unit.settings
            for name, value in changes.items():
                setter = asked_by(str(value), SETTERS[name])
                before = asked_by(str(getattr(settings, name)), SETTERS[name])
                if before != setter:  # whose algorithm this one replaces
                    state.unit.options.ask(before, DEFAULTS[name], DEFAULTS[name])
                setattr(settings, name, value)
                state.unit.options.ask(setter, value, DEFAULTS[name])
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

    def _fsdp_no_custom(self, method: str) -> State:
        state = self._fsdp_own()
        settings = state.unit.settings
        known = {
            asked_by(algorithm, SETTERS[name])
            for name in COMMUNICATIONS
            if (algorithm := getattr(settings, name))
        }
        if found := sorted(known - {method}):
            raise AssertionError(f"{method} cannot be called after {found[0]}")
        return state

    def _fsdp_only_without_nccl(self, method: str) -> None:
        if dist.get_backend(self._fsdp_own().unit.mesh_info.shard_group) == "nccl":
            raise NotImplementedError(
                f"FSDPModule.{method}: not supported on NCCL yet; nothing was changed. Leave it out"
            )


def _check_sharding(state: State, method: str) -> None:
    if not state.unit.mesh_info.is_sharding:
        raise AssertionError(
            f"{method}: {state.unit.name!r} is not sharded, only replicated: its dp_mesh_dims "
            "names no dim to shard over. Leave it out"
        )


def states_of(modules: Iterable[object]) -> list[State]:
    """The states of sharded modules.

    Raises:
        ValueError: an entry is not an FSDPModule.
    """
    found = []
    for module in modules:
        if not isinstance(module, Setters):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        found.append(module._fsdp_own())
    return found
