"""What the setters of `FSDPModule` share: the state that one is called on, the units below it, and
what was asked for, which is noted and published to the unit.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from compiled_fsdp.frontend.state import State, get_state, states_below
from compiled_fsdp.ir.collectives import asked_by
from compiled_fsdp.units.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

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


class SetterBase:
    """What `FSDPModule` inherits through its setters. Names begin with `_fsdp_`, to leave others to
    the user's module.
    """

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


def check_sharding(state: State, method: str) -> None:
    """For `method`, which concerns the shard axis.

    Raises:
        AssertionError: `dp_mesh_dims` names only dims that replicate.
    """
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
        if not isinstance(module, SetterBase):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        found.append(module._fsdp_own())
    return found
