"""Say, once for each place, which unit runs eagerly inside a compiled model; or refuse.

Private torch used here (tried on 2.13): `torch._dynamo.utils.graph_break_reasons`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Literal

import torch._dynamo.utils as dynamo

from compiled_fsdp.errors import is_users, shortened, warn_once
from compiled_fsdp.torch_private.compiled import (
    is_call_of_compiled,
    last_recompile,
    modes_that_keep_it_out,
    stance,
    why_given_up,
)
from compiled_fsdp.units.unit import original_class

from .entry import entry_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from traceback import FrameSummary
    from types import CodeType

    from compiled_fsdp.units.unit import Unit

LIMIT = "torch._dynamo.config.recompile_limit"
# in the reason of graph breaks that were told of already
AGREED = "compiled_fsdp: all ranks run this unit eagerly"

_policy: Literal["warn", "error"] = "warn"
_last_seen: object = None  # the newest entry of Dynamo's list that was looked at


class FallbackError(RuntimeError):
    """Dynamo could not trace a unit, and `set_fallback("error")` asked for an error."""


def set_fallback(policy: Literal["warn", "error"]) -> None:
    """Choose what happens when a part of a compiled model cannot be traced and its units run
    eagerly: "warn" (once a reason) or "error".

    Raises:
        ValueError: another value.
    """
    global _policy
    if policy not in ("warn", "error"):
        raise ValueError(f'set_fallback: got {policy!r}; should be "warn" or "error"')
    _policy = policy


def _warn_or_raise(text: str, about: str = "") -> None:
    """As `set_fallback` says; `about` is that of `warn_once`.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    if _policy == "error":
        raise FallbackError(f'{text}; set_fallback("error") makes this an error')
    warn_once(text, about=about)


def may_not_fall_back() -> bool:
    """Whether `set_fallback("error")` was called."""
    return _policy == "error"


# Of breaks that two settings of Dynamo avoid.
ON_DATA = ("Data dependent operator", "Dynamic shape operator", "Tensor.item()")


def note_eager_unit(unit: Unit, neighbours: Iterable[Unit], *, is_refused: bool) -> bool:
    """A unit's hook runs outside a graph: if something compiled has called it, and Dynamo broke a
    graph since the last call, that is why. Returns whether it did.

    is_refused: of a module that Dynamo traces no call of; `note_refused` says it.
    """
    global _last_seen
    reasons = dynamo.graph_break_reasons
    if not reasons or reasons[-1] is _last_seen or not is_call_of_compiled():
        return False
    known = [i for i, entry in enumerate(reasons) if entry is _last_seen]
    fresh = reasons[known[0] + 1 :] if known else list(reasons)
    _last_seen = reasons[-1]
    for entry in [e for e in fresh if AGREED not in e.reason]:
        frames = [frame for frame in reversed(entry.user_stack) if is_users(frame.filename)]
        where, found = "a call", [unit]
        if frames:
            frame = frames[0]
            where = f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
            found = next(
                filter(None, ([u for u in neighbours if _contains(u, f)] for f in frames)), [unit]
            )
        if is_refused and not frames:
            continue
        names = [repr(u.name) for u in found]
        why = " ".join(line.strip() for line in entry.reason.strip().splitlines()[:2])
        for broken in found:
            broken.why_eager[f"{why} (at {where})"] = None
        text = (
            f"compiled_fsdp: unit {shortened(names)} runs eagerly, not in a graph, because Dynamo "
            f"broke the graph at {where}\n"
            f"  {why}\n"
            "Its gathers are overlapped by a fixed rule instead of the plan, and so are those "
            f"around it. Results are the same{_remedy(entry.reason)}"
        )
        # Dynamo may say the same of one place in several ways.
        _warn_or_raise(text, about=f"break of {names} at {where}" if frames else "")
    return True


def _remedy(reason: str) -> str:
    """Returns what keeps the graph whole where it depends on data, as the counts of routed tokens
    do.
    """
    if not any(words in reason for words in ON_DATA):
        return ""
    return (
        ". To keep the graph, let Dynamo take numbers and sizes that depend on data for symbols: "
        "torch.compile(..., fullgraph=True), or set torch._dynamo.config.capture_scalar_outputs "
        "and capture_dynamic_output_shape_ops to True"
    )


def note_skipped(unit: Unit) -> None:
    """A unit whose call is compiled runs outside a graph, and Dynamo has broken none: it skips the
    frame from now on.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    why, remedy = _why_skipped(unit)
    unit.why_eager[why] = None
    text = (
        f"compiled_fsdp: unit {unit.name!r} runs eagerly although its call is compiled, and Dynamo "
        f"has broken no graph: {why}. {remedy}Results are the same"
    )
    _warn_or_raise(text)


def _why_skipped(unit: Unit) -> tuple[str, str]:
    """Returns why Dynamo runs a call as it is, and a sentence on what to do."""
    if modes := modes_that_keep_it_out():
        return f"it compiles nothing while {', '.join(modes)} is on", ""
    reset = "torch._dynamo.reset() lets it begin anew. "
    names = [name for module in unit.modules for name in entry_names(module)]
    known = why_given_up(names)
    if known is None and stance().endswith("eager_then_compile"):
        return f"torch.compiler.set_stance({stance()!r}) lets the first call run as it is", ""
    if known is None:
        why = "it has given up the call for good, as after an exception while that was traced"
        return why, reset
    reason, stack = known
    frame = next((f for f in reversed(stack) if is_users(f.filename)), None)
    where = "" if frame is None else f" at {frame.filename}:{frame.lineno}, in {frame.name}"
    lines = [line.strip() for line in reason.strip().splitlines()]
    raised = next((line.split(RAISED)[1] for line in lines if RAISED in line), "")
    told = f"tracing it raised {raised}" if raised else " ".join(lines[:2])
    return f"it has given up the call for good{where}: {told.rstrip('.')}", reset


RAISED = "Developer debug context: raised exception "


def note_refused(unit: Unit) -> None:
    """A unit whose call is compiled is a module that Dynamo traces no call of.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    kind = original_class(unit.modules[0]).__name__
    why = f"Dynamo traces no {kind}, unless torch._dynamo.config.allow_rnn is set"
    unit.why_eager[why] = None
    text = (
        f"compiled_fsdp: unit {unit.name!r} runs eagerly, not in a graph: {why}. "
        "Results are the same"
    )
    _warn_or_raise(text)


def note_overrun(unit: Unit, times: int, why: str, then: str) -> None:
    """Dynamo will not compile a unit's call again, or would not if other ranks were not to stop at
    the same time; then what.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    unit.why_eager[f"compiled {times} times ({LIMIT})"] = None
    _tell_overrun(
        unit,
        f"unit {unit.name!r} was compiled {times} times, which is {LIMIT}\n  last because "
        f"{why}\n{then}",
    )


def run_eagerly(unit: Unit, units: Sequence[Unit], why: str) -> None:
    """All ranks run a unit eagerly from now on, and all units inside it.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    for below in units:
        below.runs_eagerly = True
        below.why_eager[f"{why} ({LIMIT})"] = None
    names = shortened([repr(below.name) for below in units])
    _tell_overrun(
        unit, f"unit {names} runs eagerly from now on, on all ranks, since {why}\nThat is {LIMIT}"
    )


def run_as_others(unit: Unit, units: Sequence[Unit], ranks: Sequence[int] | None = None) -> None:
    """Run a unit eagerly from now on, and all units inside it, since some ranks of its group have
    no graph of it; those, or None on these ranks themselves.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    whose = "this rank has" if ranks is None else f"ranks {list(ranks)} have"
    for below in units:
        below.runs_eagerly = True
        below.why_eager[f"{whose} no graph of {unit.name}, and others of the group had one"] = None
    names = [repr(below.name) for below in units]
    text = (
        f"compiled_fsdp: unit {shortened(names)} runs eagerly from now on, on all ranks: {whose} "
        f"no graph of {unit.name!r}, others of the group had one, and ranks "
        "of a group must communicate alike. Dynamo broke the graph there, of which a warning "
        "tells, or the model was not compiled there. Results are the same. To keep the graph, have "
        "all ranks do the same in forward, and what one alone does, as printing, around it"
    )
    _warn_or_raise(text)


def _tell_overrun(unit: Unit, what: str) -> None:
    """Once for each unit."""
    _warn_or_raise(
        f"compiled_fsdp: {what}. Results are the same. Mark sizes that change from call to call "
        "with torch._dynamo.mark_dynamic, pass numbers that change as tensors, or raise the limit",
        about=f"recompile limit of unit {unit.number}",
    )


def note_larger(unit: Unit, code: CodeType, why: str) -> None:
    """A function that calls a sharded module was compiled as often as Dynamo would, and is compiled
    on.

    Raises:
        FallbackError: `set_fallback("error")` was called.
    """
    text = (
        f"compiled_fsdp: {_place(code)}, which calls unit {unit.name!r}, has reached {LIMIT}\n"
        f"  last because {why}\n"
        "It is compiled on for every new kind of input, since other ranks may be in a graph. Mark "
        "sizes that change from call to call with torch._dynamo.mark_dynamic, or pass numbers "
        "that change as tensors"
    )
    _warn_or_raise(text, about=f"{_place(code)} and unit {unit.number}")


def note_part(unit: Unit, code: CodeType, times: int) -> None:
    """A frame inside the forward of a unit that runs eagerly anyway runs as it is from now on."""
    warn_once(
        f"compiled_fsdp: {_place(code)} was compiled {times} times inside unit "
        f"{unit.name!r}, which is {LIMIT}\n  last because {last_recompile(code)}\nIt is run as it "
        "is. Results are the same",
        about=f"{_place(code)} in unit {unit.number}",
    )


def _place(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _contains(unit: Unit, frame: FrameSummary) -> bool:
    """Whether the line stands in the code of one of the unit's modules."""
    for module in unit.own_modules():
        for entry in vars(original_class(module)).values():
            code = getattr(inspect.unwrap(entry) if callable(entry) else entry, "__code__", None)
            if code is None or code.co_filename != frame.filename or frame.lineno is None:
                continue
            lines = [line for _, _, line in code.co_lines() if line is not None]
            if lines and code.co_firstlineno <= frame.lineno <= max(lines):
                return True
    return False
