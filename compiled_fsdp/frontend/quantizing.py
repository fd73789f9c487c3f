"""What the plan says of codes on the wire, and of checksums,
reaches the units: those that there are, and new ones.

A plan is for graphs, but codes change numbers, and what is checked communicates, so what runs
eagerly does so too; and graphs that were compiled before are compiled again.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch.distributed as dist

from compiled_fsdp.errors import warn_once
from compiled_fsdp.planning.plan import FOLLOWED, current_plan, when_followed_fields_change
from compiled_fsdp.units import checking
from compiled_fsdp.units.quantizing import refusal
from compiled_fsdp.units.registered import UNITS
from compiled_fsdp.units.replaced import check_one_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compiled_fsdp.units.unit import Unit


def follow(unit: Unit) -> None:
    """Let a unit do as the plan says."""
    plan, settings = current_plan(), unit.settings
    if all(getattr(plan, name) == getattr(settings, name) for name in FOLLOWED):
        return
    for name in FOLLOWED:
        setattr(settings, name, getattr(plan, name))
    unit.publish()
    unit.options.ask("check", settings.check)
    if not settings.check:
        unit.ledger.take()
        for flat in unit.flats:
            flat.resting.forget()
    for name in ("gather_quantized", "reduce_quantized"):
        codes = [getattr(param.spec, name) for param in unit.params]
        unit.options.ask(name, next(filter(None, codes), None))


def _follow_all() -> None:
    for unit in list(UNITS):
        if _has_groups(unit):  # or it follows when it is called, if it can be
            follow(unit)


def _has_groups(unit: Unit) -> bool:
    """Whether all of a unit's process groups are there; they may have been destroyed before the
    model was.
    """
    infos = {unit.mesh_info, *(flat.mesh_info for flat in unit.flats)}
    try:
        groups = [group for info in infos for group in info.axes]
        groups += [mesh.get_group(1) for mesh in unit.post_meshes.values()]
        for group in groups:
            dist.get_backend(group)
    except (RuntimeError, ValueError):
        return False
    return True


when_followed_fields_change(_follow_all)


def check_supported(unit: Unit) -> None:
    """Before a unit is called: it does as the plan says, and its parameters are in its buffers.

    Raises:
        NotImplementedError: it cannot; the text says why.
        TypeError: some of a buffer's parameters were cast without the others.
    """
    for flat in unit.flats:
        check_one_dtype(flat)
    follow(unit)
    if text := refusal(unit) or checking.refusal(unit):
        raise NotImplementedError(text)


def check_names(units: Iterable[Unit]) -> None:
    """Announce names of `Plan.exact` that no parameter of a model has."""
    patterns = current_plan().exact
    names = [name for unit in units for param in unit.params for name in param.names]
    missing = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if missing:
        such = f", such as {names[0]!r}" if names else ""
        warn_once(
            f"compiled_fsdp: Plan(exact={patterns!r}): no parameter of the model matches "
            f"{missing}. Names are those of named_parameters(){such}; * stands for anything"
        )
