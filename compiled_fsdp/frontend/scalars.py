"""Numbers of a step that `explain` knows, for the logger that a training script has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiled_fsdp.errors import named
from compiled_fsdp.inspection.scalars import scalars

from .explain import explain

if TYPE_CHECKING:
    from torch import nn


def log_scalars(to: Any, model: nn.Module, step: int, *, profile: Any = None) -> dict[str, float]:
    """Log step time, exposed communication, peak memory, bytes and recompilations of a sharded
    model, under names that begin with `fsdp/`; communicates nothing, so one rank may call it.

    Args:
        to: TensorBoard's `SummaryWriter` (or Lightning's `logger.experiment`), a run of W&B or
            `wandb` itself, or whatever else has their `add_scalar` or `log`.
        model: as for `explain`.
        step: the number that the script counts its steps by.
        profile: as for `explain`; without it, exposed communication and peak are as predicted.

    Returns:
        What was logged; `inspection/scalars.py` says what each number is.

    Raises:
        TypeError: `to` has neither method, or as `explain`.
    """
    values = scalars(explain(model, profile=profile))
    if hasattr(to, "add_scalar"):
        for name, value in values.items():
            to.add_scalar(name, value, step)
    elif hasattr(to, "log"):
        to.log(values, step=step)
    else:
        raise TypeError(
            f"log_scalars: {named(to)} has neither add_scalar(name, value, step), as TensorBoard's "
            "SummaryWriter, nor log(values, step=), as a run of W&B"
        )
    return values
