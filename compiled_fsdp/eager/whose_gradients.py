"""Full parameters that stay registered, whose `.grad` is None, while the sharded ones have the
gradients: announced, as loops over `parameters()` pass over these. So are gradients that units keep
after an exception, which nobody sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.errors import shortened, warn_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compiled_fsdp.units.unit import Unit

ABOUT = "kept full parameters"


def say_after_backward(unit: Unit) -> None:
    """A backward has ended, and full parameters stay."""
    trained = [p for p in unit.params if p.unsharded is not None and p.unsharded.grad is not None]
    if not trained or unit.settings.sync == "retain" or unit.is_flat:
        return
    warn_once(
        f"compiled_fsdp: {unit.name} keeps its full parameters after a backward that "
        "reduces gradients, since set_reshard_after_backward(False) was called. Until they "
        "are dropped, parameters() gives these, whose .grad is None, as in torch's FSDP2: "
        f"clip_grad_norm_ and loops over gradients pass over {trained[0].fqn}. Give them the "
        "optimizer's parameters, call reshard() before, or set_reshard_after_backward(True) "
        "before the last backward of a step",
        about=ABOUT,
    )


def say_after_forward(unit: Unit) -> None:
    """Somebody looks through the parameters: full ones, which a forward has left."""
    having = [p.fqn for p in unit.params if p.sharded.grad is not None]
    if having:
        warn_once(
            f"compiled_fsdp: parameters() gives full parameters of {unit.name}, which a "
            "forward has left for a backward that has not come, and whose .grad is None, as in "
            f"torch's FSDP2. {shortened(having)} have gradients all the same, to which that "
            "backward adds: clip_grad_norm_, zero_grad() of a module around this one, and "
            "loops over gradients pass over them. Give them the optimizer's parameters, or call "
            "them before that forward or after that backward",
            about=ABOUT,
        )


def say_after_exception(units: Iterable[Unit], what: str) -> None:
    """An exception has ended a forward or a backward (`what`): gradients of backwards without
    synchronization outlive what a user may do about it.
    """
    kept = [u.name for u in units if not u.is_flat and any(flat.retained for flat in u.flats)]
    if kept:
        warn_once(
            f"compiled_fsdp: an exception left a {what} while {kept[0]} keeps gradients of a "
            "backward without synchronization (set_requires_gradient_sync(False)). "
            "zero_grad() does not drop them, as in torch's FSDP2: the next backward that "
            "reduces adds them. To drop them, call reset_iter_state() on the outermost "
            "sharded module",
            about="kept gradients",
        )
