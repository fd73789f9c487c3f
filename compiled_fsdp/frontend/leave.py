"""A call whose graph other ranks do not have: it is made again, eagerly (`wire/leaving.py`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.torch_private.dynamo import is_resumed, untraced
from compiled_fsdp.wire import leaving

from .entry import entry_names
from .fallback import may_not_fall_back, run_as_others
from .limits import CALLS
from .state import get_state

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from compiled_fsdp.eager.runtime import Runtime
    from compiled_fsdp.wire.leaving import LeftGraph


@untraced
def leave_graph(module: Any, error: LeftGraph) -> None:
    """From now on, run a module's unit eagerly, as other ranks do, and all inside it: these have
    graphs of other parts there.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    state = get_state(module)
    assert state is not None
    run_as_others(state.unit, [s.unit for s in state.below()], error.ranks)


def _can_leave(process_group: dist.ProcessGroup) -> bool:
    """Whether the graph that now runs is all that the innermost call of a sharded module has done,
    and all ranks of the model compare: then the call can be made again, if that is wanted.
    """
    frame: FrameType | None = sys._getframe()
    inside: list[CodeType] = []  # of the call, from the innermost one out
    while frame is not None and not any(frame.f_code is code for code in CALLS):
        inside.append(frame.f_code)
        frame = frame.f_back
    module = None if frame is None else frame.f_locals["self"]
    state = get_state(module)
    if state is None or state.unit.runs_eagerly or may_not_fall_back():
        return False
    if not all(map(_is_at_rest, state.runtime.tree.members)):
        return False  # other ranks may go on with what is gathered
    together = state.root.together
    if together is None or together.ranks != dist.get_process_group_ranks(process_group):
        return False
    entries = entry_names(module)
    begins = next((n for n, code in enumerate(inside) if code.co_name in entries), 0)
    is_whole = begins > 0 and inside[begins - 1].co_filename != torch.nn.modules.module.__file__
    return is_whole and not any(map(is_resumed, inside))


def _is_at_rest(runtime: Runtime) -> bool:
    """Whether nothing of the unit is gathered, or under way."""
    unit = runtime.unit
    is_sharded = not (runtime.is_unsharded or runtime.pending or runtime.pending_extensions)
    return is_sharded and not (unit.settings.overlap or unit.shared_with or unit.is_resident)


leaving.can_leave = _can_leave
