"""What a unit's forward or backward starts to gather ahead: the units of the user's explicit lists,
or those that come next by the order of the forward before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tree import WHO

if TYPE_CHECKING:
    from .runtime import Runtime


def in_forward(runtime: Runtime) -> None:
    """Start the gather of the unit whose forward came next, and the copies of the one behind it."""
    tree, unit = runtime.tree, runtime.unit
    following = tree.next_forward.get(runtime)
    if runtime.prefetch["forward"]:
        unit.options.consume(WHO, "set_modules_to_forward_prefetch")
    may_prefetch = (
        following is not None and unit.settings.forward_prefetch and not following.is_apart
    )
    by_default = [following] if following is not None and may_prefetch else []
    for target in runtime.prefetch["forward"] or by_default:
        if target.start_unshard() and not runtime.prefetch["forward"]:
            tree.ahead.append(target)
    after = tree.next_forward.get(following) if following is not None else None
    if by_default and after is not None and not after.is_apart and after.start_copies():
        tree.ahead.append(after)


def in_backward(runtime: Runtime) -> None:
    """Start the gather of the unit whose forward came before, and the copies of the one before
    that.
    """
    index = runtime.indices.pop() if runtime.indices else 0
    earlier = [r for r in reversed(runtime.tree.order[max(0, index - 2) : index])]
    if runtime.prefetch["backward"]:
        runtime.unit.options.consume(WHO, "set_modules_to_backward_prefetch")
    for target in runtime.prefetch["backward"] or earlier[:1]:
        if target.unit.settings.unshard_in_backward:
            target.start_unshard()
    for target in () if runtime.prefetch["backward"] else earlier[1:]:
        if target.unit.settings.unshard_in_backward:
            target.start_copies()
