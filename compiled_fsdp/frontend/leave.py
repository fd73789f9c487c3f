"""A call whose graph other ranks do not have: it is made again, eagerly (`wire/leaving.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compiled_fsdp.torch_private.compiled import is_resumed
from compiled_fsdp.torch_private.dynamo import untraced
from compiled_fsdp.wire import leaving

from .calls import innermost
from .entry import entry_names
from .fallback import may_not_fall_back, run_as_others
from .state import get_state

if TYPE_CHECKING:
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


def _why_stays(process_group: dist.ProcessGroup) -> str:
    """ "" if the graph that now runs is all that the innermost call of a sharded module has done,
    and all ranks of the model compare: then the call can be made again,
    if that is wanted. Else why not.
    """
    module, inside = innermost()
    state = get_state(module)
    if state is None:
        return (
            "its graph is of a larger function around the model, of which the rest would be "
            "done twice"
        )
    name = repr(state.unit.name)
    if may_not_fall_back():
        return 'set_fallback("error") was called'
    if state.unit.runs_eagerly:
        return f"its graph is of a part of the forward of {name}, which runs eagerly already"
    together = state.root.together
    if together is None or together.ranks != dist.get_process_group_ranks(process_group):
        return (
            "the group does not hold all ranks of the model's mesh, and others, replicas say, "
            f"would stay in their graphs of {name}"
        )
    entries = entry_names(module)
    begins = next((n for n, code in enumerate(inside) if code.co_name in entries), 0)
    is_whole = begins > 0 and inside[begins - 1].co_filename != torch.nn.modules.module.__file__
    if not is_whole or any(map(is_resumed, inside)):
        return (
            f"its graph is of a part of the forward of {name}, at a graph break that all ranks "
            "have: what came before it would be done twice"
        )
    return ""


leaving.why_stays = _why_stays
