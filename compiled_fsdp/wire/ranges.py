"""Ranges in profiles: `compiled_fsdp::all_gather forward layers.0 (q.weight, k.weight, ...)`, at no
cost while no profiler is on.

Our own ops open theirs when they run, under every executor, since what they carry is among their
arguments; so does the wait for messages over gloo. The eager runtime opens one around each
collective and each wait. The backend without Inductor also names torch's collectives, by an
interpreter that takes over while a profiler is on. Under Inductor torch's collectives (all of them,
on NCCL) have the names that torch gives them: one more op at each would cost something always.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from compiled_fsdp.torch_private.autograd import backward_number
from compiled_fsdp.torch_private.tracing import is_profiling, unprofiled

OFF = nullcontext()
SHOWN = 4  # parameters in a name
GRAPH = "compiled_fsdp graph "  # no op, and the digest of its record
COUNTS = "compiled_fsdp counts "  # no op, and what `note_counts` says


def stock(name: str) -> AbstractContextManager[object]:
    """A range of this very name, as stock names it."""
    return torch.profiler.record_function(name) if is_profiling() else OFF


def around(op: str, phase: str, what: str) -> AbstractContextManager[object]:
    """A range for a collective, or a wait for it: `what` is the unit and its parameters, "layers.0
    (layers.0.w, layers.0.b)".
    """
    return (
        torch.profiler.record_function(title(op, phase, what)) if what and is_profiling() else OFF
    )


def title(op: str, phase: str, what: str) -> str:
    """The name of a range: parameters are named below their unit, and only the first."""
    unit, _, inside = what.partition(" (")
    names = [name.removeprefix(f"{unit}.") for name in inside.removesuffix(")").split(", ")]
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    op = op.removesuffix("_into_tensor").removesuffix("_tensor")
    return f"compiled_fsdp::{op} {phase} {unit} ({shown})"


def mark(record: str) -> None:
    """Say in a profile which graph runs from here on."""
    if record and is_profiling():
        with torch.profiler.record_function(f"{GRAPH}{digest(record)}"):
            pass


def note_counts(sent: torch.Tensor, received: torch.Tensor) -> None:
    """Say in a profile how many tokens go from here to each expert, and come from each rank for
    each expert here: "3 0 1 2 | 3 0 2 2".
    """
    if is_profiling():
        with unprofiled():  # these ops are not the model's
            both = torch.cat([sent.flatten(), received.flatten()]).tolist()
        numbers = [*map(str, both)]
        parts = " ".join(numbers[: sent.numel()]), " ".join(numbers[sent.numel() :])
        with torch.profiler.record_function(f"{COUNTS}{' | '.join(parts)}"):
            pass


@cache
def digest(record: str) -> str:
    """A short name for a graph, by what it says of itself."""
    return hashlib.sha256(record.encode()).hexdigest()[:16]


def phase_now() -> str:
    """Outside a graph: whether autograd is running."""
    return "backward" if backward_number() != -1 else "forward"
