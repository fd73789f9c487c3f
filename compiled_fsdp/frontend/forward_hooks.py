"""The hooks around the forward of a unit's modules, in a graph and in eager mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compiled_fsdp.options import of_unit
from compiled_fsdp.torch_private.dtensors import look_for_strided_once, move_all_once
from compiled_fsdp.torch_private.dynamo import (
    never_trace_hooks_alone,
    never_traced_alone,
    take_ints_for_constants,
)
from compiled_fsdp.torch_private.modules import cast_floating
from compiled_fsdp.units.reads import begin_forward, end_forward

from .fallback import AGREED
from .writes import watch_writes

if TYPE_CHECKING:
    from .state import State


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_read(unit_key: str, option: str) -> None:
    """The hook of a unit reads an option: in eager mode each time, in a graph while it is
    traced.
    """
    options = of_unit(unit_key)
    if options is not None:
        options.consume("forward hook", option)


class PreForward:
    """Forward pre-hook of a unit's module: casts inputs, and in eager mode gathers."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.unit_key = f"#{state.unit.number}"

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns what forward is to get."""
        policy = self.state.unit.mp_policy
        if policy.param_dtype is not None:
            if policy.cast_forward_inputs:
                args = cast_floating(args, policy.param_dtype)
                kwargs = cast_floating(kwargs, policy.param_dtype)
            else:
                _note_read(self.unit_key, "mp_policy.cast_forward_inputs")
        if torch.compiler.is_dynamo_compiling():
            if self.state.unit.settings.reduce_unused:
                torch._dynamo.graph_break(
                    msg="set_reduce_scatter_unused_params(True) needs the eager runtime"
                )
            if self.state.unit.why_outside_graphs:
                torch._dynamo.graph_break(msg=self.state.unit.why_outside_graphs)
            if self.state.unit.runs_eagerly:
                torch._dynamo.graph_break(msg=AGREED)
            begin_forward(self.unit_key)
            watch_writes()
            return args, kwargs
        self.state.note_eager()
        result: tuple[Any, Any] = self.state.runtime.pre_forward(module, (args, kwargs))
        return result


class PostForward:
    """Forward hook of a unit's module: in eager mode frees, then casts the output."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.unit_key = f"#{state.unit.number}"

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns what the caller is to get."""
        if torch.compiler.is_dynamo_compiling():
            stays = self.state.unit.reshard is False and torch.is_grad_enabled()
            end_forward(self.unit_key, stays=stays)
        else:
            output = self.state.runtime.post_forward(module, output)
        dtype = self.state.unit.mp_policy.output_dtype
        if dtype is None:
            return output
        _note_read(self.unit_key, "mp_policy.output_dtype")
        return cast_floating(output, dtype)


# Called from a frame that Dynamo gave up, a hook must run as it stands: traced alone, it would take
# the graph's branch.
never_trace_hooks_alone()
take_ints_for_constants()
look_for_strided_once()
move_all_once()
never_traced_alone(PreForward.__call__)
never_traced_alone(PostForward.__call__)
