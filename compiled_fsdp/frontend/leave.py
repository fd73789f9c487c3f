"""A call whose graph other ranks do not have: it is made again, eagerly (`wire/leaving.py`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire import leaving

from .entry import entry_names
from .fallback import run_as_others
from .limits import CALLS
from .state import get_state

if TYPE_CHECKING:
    from types import FrameType

    from compiled_fsdp.wire.leaving import LeftGraph

RESUMED = "torch_dynamo_resume_in_"  # how Dynamo names what is left of a frame after a break


@untraced
def leave_graph(module: Any, error: LeftGraph) -> None:
    """From now on, run a module's unit eagerly, as other ranks do, and all inside it: these have
    graphs of other parts there.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    state = get_state(module)
    assert state is not None
    state.runtime.end_failed_forward()
    run_as_others(state.unit, [s.unit for s in state.below()], error.ranks)


def _can_leave(process_group: dist.ProcessGroup) -> bool:
    """Whether the graph that now runs is all that the innermost call of a sharded module has done,
    and all ranks of the model compare: then the call can be made again.
    """
    frame: FrameType | None = sys._getframe()
    inside: list[FrameType] = []  # of the call, from the innermost one out
    while frame is not None and not any(frame.f_code is code for code in CALLS):
        inside.append(frame)
        frame = frame.f_back
    module = None if frame is None else frame.f_locals["self"]
    state = get_state(module)
    if state is None or state.unit.runs_eagerly:
        return False
    together = state.root.together
    if together is None or together.ranks != dist.get_process_group_ranks(process_group):
        return False
    names = [each.f_code.co_name for each in inside]
    begins = next((n for n, name in enumerate(names) if name in entry_names(module)), 0)
    return (
        begins > 0
        and inside[begins - 1].f_code.co_filename != torch.nn.modules.module.__file__
        and not any(name.startswith(RESUMED) for name in names)
    )


leaving.can_leave = _can_leave
