"""What `Plan(check="checksums")` cannot be combined with, by unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiled_fsdp.ir.collectives import asked_by

if TYPE_CHECKING:
    from .unit import Unit


def refusal(unit: Unit) -> str:
    """Why a unit cannot be checked as the plan asks; "" if it can."""
    settings = unit.settings
    if not settings.check:
        return ""
    reasons = {
        "all-gather extensions of tensor subclasses (fsdp_pre_all_gather)": unit.has_extensions,
        "CPU offload beside an accelerator": bool(unit.offload and unit.offload.device),
        asked_by(settings.all_gather, "set_custom_all_gather"): bool(settings.all_gather),
        asked_by(settings.reduce_scatter, "set_custom_reduce_scatter"): bool(
            settings.reduce_scatter
        ),
        "a communication hook of FullyShardedDataParallel": bool(unit.is_reduced_by_user),
        "a pipeline schedule": settings.is_scheduled,
    }
    if settings.overlap:
        return (
            f"Plan(check={settings.check!r}): the optimizer of unit {unit.name!r} overlaps "
            "(overlap_optimizer), so that it steps units while gradients of others are still to be "
            "compared, and their steps could not be taken back. Leave out one of the two, or use "
            "compile_step, which compares before it updates"
        )
    found = next((what for what, applies in reasons.items() if applies), "")
    if not found:
        return ""
    return (
        f"Plan(check={settings.check!r}): unit {unit.name!r} uses {found}, which is not supported "
        "with it yet. Leave out one of the two"
    )
