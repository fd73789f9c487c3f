"""The setters of `FSDPModule` that say how units reduce gradients, and what they communicate with;
semantics and errors as torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import deprecated

from compiled_fsdp.frontend.arguments import check_bool, check_callable, check_factor
from compiled_fsdp.ir.collectives import CUSTOM, asked_by
from compiled_fsdp.ir.spec import REGISTRY
from compiled_fsdp.torch_private.groups import group_named, is_alone
from compiled_fsdp.wire import symmetric

from .hook_stream import HookOnStream
from .setter_base import SETTERS, SetterBase, check_sharding

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_fsdp.frontend.state import State

COMMUNICATIONS = ("all_gather", "reduce_scatter")  # settings that say how bytes travel


class CommunicationSetters(SetterBase):
    """How units reduce, and what they communicate with."""

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
            check_sharding(state, "set_separate_reduce_scatter_group")
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
        self._fsdp_set(recurse=False, all_reduce_hook=REGISTRY.key(called, unit.brought))

    # -- communications

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with `comm`: `allocate(size, dtype=, device=)` and `comm(output_tensor=,
        input_tensor=, group=, async_op=)`.

        Raises:
            ValueError: several meshes in the unit.
        """
        unit = self._fsdp_single_mesh("set_custom_all_gather", "The custom comm").unit
        check_callable("set_custom_all_gather", "comm", comm, "allocate")
        self._fsdp_set(recurse=False, all_gather=CUSTOM + REGISTRY.key(comm, unit.brought))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with `comm`: `allocate(size, dtype=, device=)` and `comm(output_tensor=,
        input_tensor=, group=, op=)`.

        Raises:
            ValueError: several meshes in the unit.
        """
        unit = self._fsdp_single_mesh("set_custom_reduce_scatter", "The custom comm").unit
        check_callable("set_custom_reduce_scatter", "comm", comm, "allocate")
        self._fsdp_set(recurse=False, reduce_scatter=CUSTOM + REGISTRY.key(comm, unit.brought))

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
        changed = {"all_gather": CUSTOM + REGISTRY.key(symmetric.ALL_GATHER, unit.brought)}
        if unit.settings.force_sum:
            changed["reduce_scatter"] = CUSTOM + REGISTRY.key(
                symmetric.REDUCE_SCATTER, unit.brought
            )
        self._fsdp_set(recurse=False, **changed)

    # -- helpers

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
