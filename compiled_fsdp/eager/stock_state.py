"""What torch's pipeline schedules look for on a sharded stage: the state that stock's
`fully_shard.state(module)` returns.

After a stage's last backward they call `post_backward()` on every parameter group of every state
below it and `_root_post_backward_final_callback()`. Here these reach our eager runtime.

Private torch used here (tried on 2.11, 2.13 and 2.15): `torch.distributed._composable.contract`'s
keys and `RegistryItem`, `torch.distributed._composable_state._module_state_mapping`, and
`FSDPState`, of which `_state_ctx.all_states`, `_fsdp_param_groups`, in 2.11 one
`_fsdp_param_group`, and `_root_post_backward_final_callback` are what the schedules read; and the
parameters of a group with their `_module_info`.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

if TYPE_CHECKING:
    from torch import nn

    from .runtime import Runtime


class StockState(FSDPState):
    """Looks like stock's state; holds no parameters and does its work through the eager runtime."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = weakref.ref(runtime)
        self._state_ctx: Any = SimpleNamespace(
            all_states=[self], is_last_backward=True, manual_backward_finalization=False
        )
        self._fsdp_param_groups = [self]  # type: ignore[list-item]
        if "_fsdp_param_group" in self.__dict__:
            self.__dict__["_fsdp_param_group"] = self

    def _alive(self) -> Runtime:
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    @property
    def fsdp_params(self) -> Any:
        """What an outer module of torch's `fully_shard` asks for before its first forward.

        Raises:
            RuntimeError: always, since that module would gather what is ours.
        """
        name = self._alive().unit.name
        raise RuntimeError(
            f"torch.distributed.fsdp.fully_shard was called on a module around {name!r}, which "
            "compiled_fsdp.fully_shard had sharded. One model cannot have units of both: import "
            "fully_shard from compiled_fsdp alone, or call compiled_fsdp.replace_stock() before "
            "anything else is imported"
        )

    def post_backward(self) -> None:
        """Free and reduce, for every unit below this stage."""
        for runtime in self._alive().tree.in_order():
            runtime.post_backward()

    def _root_post_backward_final_callback(self) -> None:
        tree = self._alive().tree
        tree.end_of_backward()
        for runtime in tree.in_order():
            runtime.unit.note_schedule()


def is_sharded_by_stock(parameter: nn.Parameter) -> bool:
    """Returns whether a unit of torch's `fully_shard` holds this shard."""
    return any(held.sharded_param is parameter for held in _held_by_stock())


def names_held_by_stock() -> set[tuple[nn.Module, str]]:
    """The modules, and names in them, whose parameters units of torch's `fully_shard` hold."""
    return {(h._module_info.module, h._module_info.param_name) for h in _held_by_stock()}


def _held_by_stock() -> list[Any]:
    states = {reference() for reference in list(_module_state_mapping.values())}
    return [
        held
        for state in states
        if isinstance(state, FSDPState) and not isinstance(state, StockState)
        for group in _groups(state)
        for held in group.fsdp_params
    ]


def _groups(state: FSDPState) -> list[Any]:
    """Several since torch 2.12, one or none before."""
    if "_fsdp_param_groups" in state.__dict__:
        return list(state.__dict__["_fsdp_param_groups"])
    group = state.__dict__.get("_fsdp_param_group")
    return [] if group is None else [group]


def show_to_schedules(module: nn.Module, state: StockState) -> None:
    """Let stock's `fully_shard.state(module)` find it, and torch's other composable APIs see that
    the module is taken.
    """
    function = stock_fully_shard.__wrapped__  # type: ignore[attr-defined]
    module.__dict__.setdefault(STATE_KEY, {})[function] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[function.__name__] = RegistryItem()
    _module_state_mapping[module] = weakref.ref(state)
