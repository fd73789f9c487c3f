"""How often frames are compiled inside the calls of sharded modules: Dynamo's limit, for each unit
by itself.

Dynamo counts the compilations of a code object. Frames below a unit's entry are shared by all units
of a class, and where each needs a graph of its own, the ninth unit would run them eagerly. So what
counts here is how often a code object was compiled inside the calls of one unit.

What a frame over the limit becomes depends on whether graphs of it may gather. If not, as inside
the forward of a unit that runs eagerly anyway, Dynamo gives it up. If so, other ranks may be in
such a graph: it is compiled on, until all ranks run the unit eagerly from the same call on
(`together.py`). A larger function that calls a sharded module is compiled on for good: nothing of
ours runs before its calls, where ranks could settle on one; and what is called below a frame that
Dynamo gives up, it gives up too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakIdKeyDictionary

from compiled_fsdp.torch_private.compiled import before_compiling, last_recompile

from .calls import CALLS, innermost
from .entry import is_entry
from .fallback import note_larger, note_overrun, note_part
from .state import called_below, get_state

if TYPE_CHECKING:
    from types import CodeType

    from .state import State
    from .together import Together

# How often a code object was compiled inside the calls of each unit, by the unit's number.
# By identity: code that Dynamo has made may have slices for constants, which have no hash before
# Python 3.12.
_times: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _may_go_on(code: CodeType, is_first: bool, is_over: bool) -> bool:
    """Whether a frame is compiled that Dynamo would run as it is, if it is over a limit."""
    module, _ = innermost()
    state = get_state(module)
    if state is None:
        return is_over and _goes_on_for_good(code)
    state.note_callers()
    times = _count(code, state.unit.number, is_first)
    if not is_over or times < min(
        torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    ):
        return True
    gathering = [s for s in state.below() if not s.unit.runs_eagerly]
    # Then the unit's own parameters are there, by hooks that ran before.
    if not is_entry(code, module):
        gathering = [s for s in gathering if s is not state]
    if gathering:
        return _give_up(state, times, last_recompile(code))
    if not state.unit.runs_eagerly:
        note_part(state.unit, code, times)
    return False


def _give_up(state: State, times: int, why: str) -> bool:
    """Have a unit run eagerly; whether it is compiled on, since other ranks are to do so at the
    same time.
    """
    root = state.root
    together = root.together
    goes_on = together is None or not together.is_alone
    note_overrun(state.unit, times, why, _then(together))
    if together is not None and goes_on:
        where = f"unit {state.unit.name!r} was compiled {times} times on rank {together.rank}"
        together.wish(root.below().index(state), f"{where}, last because {why}")
    return goes_on


def _then(together: Together | None) -> str:
    """Returns what becomes of a unit at its limit, for people."""
    if together is not None and together.is_alone:
        return "It runs eagerly"
    if together is not None and together.can_settle:
        return "It is compiled on until all ranks run it eagerly, from the same call on"
    return "It is compiled on, since other ranks may be in a graph"


def _goes_on_for_good(code: CodeType) -> bool:
    """Whether a frame outside all calls is compiled on, since other ranks may be in a graph that
    gathers, of it or below.
    """
    state = next(
        (s for s in called_below(code) if s.together is None or not s.together.is_alone), None
    )
    if state is not None:
        note_larger(state.root.unit, code, last_recompile(code))
    return state is not None


def _count(code: CodeType, unit: int, is_first: bool) -> int:
    """How often before; Dynamo may have forgotten everything since."""
    if is_first:
        _times.pop(code, None)
    times: dict[int, int] = _times.setdefault(code, {})
    times[unit] = times.get(unit, 0) + 1
    return times[unit] - 1


def watch_calls(code: CodeType) -> None:
    """Count what is compiled inside calls of this code,
    `__call__` of a class of sharded modules.
    """
    CALLS.add(code)


before_compiling(_may_go_on)
