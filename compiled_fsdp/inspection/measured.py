"""Reads a finished `torch.profiler.profile` of some steps: exposed communication, and the peak of
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compiled_fsdp.torch_private.tracing import allocations

from .profiles import WAIT, seconds_in

if TYPE_CHECKING:
    from .profiles import Profile, Step


def check(profile: Any) -> None:
    """A profile that has ended, or None.

    Raises:
        TypeError: something else, or a profile that is still on.
    """
    if profile is None:
        return
    if not isinstance(profile, torch.profiler.profile):
        raise TypeError(
            f"explain: profile is {profile!r}; should be a torch.profiler.profile, or None"
        )
    if profile.profiler is None or profile.profiler.kineto_results is None:
        raise TypeError(
            "explain: the profile has no results; leave its `with` block, or call stop(), before "
            "explain"
        )


def exposed(profile: Profile, step: Step) -> float:
    """Seconds of a step in which the training thread waited for a collective."""
    return seconds_in(step.span, (event for event in profile.events if event.name == WAIT))


def peak(profile: Any, device: str) -> int | None:
    """The most bytes allocated at once, above what was there when the profile began; None if memory
    was not recorded.
    """
    live: dict[int, int] = {}
    now = highest = 0
    changes = allocations(profile, device)
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        if size >= 0:
            now += size - live.get(address, 0)
            live[address] = size
        else:
            now -= live.pop(address, 0)
        highest = max(highest, now)
    return highest if changes else None
