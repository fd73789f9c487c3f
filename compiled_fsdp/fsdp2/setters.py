"""The setters of `FSDPModule` that say when units are gathered, freed and reduced; semantics and
errors as torch's. How they communicate: `communication_setters.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from compiled_fsdp.errors import named
from compiled_fsdp.frontend.arguments import check_bool

from .setter_base import SetterBase, check_sharding, states_of

if TYPE_CHECKING:
    import torch

    from compiled_fsdp.frontend.state import State


class Setters(SetterBase):
    """When units are gathered, freed and reduced."""

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
            check_sharding(state, "set_reshard_after_forward")
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

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted: gathers are asynchronous anyway."""

    def _fsdp_prefetch(
        self, direction: Literal["forward", "backward"], states: list[State]
    ) -> None:
        own = self._fsdp_own()
        own.runtime.set_prefetch(direction, [state.runtime for state in states])
        own.unit.options.ask(
            f"set_modules_to_{direction}_prefetch", [state.unit.name for state in states], []
        )
